"""The Triton kernels of the ragged cache against the float64 reference.

They run in Triton's interpreter on the CPU, and on a GPU where TRITON_INTERPRET=0 is set.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from experiments import ragged_attention as benchmark
from lkv.cache.ragged_cache import RaggedCache
from lkv.cache.tiers import rotation
from lkv.errors import BackendError
from lkv.kernels.ragged_attention import api, append_and_attend, ragged_attention
from lkv.methods.budgets import PerHead
from lkv.methods.method import Method
from lkv.methods.selectors import Knorm, Random
from tests.conftest import tiny_llama
from tests.kernels.pools import (
    assert_attention,
    assert_equals_reference,
    coded_pools,
    poison_buffers,
    pool_of,
    split_randomly,
)

triton_helpers = pytest.importorskip("lkv.kernels.triton_helpers")
triton = pytest.importorskip("lkv.kernels.ragged_attention.triton")
if not triton_helpers.is_interpreted() and not torch.cuda.is_available():
    pytest.skip("TRITON_INTERPRET=0 was set, and there is no GPU", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton import jit  # noqa: E402

DEVICE = "cpu" if triton_helpers.is_interpreted() else "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Every buffer that the kernels ask for comes full of NaN."""
    poison_buffers(monkeypatch)
    with torch.device(DEVICE):
        yield


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("lengths", "heads", "rows", "dim", "dtype"),
    [
        # The two 16-bit dtypes have the same blocks.
        *(([[1, 257]], 4, 1, dim, torch.float32) for dim in (64, 80, 96, 128, 256)),
        *(([[1, 257]], 4, 1, dim, torch.bfloat16) for dim in (64, 96, 256)),
        *(([[1, 257]], 4, 1, dim, torch.float16) for dim in (80, 128)),
        # Questions of many tokens, a batch of more spans than programs, and heads that end with a slice.
        *(([[rows, rows + 150]], 4, rows, 16, torch.float32) for rows in (9, 35)),
        ([[1 + 7 * row % 40, 1 + 11 * row % 40] for row in range(9)], 4, 1, 8, torch.float32),
        *(([lengths], 2, 1, 8, torch.float32) for lengths in ([128, 128], [256, 128])),
    ],
)
def test_shapes(lengths, heads, rows, dim, dtype):
    torch.manual_seed(dim)
    pools = pool_of(lengths, 2, dim, dim, dtype)
    assert_attention(torch.randn(len(lengths), heads, rows, dim).to(dtype), pools, dim**-0.5)


@pytest.fixture
def short_slices(monkeypatch):
    """Slices much shorter than heads, and more parts a head than are joined at once."""
    monkeypatch.setattr(triton, "_PROGRAMS_WITHOUT_GPU", 24)
    monkeypatch.setattr(triton, "_MIN_SLICE", 2)
    monkeypatch.setattr(triton, "_JOINED_AT_ONCE", 512)
    triton._launch.cache_clear()
    yield
    triton._launch.cache_clear()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("older", [[70, 20], [0, 79]])
def test_slices_much_shorter_than_heads_and_new_tokens(older, rows, short_slices):
    """Slices in which a row sees nothing, too."""
    torch.manual_seed(rows)
    kv = pool_of([[count + rows for count in older]], 1, 8, 8, torch.float32)
    # Later entries weigh more, so that the greatest score rises from part to part.
    kv.k_pool.mul_(torch.linspace(0.1, 3, len(kv.k_pool))[:, None])
    assert_attention(torch.randn(1, 4, rows, 8), kv, 1.0)


@pytest.mark.parametrize(
    ("dim", "dtype", "message"),
    [(8, torch.float64, "float64, but the Triton kernels take float32"), (257, torch.float32, "sizes are 257 and 8")],
)
def test_a_backend_by_name_never_falls_back(dim, dtype, message):
    pools = pool_of([[4, 5]], 0, dim, 8, dtype)
    with pytest.raises(BackendError, match=message):
        ragged_attention(torch.zeros(1, 2, 1, dim, dtype=dtype), pools, 1.0, backend="triton")


def test_the_device_is_named_where_triton_cannot_run(monkeypatch):
    monkeypatch.setattr(triton_helpers, "is_interpreted", lambda: False)
    assert "needs a CUDA device" in triton.unsupported_reason(torch.device("cpu"), torch.float32, 64, 64)


