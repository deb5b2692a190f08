"""The Triton kernels of soft-masked attention against the float64 reference, values and gradients.

They run in Triton's interpreter on the CPU, and on a GPU where TRITON_INTERPRET=0 is set.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lkv.errors import BackendError
from lkv.kernels.soft_mask_attention import api, continuation_attention, soft_mask_attention

triton_helpers = pytest.importorskip("lkv.kernels.triton_helpers")
triton = pytest.importorskip("lkv.kernels.soft_mask_attention.triton")
if not triton_helpers.is_interpreted() and not torch.cuda.is_available():
    pytest.skip("TRITON_INTERPRET=0 was set, and there is no GPU", allow_module_level=True)
DEVICE = "cpu" if triton_helpers.is_interpreted() else "cuda"


class Poison(TorchDispatchMode):
    """Fills every tensor that is allocated without values with NaN."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        unset = (torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like)
        if func.overloadpacket in unset and out.is_floating_point():
            out.fill_(torch.nan)
        return out


def inputs(batch, kv_heads, groups, rows, length, dim, dtype, seed=0):
    """q, k, v and a log-mask of which a third each is -inf, 0 and between; q and v lie in memory as [B, T, H, d]."""
    torch.manual_seed(seed)
    q = torch.randn(batch, rows, kv_heads * groups, dim).to(dtype).transpose(1, 2)
    k = torch.randn(batch, kv_heads, length, dim).to(dtype)
    v = torch.randn(batch, length, kv_heads, dim).to(dtype).transpose(1, 2)
    kind = torch.randint(3, (batch, kv_heads, length))
    log_mask = torch.where(kind == 0, -torch.inf, torch.where(kind == 1, 0.0, -12 * torch.rand(kind.shape)))
    return [x.to(DEVICE).requires_grad_() for x in (q, k, v, log_mask)]


def tiles(rows, columns):
    tile = triton.Tile(rows, columns, 4, 1)
    return triton.Tiles(tile, tile, tile, 0)


def values_and_gradients(attend, arguments, dtype):
    """Output and gradients of `attend` on copies of the arguments in `dtype`, all in float64."""
    arguments = [x.detach().to(dtype).requires_grad_() for x in arguments]
    torch.manual_seed(1)
    out = attend(*arguments, arguments[0].shape[-1] ** -0.5)
    weights = torch.randn(out.shape).to(out)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, arguments, weights))]


def assert_as_exact_as_eager(arguments, attend, slack=3.0):
    """The error against float64 is at most `slack` times the one that eager attention in the same dtype makes."""
    dtype = arguments[0].dtype
    torch.manual_seed(1)
    out = attend(*arguments, arguments[0].shape[-1] ** -0.5)
    weights = torch.randn(out.shape).to(out)
    ours = [out, *torch.autograd.grad(out, arguments, weights)]
    assert [x.dtype for x in ours] == [dtype, *(x.dtype for x in arguments)]
    exact = values_and_gradients(api.attend_by_formula, arguments, torch.float64)
    eager = values_and_gradients(api.attend_by_formula, arguments, dtype)
    for own, truth, rough in zip(ours, exact, eager, strict=True):
        # Eager attention may be exact by luck: one rounding of the result, and of float32 sums of d terms, is allowed.
        rounding = max(torch.finfo(dtype).eps * float(truth.abs().max()), 2e-6)
        allowed = max(float((rough - truth).abs().max()), rounding)
        assert float((own.detach().double() - truth).abs().max()) <= slack * allowed


# Rows and columns that fill their blocks and that do not, in the first block and in later ones; each head size and each
# shape of blocks with every dtype.
@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("heads", "rows", "older", "dim", "dtype", "blocks"),
    [
        ((2, 1, 2), 40, 0, 64, torch.float32, (16, 16)),
        ((1, 2, 1), 32, 16, 80, torch.float32, (16, 32)),
        ((1, 1, 3), 1, 30, 96, torch.float32, (32, 16)),
        ((1, 2, 2), 17, 13, 64, torch.bfloat16, (16, 32)),
        ((1, 1, 2), 32, 8, 96, torch.bfloat16, (32, 16)),
        ((2, 1, 1), 40, 30, 80, torch.bfloat16, (16, 16)),
        ((1, 1, 2), 33, 5, 80, torch.float16, (32, 16)),
        ((2, 2, 1), 16, 0, 96, torch.float16, (16, 16)),
        ((1, 1, 1), 7, 29, 64, torch.float16, (16, 32)),
    ],
    ids=str,
)
def test_values_and_gradients_are_as_exact_as_eager_attention(heads, rows, older, dim, dtype, blocks):
    """`heads`: batch rows, KV heads, and query heads of each."""
    arguments = inputs(*heads, rows, rows + older, dim, dtype)
    with Poison():
        assert_as_exact_as_eager(arguments, lambda *a: triton.attend(*a, tiles=tiles(*blocks)))


