"""The backend over FlashAttention on a fake GPU, in the shape of 8B models; a stand-in computes what the kernel would.

The stand-in takes what the kernel of each vLLM version takes. vLLM's own implementation calls it as on CUDA.
"""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from lkv.context.compression import compress_ids
from lkv.context.context import Context
from lkv.integrations.vllm.attention import LkvFlashAttentionBackend, LkvFlashAttentionImpl
from lkv.integrations.vllm.passes import Batch, Row, attach_batch
from lkv.methods.request import CompressionRequest
from lkv.utils.cpp_compiler import find_compiler
from tests import families
from tests.context.test_compression import Words
from tests.vllm.signatures import FILE

pytest.importorskip("triton")
if find_compiler() is None:
    pytest.skip("there is no C++ compiler to build the fake GPU with", allow_module_level=True)
from tests.fake_gpu.device import load, watched
from tests.fake_gpu.kernels import fake_gpus
from tests.kernels.conftest import fast_interpreter  # noqa: F401 (a fixture)

KERNEL = "vllm_flash_attn/flash_attn_interface:flash_attn_varlen_func"
ACCEPTED = set.intersection(*(set(names[KERNEL]) for names in json.loads(FILE.read_text()).values()))
FLASH = "vllm.v1.attention.backends.flash_attn"
HEADS, GROUP, DIM, SIZE, BLOCKS, LAYERS = 8, 4, 128, 16, 12, 2  # Llama-3.1-8B and Qwen3-8B, but for the layers
SCALE = DIM**-0.5
# (request, first and last new token of the pass, tokens in pages): a new question, answers, and one without a context.
ROWS = [Row(0, 0, 5, 5), Row(1, 5, 6, 20), Row(2, 6, 13, 7), Row(3, 13, 14, 33)]
TABLES = torch.tensor([[3, 11, 11], [5, 0, 11], [7, 11, 11], [2, 9, 4]], dtype=torch.int32)
FOLLOWED = {1: 0, 2: 0, 3: 1}  # request -> context


def attend(query, keys, values, hidden=None):
    """Attention of [n, d] to keys [T, d] in float64, and its log-sum-exp."""
    scores = query.double() @ keys.double().T * SCALE
    scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ values.double(), scores.logsumexp(-1)


def paged(x, table, length):
    """The first tokens [T, H, d] of a request in pages [blocks, size, H, d]."""
    return x[table.long()].flatten(0, 1)[:length]