def test_a_gpu_with_little_shared_memory_is_refused(monkeypatch):
    properties = SimpleNamespace(name="Small", major=8, minor=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(triton_helpers, "is_interpreted", lambda: False)
    monkeypatch.setattr(triton_helpers, "shared_memory", lambda device: 48 * 1024)
    assert "Small has too little shared memory" in triton.unsupported_reason(
        torch.device("cuda", 0), torch.float32, 256, 256
    )
    monkeypatch.setattr(triton_helpers, "shared_memory", lambda device: 227 * 1024)
    assert triton.unsupported_reason(torch.device("cuda", 0), torch.float32, 256, 256) is None
    properties.major = 7
    assert "Small has compute capability 7.9" in triton.unsupported_reason(
        torch.device("cuda", 0), torch.float16, 64, 64
    )


@pytest.mark.parametrize(("memory", "stages"), [(166_912, 3), (101_376, 2), (232_448, 4)])
def test_stages_are_counted_as_triton_buffers_them(memory, stages):
    """One block less than stages is in shared memory: 99 KB are enough for asynchronous copies."""
    assert triton.pipeline_stages(16, 128, 128, torch.bfloat16, memory) == stages
    assert triton.pipeline_stages(64, 128, 128, torch.bfloat16, 101_376) == 2


class NoWaiting(TorchDispatchMode):
    """Raises at operators whose result the host must have before it can go on."""

    waiting = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique", "is_nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name.split("::")[1].rstrip("2_") not in self.waiting, func
        return func(*args, **kwargs or {})


def refuse(self, *args, **kwargs):
    raise AssertionError("a tensor was read by the host")


@pytest.mark.parametrize("rows", [1, 3])
def test_a_decode_step_never_waits_for_the_device(rows, monkeypatch):
    """With kernels that do not wait: the layers, spans and dispatch around them do not either."""
    with torch.device("cpu"):
        model = tiny_llama(dtype=torch.float32)
        cache = RaggedCache(model, method=Method("random", PerHead([[0.5, 0.2], [0.1, 0.6], [0.0, 1.0]]), Random()))
        model(torch.randint(3, 67, (rows, 40)), past_key_values=cache, use_cache=True)
        fake = SimpleNamespace(
            append_and_attend=lambda q, key, value, kv, scale, buffers, softcap: kv.lens.add_(1)[0, 0] * q
        )

        def step() -> None:
            token, place = torch.full((rows, 1), 5), torch.tensor([[cache.get_seq_length()]])
            with NoWaiting(), pytest.MonkeyPatch.context() as patch:
                for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
                    patch.setattr(torch.Tensor, name, refuse)
                model(token, position_ids=place, past_key_values=cache, use_cache=True)

        with pytest.raises(AssertionError, match="read by the host"):
            step()  # with gradients the loop over the heads serves, which reads the lengths
        cache.rewind()
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(api, "_available_backend", lambda *args: "triton")
            patch.setattr(api, "_module", lambda name: fake)
            for _ in range(3):
                step()
        assert cache.get_seq_length() == 43


@pytest.mark.slow
@torch.no_grad()
def test_the_cache_over_the_kernels_equals_the_cache_over_the_loop(monkeypatch):
    ids = torch.randint(3, 67, (2, 40))
    logits = {}
    for backend in ("loop", "triton"):
        with monkeypatch.context() as patch:
            patch.setattr(api, "_available_backend", lambda *args, name=backend: name)
            model = tiny_llama(dtype=torch.float32, num_hidden_layers=2).to(DEVICE)
            method = Method("knorm", PerHead([[0.5, 0.2], [0.0, 1.0]]), Knorm())
            cache = RaggedCache(model, method=method, slack=2)
            model(ids, past_key_values=cache, use_cache=True)
            steps = [
                model(part, past_key_values=cache, use_cache=True).logits for part in ids[:, :6].split([3, 1, 2], 1)
            ]
            cache.rewind()
            steps.append(model(ids[:, 7:8], past_key_values=cache, use_cache=True).logits)
            logits[backend] = torch.cat(steps, 1)
    torch.testing.assert_close(logits["triton"], logits["loop"], atol=2e-4, rtol=2e-4)


SMALL = (
    f"--device {DEVICE} --tokens 150 --layers 1 --heads 4 --kv-heads 2 --dim 16 --dtype float32 --repeats 1 "
    "--batches 1 2"
)


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path, monkeypatch):
    out = tmp_path / "ragged.json"
    monkeypatch.setattr(benchmark, "_COPIED", {DEVICE: 1024})
    with torch.device("cpu"):
        benchmark.main([*SMALL.split(), "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["batch"], row["method"]) for row in rows] == [(b, m) for b in (1, 2) for m in ("full", *["lkv"] * 3)]
    for row in rows:
        assert row["layers"] == 1 and (row["method"] == "full") == (row["value"] == 1) == (row["realised"] == 1)
        read = row["realised"] * 150 * row["batch"] * 2 * 2 * 16 * 4
        assert row["bytes_a_second"] == pytest.approx(1e6 * read / row["microseconds_a_layer"], rel=1e-4)


def test_the_benchmark_times_no_wrong_kernel(tmp_path, monkeypatch):
    plain = triton.attend
    monkeypatch.setattr(triton, "attend", lambda *args, **options: (plain(*args)[0] * 1.001, None))
    monkeypatch.setattr(benchmark, "_COPIED", {DEVICE: 1024})
    out = tmp_path / "ragged.json"
    with torch.device("cpu"), pytest.raises(SystemExit, match="nothing was timed"):
        benchmark.main([*SMALL.split(), "--out", str(out)])
    assert not out.exists()


def test_the_benchmark_says_that_there_is_no_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        benchmark.main(["--out", str(tmp_path / "none.json")])
    assert "PyTorch sees no device 'cuda' here; run it where it does" in capsys.readouterr().err


@jit
def rotating_kernel(x, matrix, out, step_in, step_out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    row, channel = tl.arange(0, 4)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (channel < WIDTH) & (row < 3)
    turned = triton_helpers.rotate(
        tl.load(x + row * WIDTH + channel, mask=inside, other=0.0), matrix, step_in, step_out, WIDTH
    )
    tl.store(out + row * WIDTH + channel, turned, mask=inside)


@pytest.mark.parametrize("width", [8, 16, 24, 64, 80, 96, 128, 256])
def test_butterflies_are_the_rotation_of_the_tiers(width):
    """There and back, also where a head has an odd factor."""
    matrix = rotation(width, torch.float32, torch.device(DEVICE))
    x, out = torch.randn(3, width), torch.full((3, width), torch.nan)
    for steps, exact in (((width, 1), matrix), ((1, width), matrix.mT)):
        rotating_kernel[(1,)](x, matrix, out, *steps, width, max(16, triton.triton.next_power_of_2(width)))
        torch.testing.assert_close(out.double(), x.double() @ exact.double(), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [((8, 4), (4, 3)), ((3, 3),)], ids=str)
def test_slices_much_shorter_than_tiers(tiers, short_slices):
    """Slices that begin and end in any tier, and tiers and spans without entries."""
    torch.manual_seed(3)
    for _ in range(2):
        lengths = split_randomly([[150, 0, 20], [1, 97, 3]], len(tiers))
        assert_equals_reference(coded_pools(lengths, tiers, 3, 16, 8, torch.float32), 2, 3, 0.25)
    counts = torch.zeros(len(tiers) + 1, 1, 2, dtype=torch.long)
    for number in range(len(tiers) + 1):  # all entries in one tier, none in the others
        counts[number - 1], counts[number] = 0, 40
        assert_equals_reference(coded_pools(counts, tiers, 3, 16, 8, torch.float32), 1, 1, 0.25)


def test_a_backend_without_tiers_says_so():
    pools = coded_pools([[[5]], [[0]]], ((8, 8),), 1, 8, 8, torch.float32)
    new = [torch.zeros(1, 1, 1, 8)] * 3
    with pytest.raises(BackendError, match="'loop' cannot run: it reads no codes"):
        append_and_attend(*new, pools.kv, 1.0, "loop")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_v_of_any_size_over_tiers(dtype):
    """Also where those of a warp's first entries, by which the others are divided, are small or 0."""
    torch.manual_seed(0)
    pools = coded_pools([[[300, 70]], [[40, 0]], [[3, 9]]], ((8, 4), (4, 3)), 1, 16, 16, dtype, value_spread=300.0)
    assert_equals_reference(pools, 2, 1, 0.25)
