"""The accesses of the Triton kernels to memory, in the interpreter: bounds, order between programs, bytes, int32."""

import pytest
import torch

pytest.importorskip("triton")
import triton as triton_package
import triton.language as tl

import lkv.kernels.ragged_attention.triton as ragged
import lkv.kernels.selection.triton as selection
import lkv.kernels.soft_mask_attention.triton as soft
from lkv.kernels import triton_helpers
from lkv.kernels.ragged_attention import RaggedKV, append_and_attend, ragged_attention
from lkv.kernels.selection import ScoreWeights
from tests.kernels.pools import assert_equals_reference, coded_pools, pool_of, split_randomly

if not triton_helpers.is_interpreted():
    pytest.skip("TRITON_INTERPRET=0 was set", allow_module_level=True)
from tests.kernels.interpreter import Endless, unlimited_memory, watched


@triton_package.jit
def racing_kernel(x, tickets, ordered: tl.constexpr):
    """The first program writes what the second one reads."""
    if tl.program_id(0) == 0:
        tl.store(x, 1.0)
        if ordered:
            tl.atomic_add(tickets, 1, sem="acq_rel")
    else:
        if ordered:  # noqa: SIM102 (a kernel)
            if tl.atomic_add(tickets, 1, sem="acq_rel") == 0:
                return
        tl.store(x + 1, tl.load(x))


@triton_package.jit
def straying_kernel(x, n):
    at = tl.arange(0, 16)
    tl.store(x + at, tl.load(x + at, mask=at < n), mask=at < n)


def test_races_and_stray_accesses_are_found():
    """Else nothing below means anything. The order of the two programs does not matter."""
    for seed in range(4):
        with watched(seed):
            racing_kernel[(2,)](torch.zeros(2), torch.zeros(1, dtype=torch.int32), True)
            with pytest.raises(AssertionError, match=r"program . (touches|writes) what"):
                racing_kernel[(2,)](torch.zeros(2), torch.zeros(1, dtype=torch.int32), False)
    with watched() as traffic:
        straying_kernel[(1,)](torch.zeros(9), 9)
        assert (traffic.fetched, traffic.stored, traffic.accesses) == (36, 36, 18)
        with pytest.raises(AssertionError, match="1 numbers outside"):
            straying_kernel[(1,)](torch.zeros(9), 10)


@pytest.fixture
def many_programs(monkeypatch):
    """Slices much shorter than heads, and several parts a head that are joined in turns."""
    monkeypatch.setattr(ragged, "_PROGRAMS_WITHOUT_GPU", 16)
    monkeypatch.setattr(ragged, "_MIN_SLICE", 2)
    monkeypatch.setattr(ragged, "_JOINED_AT_ONCE", 64)
    ragged._launch.cache_clear()
    yield
    ragged._launch.cache_clear()


# Spans of many slices, of one that another span shares, and of none.
LENGTHS = [[[90, 1], [0, 31]], [[0, 0], [0, 0]]]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("lengths", LENGTHS, ids=["uneven", "empty"])
def test_a_step_in_any_order_of_its_programs(lengths, many_programs):
    """Each span is joined once, by whoever comes last; the same launch serves the next step."""
    torch.manual_seed(0)
    kv = pool_of(lengths, 4, 16, 8, torch.float32)
    k, v, starts, lens, *_ = kv
    full, buffers = [[length + 4 for length in row] for row in lengths], {}
    key, value, query = torch.randn(2, 2, 4, 16), torch.randn(2, 2, 4, 8), torch.randn(2, 6, 4, 16)
    for step, begin in enumerate((0, 1, 2)):
        new = slice(begin, begin + 1) if begin < 2 else slice(2, 4)
        with watched(step) as traffic:
            out = append_and_attend(query[:, :, new], key[:, :, new], value[:, :, new], kv, 0.3, "triton", buffers)
        assert traffic.launches == ["slice_kernel"] if begin < 2 else ["append_kernel", "slice_kernel"]
        assert not buffers["tickets", torch.device("cpu")].any()
        exact = ragged_attention(
            query[:, :, new].double(), RaggedKV(k.double(), v.double(), starts, lens), 0.3, backend="reference"
        )
        assert (out - exact).abs().max() < 1e-5
    assert lens.tolist() == full
    for row in range(2):
        for head in range(2):
            end = int(starts[row, head]) + full[row][head]
            assert torch.equal(k[end - 4 : end], key[row, head]) and torch.equal(v[end - 4 : end], value[row, head])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_tiers_in_any_order_of_programs(rows, many_programs):
    torch.manual_seed(rows)
    lengths = split_randomly([[50, 0], [3, 31]], 2)
    pools = coded_pools(lengths, ((8, 4), (4, 3)), rows + 1, 16, 8, torch.float32)
    with watched(rows) as traffic:
        assert_equals_reference(pools, 2, rows, 0.25)
    steps = ["slice_kernel"] if rows == 1 else ["append_kernel", "slice_kernel"]
    assert traffic.launches[-len(steps) :] == steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tiers", [((8, 4), (4, 3)), ((3, 8),)], ids=str)