def flash_attn_varlen_func(**own):
    """FlashAttention with pages, in float64; refuses what the kernel refuses."""
    assert set(own) <= ACCEPTED, set(own) - ACCEPTED
    x = SimpleNamespace(**{"out": None, "return_softmax_lse": False, "window_size": None, "softcap": 0} | own)
    assert x.causal and x.window_size in (None, [-1, -1]) and not x.softcap
    assert all(own.get(name) is None for name in ("q_descale", "alibi_slopes", "s_aux", "mask_mod", "dynamic_causal"))
    assert type(x.max_seqlen_q) is type(x.max_seqlen_k) is int and x.fa_version == 3
    assert x.block_table.dtype == x.seqused_k.dtype == x.cu_seqlens_q.dtype == torch.int32
    assert len(x.block_table) == len(x.seqused_k) == len(x.cu_seqlens_q) - 1
    assert all(y.stride(-1) == 1 for y in (x.q, x.k, x.v, x.block_table))
    assert {y.device for y in (x.q, x.k, x.v, x.block_table, x.seqused_k, x.cu_seqlens_q)} == {x.q.device}
    with watched():  # what the stand-in copies is none of the program's doing
        q, k, v, tables, lengths, ends = (y.cpu() for y in (x.q, x.k, x.v, x.block_table, x.seqused_k, x.cu_seqlens_q))
        assert int(lengths.max()) <= x.max_seqlen_k and int(ends.diff().max()) <= x.max_seqlen_q
        out, lse = torch.zeros(q.shape), torch.zeros(q.shape[1], len(q))
        for (start, stop), table, length in zip(pairwise(ends.tolist()), tables, lengths.tolist(), strict=True):
            hidden = torch.arange(length) > length - (stop - start) + torch.arange(stop - start)[:, None]
            keys, values = paged(k, table, length), paged(v, table, length)
            for head in range(q.shape[1]):
                part = attend(q[start:stop, head], keys[:, head // GROUP], values[:, head // GROUP], hidden)
                out[start:stop, head], lse[head, start:stop] = part
        out = (torch.empty_like(x.q) if x.out is None else x.out).copy_(out)
        return (out, lse.to(x.q.device)) if x.return_softmax_lse else out


@pytest.fixture(scope="module", params=["Llama", "Qwen3"])
def contexts(request, tmp_path_factory):
    """A model on the fake GPU and two contexts, one of them in tiers; and the same on the CPU."""
    load()
    shape = {"num_attention_heads": HEADS * GROUP, "num_key_value_heads": HEADS, "head_dim": DIM, "hidden_size": 64}
    model = families.build(request.param, torch.float32, **shape, num_hidden_layers=LAYERS)
    folder, own, moved = tmp_path_factory.mktemp("contexts"), [], []
    for number, options in enumerate(({"retention": 0.4}, {"memory": "30%"})):
        ids = torch.randint(3, 67, (50 + 9 * number,), generator=torch.Generator().manual_seed(number)).tolist()
        compression = CompressionRequest.of_text({"method": "knorm", **options})
        own.append(compress_ids(model, Words(), ids, compression))
        own[-1].save(folder / f"{number}.kv")
    fake = families.build(request.param, torch.float32, **shape, num_hidden_layers=LAYERS).to("fake:0")
    with torch.autograd.set_multithreading_enabled(False):
        moved = [Context.load(folder / f"{number}.kv", fake, Words()) for number in range(2)]
    return own, moved


@pytest.fixture
def impl(monkeypatch):
    monkeypatch.setattr(f"{FLASH}.get_flash_attn_version", lambda **_: 3)
    monkeypatch.setattr(f"{FLASH}.flash_attn_supports_quant_query_input", lambda: False)
    monkeypatch.setattr(f"{FLASH}._FA4_DENSE_ATTENTION_KERNEL", flash_attn_varlen_func)
    monkeypatch.setattr(
        "vllm.v1.attention.backends.fa_utils.flash_attn_varlen_func", flash_attn_varlen_func, raising=False
    )
    # vLLM's second runner on a CPU pins no memory.
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch._C.TensorBase.pin_memory)
    return LkvFlashAttentionImpl(HEADS * GROUP, DIM, SCALE, HEADS, None, None, "auto")


def run_pass(impl, contexts, inputs, device, stubbed):
    """The attention of all layers, and what each asked of the device; the plan of the pass is in the first."""
    query, cache = (x.to(device) for x in inputs)
    starts = torch.tensor([row.start for row in ROWS] + [ROWS[-1].stop], dtype=torch.int32)
    lengths = torch.tensor([row.length for row in ROWS], dtype=torch.int32)
    metadata = SimpleNamespace(
        num_actual_tokens=len(query), max_query_len=7, max_seq_len=33, query_start_loc=starts.to(device),
        seq_lens=lengths.to(device), block_table=TABLES.to(device), causal=True, scheduler_metadata=None,
        max_num_splits=0, mm_prefix_query_range_tensor=None, rswa_prefix_lens=None,
    )  # fmt: skip
    one, outputs, asked = torch.ones((), device=device), [], []
    positions = torch.zeros(len(query), dtype=torch.long, device=device)
    with fake_gpus(stubbed=stubbed):
        for layer in range(LAYERS):
            names = SimpleNamespace(layer_name=f"model.layers.{layer}.self_attn.attn", _k_scale=one, _v_scale=one)
            output = torch.empty_like(query)
            with watched() as log:
                if layer == 0:
                    batch, followers = Batch(HEADS), {}
                    for row in ROWS[1:]:
                        context = contexts[FOLLOWED[row.index]]
                        followers.setdefault(id(context), (context, []))[1].append(row)
                    batch.add_followers(followers, torch.device(device))
                    batch.shift(positions)
                    attach_batch(batch, {"layer": metadata})
                impl.forward(names, query, None, None, cache[layer], metadata, output)
            outputs.append(output.cpu())
            asked.append(log)
    return outputs, asked, positions.cpu()


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    query = torch.randn(ROWS[-1].stop, HEADS * GROUP, DIM)
    cache = torch.randn(LAYERS, BLOCKS, HEADS, SIZE, 2 * DIM)
    cache[:, 11] = torch.nan  # pages that nobody may look at
    return query, cache


def test_a_pass_attends_to_pages_and_contexts(impl, contexts, inputs):
    own, moved = contexts
    outputs, _, positions = run_pass(impl, moved, inputs, "fake:0", stubbed=False)
    query, cache = inputs
    for layer, output in enumerate(outputs):
        keys, values = cache[layer].transpose(1, 2).split(DIM, -1)
        for row in ROWS:
            context = own[FOLLOWED[row.index]] if row.index in FOLLOWED else None
            assert positions[row.start : row.stop].tolist() == [context.tokens if context else 0] * row.tokens
            kept = context and context.cache.ragged_layers[layer].store.restore()
            hidden = torch.arange(row.length) > row.length - row.tokens + torch.arange(row.tokens)[:, None]
            for head in range(HEADS * GROUP):
                group = head // GROUP
                seen = [paged(x, TABLES[row.index], row.length)[:, group] for x in (keys, values)]
                blind = hidden
                if kept is not None:
                    start, length = int(kept.starts[0, group]), int(kept.lens[0, group])
                    pools = (x[start : start + length] for x in (kept.k, kept.v))
                    seen = [torch.cat(pair) for pair in zip(pools, seen, strict=True)]
                    blind = torch.cat([torch.zeros(row.tokens, length, dtype=torch.bool), hidden], 1)
                expected = attend(query[row.start : row.stop, head], *seen, blind)[0]
                torch.testing.assert_close(output[row.start : row.stop, head].double(), expected, atol=2e-5, rtol=2e-5)


def test_a_pass_waits_for_nothing(impl, contexts, inputs):
    """The host plans ahead of the device. Contexts cost launches: 22 a layer for two contexts, one of them in tiers."""
    _, asked, _ = run_pass(impl, contexts[1], inputs, "fake:0", stubbed=True)
    for log in asked:
        assert log.count("wait") == 0, log.summary("wait")
    assert [log.count("copy") for log in asked] == [2, 0]  # tables of the pass
    assert [log.count("launch") for log in asked] == [33, 22], asked[1].summary("launch")


def test_attention_runs_between_graphs():
    """Contexts differ between passes: vLLM captures the rest of the model, and runs attention eagerly."""
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

    builder = LkvFlashAttentionBackend.get_builder_cls()
    support = builder.get_cudagraph_support(None, None)
    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=mode)
    config.set_splitting_ops_for_v1(all2all_backend="", data_parallel_size=1)
    assert config.resolve_cudagraph_mode_and_sizes(support, "FLASH_ATTN") == CUDAGraphMode.PIECEWISE