@pytest.mark.parametrize(("dim", "dtype"), [(128, torch.bfloat16), (256, torch.float16), (64, torch.float32)])
def test_the_tiles_in_use_are_as_exact_as_eager_attention(dim, dtype):
    arguments = inputs(1, 1, 2, 130, 150, dim, dtype)
    with Poison():
        assert_as_exact_as_eager(arguments, triton.attend)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [30, 12])
def test_empty_rows_are_zero_and_pass_no_gradient(dtype, rows):
    """The first 21 keys of head 0 have m = 0, and all of head 1."""
    q, k, v, _ = inputs(1, 2, 2, rows, 30, 64, dtype)
    log_mask = torch.zeros(1, 2, 30, device=DEVICE)
    log_mask[0, 0, :21] = log_mask[0, 1] = -torch.inf
    arguments, results = (q, k, v, log_mask.requires_grad_()), []
    for backend in ("triton", "sdpa", "reference"):
        out = soft_mask_attention(*arguments, backend=backend)
        grads = torch.autograd.grad(out.sum() + out.square().sum(), arguments)
        empty = rows - 9
        for x in (out[0, :2, :empty], out[0, 2:], grads[0][0, :2, :empty], grads[0][0, 2:]):
            assert not bool(x.any())
        for x in grads[1:]:
            assert not bool(x[0, 0, :21].any() or x[0, 1].any())
        assert bool(out[0, :2, empty:].any(-1).all())
        results.append([out, *grads])
    tolerance = max(2e-5, 64 * torch.finfo(dtype).eps)
    for own in results[:2]:
        torch.testing.assert_close(own, results[2], atol=tolerance, rtol=tolerance)


def test_a_key_of_mask_zero_is_as_good_as_absent():
    """With m = 0 even a huge key and value leave no trace."""
    q, k, v, log_mask = (x.detach() for x in inputs(1, 1, 2, 20, 40, 64, torch.float32))
    log_mask[..., 5:9] = -torch.inf
    before = soft_mask_attention(q, k, v, log_mask, backend="triton")
    k[:, :, 5:9], v[:, :, 5:9] = 1e4, -1e4
    torch.testing.assert_close(soft_mask_attention(q, k, v, log_mask, backend="triton"), before, atol=0, rtol=0)


def test_a_last_dimension_with_a_stride_and_expanded_batches_are_read_right():
    q, k, v, log_mask = (x.detach() for x in inputs(1, 1, 2, 20, 30, 64, torch.float32))
    odd = [torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0].expand(2, -1, -1, -1) for x in (q, k, v)]
    out = soft_mask_attention(*odd, log_mask.expand(2, -1, -1), backend="triton")
    expected = soft_mask_attention(q, k, v, log_mask, backend="reference").expand(2, -1, -1, -1)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"dim": 48}, r"48 and 48.*\(64, 80, 96, 128, 256\)"),
        ({"value_dim": 80}, "64 and 80"),
    ],
)
def test_triton_by_name_says_why_it_cannot_run(change, message):
    dim = change.get("dim", 64)
    dtype = change.get("dtype", torch.float32)
    q, v = (torch.randn(1, 1, 2, size, device=DEVICE).to(dtype) for size in (dim, change.get("value_dim", dim)))
    with pytest.raises(BackendError, match=f"'triton' cannot run: .*{message}"):
        soft_mask_attention(q, q, v, torch.zeros(1, 1, 2, device=DEVICE), backend="triton")