def test_many_rows_restore_codes_once(tiers, dtype, many_programs, monkeypatch):
    """Whatever the order of programs, with spans and tiers without entries, and with a basis."""
    torch.manual_seed(len(tiers))
    monkeypatch.setattr(ragged, "_MAX_ROWS_OVER_CODES", 5)
    lengths = split_randomly([[50, 0], [40, 31]], len(tiers))
    pools = coded_pools(lengths, tiers, 3, 24, 16, dtype, has_basis=True)
    with watched(len(tiers)) as traffic:
        assert_equals_reference(pools, 2, 3, 0.25)
    assert traffic.launches[-3:] == ["append_kernel", "restore_kernel", "slice_kernel"]


@pytest.mark.parametrize("has_basis", [False, True])
def test_codes_of_wide_heads_in_float32_are_restored_for_one_row_too(has_basis):
    """Their registers would spill otherwise; the new token is stored where the next step finds it."""
    torch.manual_seed(0)
    pools = coded_pools([[[9, 0]], [[5, 7]]], ((8, 4),), 1, 256, 256, torch.float32, has_basis=has_basis)
    with watched(1) as traffic:
        assert_equals_reference(pools, 2, 1, 1 / 16)
    assert traffic.launches[-3:] == ["append_kernel", "restore_kernel", "slice_kernel"]


def test_a_decode_step_reads_each_entry_once():
    """Bytes of k and v, and little beside them."""
    torch.manual_seed(0)
    lengths, dim = [[900, 140, 1500, 33]], 64
    pools = pool_of(lengths, 1, dim, dim, torch.bfloat16)
    q, new = torch.randn(1, 16, 1, dim).bfloat16(), torch.randn(1, 4, 1, dim).bfloat16()
    with watched() as traffic:
        append_and_attend(q, new, new, pools, 0.125, "triton")
    entries = sum(lengths[0]) * 2 * dim * 2
    assert entries < traffic.fetched < 1.05 * entries
    assert traffic.stored < 0.1 * entries


def eviction_traffic(tokens, heads=8, dim=128):
    """Bytes of the scores of a prompt, and of all of its eviction at 15%, as an 8B model's layer has it."""
    torch.manual_seed(0)
    key, value = (torch.randn(1, tokens, heads, dim).bfloat16().transpose(1, 2) for _ in range(2))
    by_head = [torch.randn(heads, *shape) for shape in ((dim,), (dim,), (20, dim), (4,), (), (13,), (13,))]
    weights = ScoreWeights(torch.randn(heads, 2 * dim, dim).bfloat16() / 16, *by_head)
    tables, mean_tables = torch.randn(2, tokens, dim).bfloat16(), torch.randn(2, dim)
    prompt, keep = selection.Entries.of_prompt(key, value), torch.full((1, heads), tokens * 15 // 100).int()
    pools = [torch.zeros(int(keep.sum()), dim).bfloat16() for _ in range(2)]
    with watched() as traffic:
        scores = selection.score(prompt, weights, (*tables,), (*mean_tables,), 0, tokens, dim**-0.5)
        scored = traffic.fetched + traffic.stored
        selection.move(prompt, (*pools, (keep.cumsum(1) - keep).int()), scores, keep[None])
    assert traffic.launches == ["score_kernel", "select_kernel"]
    return scored, traffic.fetched + traffic.stored


def test_eviction_reads_and_writes_little_of_a_token():
    """Of every further token in each head: k and v are 512 bytes, its score 4, and the rotation's tables 64 a head.

    It was 10.7 KB where PyTorch's operators computed the scores alone.
    """
    short, long = (eviction_traffic(tokens) for tokens in (60, 100))
    scored, whole = ((b - a) / (40 * 8) for a, b in zip(short, long, strict=True))
    assert scored == 512 + 4 + 64
    # The selection reads a score, and 15% of k and v, and writes these.
    assert whole == scored + 4 + 0.15 * 2 * 512 < 1100


# Batch rows, KV heads, query heads of each, entries a head, new tokens: what 32 bits cannot number.
FAR = {
    "a prompt of 600,000 tokens at once": (1, 8, 4, 600_000, 600_000),
    "64 query heads": (1, 8, 8, 300_000, 300_000),
    "a part for many rows": (64, 8, 4, 130_000, 8192),
    "decoding": (64, 32, 1, 1_000_000, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tokens first", "heads first"])
@pytest.mark.parametrize("case", FAR.values(), ids=FAR)
def test_no_offset_overflows(case, layout):
    """Strides of tensors that fit nowhere, of which the first and the last program run, and join."""
    batch, heads, group, entries, rows = case
    dim, spans, packed = 128, batch * heads, rows * group
    q, key, value, k, v, out = (Endless(torch.bfloat16) for _ in range(6))
    lse, parts, extremes = (Endless(torch.float32) for _ in range(3))
    lens = torch.full((batch, heads), entries, dtype=torch.int32)
    starts = (torch.arange(spans).view_as(lens) * entries).int()
    launch = ragged._launch(lens.device, q.dtype, packed, spans, group, dim, dim)
    # Short slices: entries are what the interpreter takes time for.
    slices = 100
    programs = spans * slices

    def strides(count):
        return (count * rows * dim, dim, count * dim) if layout == "tokens first" else (
            count * rows * dim, rows * dim, dim)  # fmt: skip

    of_q, of_new = strides(heads * group), strides(heads)
    # All other programs have arrived.
    tickets = torch.zeros(spans * launch.tiles + 1, dtype=torch.int32)
    tickets[0] = tickets[-2] = slices - 1
    tickets[-1] = programs * launch.tiles - 2 if rows == 1 else 0
    with unlimited_memory():
        ragged.kernels.slice_kernel[(programs, launch.tiles, 1)](
            q, key, value, k, v, starts, lens, out, lse, parts, extremes, tickets, spans, heads, rows, 0, 0.1, *of_q,
            *of_q, *of_new[:2], *of_new[:2], *[None] * 15,
            **launch.slice_options | {"CAUSAL": True, "NEW": int(rows == 1), "SOFTCAP": 0.0},
        )  # fmt: skip
    assert not tickets.any()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tokens first", "heads first", "pools"])
def test_no_offset_of_eviction_overflows(layout):
    """32 KV heads of a million tokens; pools that end at the last of 2^31 entries."""
    tokens, heads, batch, dim = 1_000_000, 32, 2, 128
    spans = heads * batch
    strides = (tokens * heads * dim, dim, heads * dim) if layout == "tokens first" else (
        tokens * heads * dim, tokens * dim, dim)  # fmt: skip
    starts = torch.full((spans,), 2**31 - 1 - tokens, dtype=torch.int32)
    counts = torch.full((spans,), tokens, dtype=torch.int32) if layout == "pools" else None
    where = starts if layout == "pools" else None
    strides = (0, 0, 0) if layout == "pools" else strides
    key, value, weight = (Endless(torch.bfloat16) for _ in range(3))
    tables = [Endless(torch.float32) for _ in range(12)]
    scores, positions, order = Endless(torch.float32), Endless(torch.int32), Endless(torch.int32)
    sizes = {"BLOCK": 64, "BLOCK_H": 64, "BLOCK_U": 128, "BLOCK_R": 16, "BLOCK_K": 16, "DIM": dim}
    kernels = selection.kernels
    with unlimited_memory():
        for arrival in (True, False):
            out = None if arrival and layout == "pools" else tables[0]
            kernels.score_kernel[(-(-tokens // 64), spans)](
                key, value, where, counts, *strides, *strides, scores, positions, out, *tables[1:3], weight,
                *tables[3:], heads, tokens, 0, tokens, 0, 0.1, ARRIVAL=arrival, EVICTION=True, GROUP=4, ROWS=9,
                KNOTS=13, PRECISION="tf32x3", **sizes,
            )  # fmt: skip
        limits = torch.full((1, spans), tokens, dtype=torch.int32)
        kernels.select_kernel[(-(-tokens // 64), spans)](
            scores, limits, counts, None, None, order, starts[None], tokens, 64, heads, key, value, scores, positions,
            where, tokens, *strides, *strides, key, value, scores, positions, starts, RECENT=32 * (layout == "pools"),
            TIERS=1, BLOCK=2**16, MOVED=64, BLOCK_T=1, DIM=dim, VALUE_DIM=dim, BLOCK_D=dim, BLOCK_V=dim,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tokens first", "heads first"])
def test_no_offset_of_training_overflows(layout):
    """Rows and columns of tensors of 8 texts of 600,000 tokens, as a view of them has their strides."""
    tokens, size, heads, kv_heads, batch, dim = 600_000, 130, 32, 8, 8, 128

    def strides(count):
        found = (count * tokens * dim, dim, count * dim) if layout == "tokens first" else (
            count * tokens * dim, tokens * dim, dim)  # fmt: skip
        return dict(zip(("batch", "head", "row"), found, strict=True))

    arguments = {"rows": size, "columns": size, "heads": heads, "kv_heads": kv_heads, "dim": dim, "width": dim}
    arguments |= {"scale": 0.1, "block_rows": 64, "block_columns": 64}
    arguments |= {f"{name}_{axis}": stride for name in "qkv" for axis, stride in strides(
        heads if name == "q" else kv_heads).items()}  # fmt: skip
    q, k, v, out, d_out, d_q, d_k, d_v = (Endless(torch.bfloat16) for _ in range(8))
    log_mask, lse, delta, d_mask = (Endless(torch.float32) for _ in range(4))
    kernels = soft.kernels
    with unlimited_memory():
        kernels.forward[(3, batch * heads)](q, k, v, log_mask, out, lse, **arguments)
        kernels.query_gradient[(3, batch * heads)](q, k, v, log_mask, out, d_out, lse, delta, d_q, **arguments)
        kernels.key_gradient[(3, batch * kv_heads)](
            q, k, v, log_mask, d_out, lse, delta, d_k, d_v, d_mask, bounded=True, **arguments
        )