def gpu(monkeypatch, major, shared):
    """A CUDA device with these properties, and kernels that are not interpreted."""
    properties = SimpleNamespace(name="TestGPU", major=major, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(triton_helpers, "shared_memory", lambda _: shared)
    monkeypatch.setattr(triton_helpers, "is_interpreted", lambda: False)
    api._available_backend.cache_clear()
    triton.tiles_on.cache_clear()
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("major", "shared", "message"), [(7, 65536, "compute capability 7.0"), (8, 65536, "65536 bytes of shared memory")]
)
def test_a_gpu_too_small_falls_back_only_where_allowed(monkeypatch, caplog, major, shared, message):
    device = gpu(monkeypatch, major, shared)
    with caplog.at_level(logging.WARNING):
        assert [api._available_backend("auto", device, torch.bfloat16, 256, 256) for _ in range(2)] == ["sdpa", "sdpa"]
    assert len(caplog.records) == 1 and message in caplog.text
    with pytest.raises(BackendError, match=message):
        api._available_backend("triton", device, torch.bfloat16, 256, 256)
    api._available_backend.cache_clear()


@pytest.mark.parametrize(("shared", "rows"), [(232_448, 128), (101_376, 64)])
def test_tiles_fit_the_shared_memory(monkeypatch, shared, rows):
    """Hopper's 227 KB and the 99 KB of a consumer card."""
    device = gpu(monkeypatch, 9, shared)
    assert api._available_backend("auto", device, torch.bfloat16, 256, 256) == "triton"
    chosen = triton.tiles_on(device, torch.bfloat16, 256)
    assert chosen.shared <= shared and chosen.forward.rows == rows
    for cached in (api._available_backend, triton.tiles_on):
        cached.cache_clear()


@pytest.mark.parametrize("error", [ImportError("No module named 'triton'", name="triton"), OSError("no libcuda")])
def test_without_triton_the_reason_is_named(monkeypatch, error):
    def missing():
        raise error

    monkeypatch.setattr(api, "_triton_module", missing)
    api._available_backend.cache_clear()
    with pytest.raises(BackendError, match="triton cannot be imported"):
        api._available_backend("triton", torch.device("cuda"), torch.bfloat16, 128, 128)


@pytest.mark.parametrize(
    ("prompts", "rows", "columns", "kv_heads", "dtype"),
    [(1, 66, 34, 1, torch.float32), (2, 5, 64, 2, torch.float32), (2, 33, 37, 2, torch.bfloat16)],
)
def test_continuations_read_their_frozen_prompts(prompts, rows, columns, kv_heads, dtype):
    """Against the formula in float64 over a copy of the prompt for each continuation; the prompt gets no gradient."""
    torch.manual_seed(rows)
    owners, dim = torch.tensor([0, 1, 0] if prompts > 1 else [0, 0]), 64
    count, heads = len(owners), 2 * kv_heads
    arguments = [
        torch.randn(count, h, rows, dim).to(DEVICE, dtype).requires_grad_() for h in (heads, kv_heads, kv_heads)
    ]
    prompt = [torch.randn(prompts, kv_heads, columns, dim).to(DEVICE, dtype).requires_grad_() for _ in range(2)]
    kind = torch.randint(4, (count, kv_heads, columns))
    log_mask = torch.where(kind == 0, -1e4, torch.where(kind == 1, 0.0, -9 * torch.rand(kind.shape)))
    log_mask = log_mask.masked_fill(kind == 2, -torch.inf).to(DEVICE)
    arguments.append(log_mask.requires_grad_())
    weights = torch.randn(count, heads, rows, dim, device=DEVICE)

    def exact(q, key, value, mask):
        k, v = (torch.cat([x[owners].to(own), own], 2) for x, own in zip(prompt, (key, value), strict=True))
        mask = torch.cat([mask, mask.new_zeros(count, kv_heads, rows)], -1)
        return api.attend_by_formula(q, k, v, mask, 0.2)

    with Poison():
        given = owners.to(DEVICE) if prompts > 1 else None
        out = continuation_attention(*arguments[:3], *prompt, arguments[3], given, 0.2, "triton")
        ours = [out, *torch.autograd.grad((out * weights).sum(), arguments, retain_graph=True)]
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(out.sum(), prompt)
    results = []
    for precision in (torch.float64, dtype):
        wide = [x.detach().to(precision).requires_grad_() for x in arguments]
        found = exact(*wide)
        results.append([found.detach(), *torch.autograd.grad((found * weights).sum(), wide)])
    for own, truth, rough in zip(ours, *results, strict=True):
        allowed = max(float((rough - truth).abs().max()), torch.finfo(dtype).eps * float(truth.abs().max()), 2e-6)
        assert float((own.detach() - truth).abs().max()) <= 3 * allowed
