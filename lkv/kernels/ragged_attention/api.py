"""Attention over the ragged cache (Sec. 4.5): arguments are checked and a backend is chosen here, and nowhere else.

Names of shapes: B batch rows, Hq query heads, Hkv KV heads, Tq new tokens, d and dv channels of k and v, P entries of
the pools, which hold the spans of all heads one after another.
"""

import functools
import logging
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from lkv.errors import BackendError
from lkv.kernels.checks import check_storage, check_tensor
from lkv.kernels.ragged_attention.basis import Basis
from lkv.kernels.ragged_attention.levels import QUANTIZED_BITS
from lkv.utils import devices

BACKENDS = ("cpp", "loop", "reference", "triton", "varlen")
_GPU_BACKENDS = ("triton", "varlen", "loop")  # in the order in which "auto" tries them
_FUSED = ("cpp", "triton")  # append and attend in one, over codes too
_IN_BASIS = ("cpp",)  # also enters and leaves a basis in the same call
# Query rows a span for which "auto" takes "cpp": for more of them a matrix library is faster.
_MAX_ROWS_OF_CPP = 64
_INTEGERS = (torch.int32, torch.int64)
MAX_QUANTIZED = 2  # sets of quantised entries a layer
_BASIS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of its mean and scale
_QUANTIZED_DTYPES = (torch.uint8, torch.bfloat16, torch.uint8, torch.bfloat16, torch.int32)


class QuantizedKV(NamedTuple):
    """Entries of each span in few bits a value, all spans packed: value = level(code) * norm of its entry.

    N entries in all. Codes are laid out as `lkv.cache.quantization.quantize` returns them, and the pools beside them
    are in the same rotated coordinates.

    Attributes:
        key_codes: uint8 [N, d * key_bits / 8].
        key_norms: bfloat16 [N].
        value_codes: uint8 [N, dv * value_bits / 8].
        value_norms: bfloat16 [N].
        tables: int32 [2, B, Hkv]: how many entries a span has here, and its first one.
        key_bits: 8, 4 or 3.
        value_bits: 8, 4 or 3.
    """

    key_codes: Tensor
    key_norms: Tensor
    value_codes: Tensor
    value_norms: Tensor
    tables: Tensor
    key_bits: int
    value_bits: int


@overload
def ragged_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float, backend: str = "auto",
    *, causal: bool = True, lse: Literal[False] = False, quantized: Sequence[QuantizedKV] = (),
    basis: Basis | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def ragged_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float, backend: str = "auto",
    *, causal: bool = True, lse: Literal[True], quantized: Sequence[QuantizedKV] = (), basis: Basis | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def ragged_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float, backend: str = "auto",
    *, causal: bool = True, lse: bool = False, quantized: Sequence[QuantizedKV] = (), basis: Basis | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attend from new tokens to the KV entries of each head, their own k and v included.

    Args:
        q: Queries [B, Hq, Tq, d], Hq a multiple of Hkv.
        k_pool: Keys [P, d] of all spans, in the dtype of `q`.
        v_pool: Values [P, dv] of all spans.
        starts: int32 [B, Hkv], the first entry of each span.
        lens: int32 [B, Hkv], the entries of each span, of which the last Tq are the new tokens: causal among
            themselves; everything older is visible.
        scale: What scores are multiplied by, usually d ** -0.5.
        backend: "auto" takes, on CUDA, the first of "triton", "varlen" and "loop" that can run (the reason is logged
            once); on a CPU "cpp" where it can run and few rows attend, else "loop". A backend given by name, also
            "reference", never falls back. "triton" and "varlen" never wait for the device; "cpp" gives no gradients.
        causal: If False the k and v of the new tokens lie elsewhere, and each of the Tq sees the whole span.
        lse: Whether to return the log-sum-exp of the scores as well, for `merge_attention`.
        quantized: The first entries of each span, which the pools then lack: those of the first item, then those of the
            second. Entry i of a span is at place starts + i of the pools only if it is none of these, so that `starts`
            may be negative.
        basis: The coordinates of pools and codes; queries, outputs and log-sum-exps are the model's.

    Returns:
        Outputs [B, Hq, Tq, dv] in the dtype of `q`, and if `lse` their log-sum-exp [B, Hq, Tq] in float32 (float64
        for float64). A span without entries has outputs of 0 and a log-sum-exp of -inf.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit; on a CPU also where a span reaches beyond the pools.
        BackendError: The backend given by name cannot run, or `can_attend_quantized` returns False.
    """
    _check(q, k_pool, v_pool, starts, lens, quantized=quantized, basis=basis)
    chosen = _choose(backend, q, k_pool, v_pool, starts, lens, quantized=quantized)
    if chosen not in _FUSED:
        _check_none_quantized(chosen, quantized)
        for name, x in (("q", q), ("k_pool", k_pool), ("v_pool", v_pool), ("starts", starts), ("lens", lens)):
            check_storage(name, x)
        _check_spans(k_pool, starts, lens)
    if not q.numel():
        out = q.new_zeros((*q.shape[:3], v_pool.shape[1]))
        return (out, out.new_zeros(q.shape[:3])) if lse else out
    options: dict[str, Any] = {"quantized": quantized} if quantized else {}
    if chosen in _IN_BASIS:
        options["basis"] = basis
    entered = q
    if basis is not None and chosen not in _IN_BASIS:
        _check_entering(basis, q=q)
        entered = basis.enter_queries(q)
    out, log_sum_exp = _module(chosen).attend(entered, k_pool, v_pool, starts, lens, scale, causal, lse, **options)
    if basis is not None and chosen not in _IN_BASIS:
        out, log_sum_exp = basis.leave_outputs(out), basis.leave_lse(log_sum_exp, q, scale) if lse else None
    return (out, log_sum_exp) if lse else out


def append_and_attend(
    q: Tensor, key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float,
    backend: str = "auto", buffers: dict[Any, Any] | None = None, quantized: Sequence[QuantizedKV] = (),
    basis: Basis | None = None,
) -> Tensor:  # fmt: skip
    """Append the k and v of new tokens to the spans, then attend as `ragged_attention` does: a decode step.

    Changes the pools, and `lens` in place: a replay of what was launched on a GPU appends once more.

    Args:
        q: Queries [B, Hq, Tq, d].
        key: New keys [B, Hkv, Tq, d].
        value: New values [B, Hkv, Tq, dv].
        k_pool: As in `ragged_attention`, with free slots for Tq entries after each span.
        v_pool: As in `ragged_attention`.
        starts: As in `ragged_attention`.
        lens: As in `ragged_attention`, without the new tokens.
        scale: As in `ragged_attention`.
        backend: As in `ragged_attention`.
        buffers: A dictionary in which a backend keeps its work space from step to step, for the layers of one cache,
            which take turns.
        quantized: As in `ragged_attention`.
        basis: As in `ragged_attention`; the new k and v are the model's as well.

    Returns:
        Outputs [B, Hq, Tq, dv].

    Raises:
        ValueError: As `ragged_attention`, for the quantised entries too.
        BackendError: As `ragged_attention`, and where `can_attend_quantized` returns False.
    """
    _check(q, k_pool, v_pool, starts, lens, key, value, quantized, basis)
    chosen = _choose(backend, q, k_pool, v_pool, starts, lens, key, value, quantized=quantized)
    if not q.numel():
        return q.new_zeros((*q.shape[:3], v_pool.shape[1]))
    module = _module(chosen)
    if chosen in _IN_BASIS:
        return module.append_and_attend(q, key, value, k_pool, v_pool, starts, lens, scale, buffers, quantized, basis)
    if basis is not None:
        _check_entering(basis, q=q, key=key, value=value)
        q, (key, value) = basis.enter_queries(q), basis.enter_entries(key, value)
    if chosen in _FUSED:
        out = module.append_and_attend(q, key, value, k_pool, v_pool, starts, lens, scale, buffers, quantized)
    else:
        _check_none_quantized(chosen, quantized)
        _append(key, value, k_pool, v_pool, starts, lens)
        out = ragged_attention(q, k_pool, v_pool, starts, lens, scale, chosen)
    return out if basis is None else basis.leave_outputs(out)


def can_attend_quantized(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, *new: Tensor,
    quantized: Sequence[QuantizedKV],
) -> bool:  # fmt: skip
    """Whether attention can read `quantized` as it is, with these tensors; `new`: k and v that are to be appended."""
    return _choose("auto", q, k_pool, v_pool, starts, lens, *new, quantized=quantized) in _FUSED


def can_replay(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether what `append_and_attend` launches there can be captured, and replayed as further steps."""
    return _chosen("auto", device, dtype, dim, dim) in _FUSED


def append(
    key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor,
    basis: Basis | None = None,
) -> None:  # fmt: skip
    """Append the k and v of new tokens by plain indexing; waits for no device.

    Arguments and errors are those of `append_and_attend`, which also attends.
    """
    _check(None, k_pool, v_pool, starts, lens, key, value, basis=basis)
    if basis is not None:
        _check_entering(basis, key=key, value=value)
        key, value = basis.enter_entries(key, value)
    _append(key, value, k_pool, v_pool, starts, lens)


def masked_attention(
    q: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend to keys of equal number a head under a mask, for `merge_attention`.

    Args:
        q: Queries [B, Hq, Tq, d].
        key: Keys [B, Hkv, Tk, d].
        value: Values [B, Hkv, Tk, dv].
        visible: bool, broadcast to [B, Hkv, Tq, Tk]: which keys a query sees.
        scale: What scores are multiplied by.

    Returns:
        Outputs [B, Hq, Tq, dv] in the dtype of `q`, and the log-sum-exp of the scores [B, Hq, Tq]. A row that sees
        nothing has outputs of 0 and a log-sum-exp of -inf.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    for name, x in (("q", q), ("key", key), ("value", value), ("visible", visible)):
        check_tensor(name, x, 4)
        check_storage(name, x)
    (batch, heads, tokens, dim), (_, kv_heads, keys, _) = q.shape, key.shape
    if key.shape != (batch, kv_heads, keys, dim) or value.shape[:3] != key.shape[:3] or heads % max(kv_heads, 1):
        raise ValueError(
            f"Expected key [{batch}, Hkv, Tk, {dim}] and value [{batch}, Hkv, Tk, dv] with {heads} a multiple of Hkv, "
            f"but got {list(key.shape)} and {list(value.shape)}."
        )
    fits = all(n in (1, size) for n, size in zip(visible.shape, (batch, kv_heads, tokens, keys), strict=True))
    if visible.dtype != torch.bool or not fits:
        raise ValueError(
            f"Expected a bool mask that broadcasts to {[batch, kv_heads, tokens, keys]}, but got "
            f"{list(visible.shape)} {visible.dtype}."
        )
    return _module("loop").attend_masked(q, key, value, visible, scale)


def merge_attention(
    left: Tensor, left_lse: Tensor, right: Tensor, right_lse: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Merge the attention over two sets of keys into that over both.

    Args:
        left: Outputs [..., dv] over the first set.
        left_lse: Natural log-sum-exp [...] of its scores, -inf where nothing was visible.
        right: Outputs [..., dv] over the second set.
        right_lse: Log-sum-exp [...] of its scores.

    Returns:
        Outputs [..., dv] in the dtype of `left`, and their log-sum-exp [...]; 0 and -inf where nothing was visible in
        either set.

    Raises:
        ValueError: Shapes do not fit.
    """
    if left.shape != right.shape or not left.ndim or not left_lse.shape == right_lse.shape == left.shape[:-1]:
        raise ValueError(
            f"Expected two outputs of one shape [..., dv] and their log-sum-exps [...], but got {list(left.shape)} "
            f"with {list(left_lse.shape)} and {list(right.shape)} with {list(right_lse.shape)}."
        )
    for name, x in (("left", left), ("left_lse", left_lse), ("right", right), ("right_lse", right_lse)):
        check_storage(name, x)
    return _module("loop").merge(left, left_lse, right, right_lse)


def _check(
    q: Tensor | None, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor,
    key: Tensor | None = None, value: Tensor | None = None, quantized: Sequence[QuantizedKV] = (),
    basis: Basis | None = None,
) -> None:  # fmt: skip
    """Raise ValueError unless all tensors fit one another; what starts and lens say is not read.

    Part of every decode step of every layer, so that it makes few calls.
    """
    check_tensor("k_pool", k_pool, 2)
    check_tensor("v_pool", v_pool, 2)
    check_tensor("starts", starts, 2)
    check_tensor("lens", lens, 2)
    (batch, kv_heads), dtype, device = starts.shape, k_pool.dtype, k_pool.get_device()
    (entries, dim), (value_entries, value_dim) = k_pool.shape, v_pool.shape
    if lens.shape != (batch, kv_heads) or starts.dtype not in _INTEGERS or lens.dtype not in _INTEGERS:
        raise ValueError(
            f"Expected starts and lens as int32 of one shape [B, Hkv] but got {list(starts.shape)} {starts.dtype} and "
            f"{list(lens.shape)} {lens.dtype}: they do not fit each other."
        )
    if value_entries != entries or v_pool.dtype != dtype or not dtype.is_floating_point or not dim or not value_dim:
        raise ValueError(
            f"k_pool {list(k_pool.shape)} {dtype} and v_pool {list(v_pool.shape)} {v_pool.dtype} do not fit each other:"
            " expected [P, d] and [P, dv] of one floating-point dtype."
        )
    same = v_pool.get_device() == starts.get_device() == lens.get_device() == device
    tokens = None
    if q is not None:
        check_tensor("q", q, 4)
        rows, heads, tokens, q_dim = q.shape
        if rows != batch or not 0 < kv_heads <= heads or heads % kv_heads or q_dim != dim or q.dtype != dtype:
            raise ValueError(
                f"q {list(q.shape)} {q.dtype} does not fit starts {list(starts.shape)} and k_pool "
                f"{list(k_pool.shape)} {dtype}: expected [{batch}, multiple of {kv_heads}, Tq, {dim}] {dtype}."
            )
        same = same and q.get_device() == device
    if key is not None and value is not None:
        check_tensor("key", key, 4)
        check_tensor("value", value, 4)
        tokens = key.shape[2] if tokens is None else tokens
        shape, value_shape = (batch, kv_heads, tokens, dim), (batch, kv_heads, tokens, value_dim)
        if key.shape != shape or value.shape != value_shape or not key.dtype == value.dtype == dtype:
            raise ValueError(
                f"key {list(key.shape)} {key.dtype} and value {list(value.shape)} {value.dtype} do not fit the pools, "
                f"starts and q: expected {list(shape)} and {list(value_shape)} {dtype}."
            )
        same = same and key.get_device() == value.get_device() == device
    if len(quantized) > MAX_QUANTIZED:
        raise ValueError(f"Expected at most {MAX_QUANTIZED} sets of quantised entries, but got {len(quantized)}.")
    for part in quantized:
        _check_quantized(part, starts, dim, value_dim)
        same = same and all(x.get_device() == device for x in part[:5])
    if basis is not None:
        _check_basis(basis, starts, dim, value_dim)
        same = same and all(x.get_device() == device for x in basis)
    if not same:
        raise ValueError(f"All tensors must be on one device, {k_pool.device} as k_pool is.")


def _check_quantized(part: QuantizedKV, starts: Tensor, dim: int, value_dim: int) -> None:
    bits = part.key_bits, part.value_bits
    if not all(number in QUANTIZED_BITS for number in bits) or dim % 8 or value_dim % 8:
        raise ValueError(
            f"Expected {QUANTIZED_BITS} bits and multiples of 8 channels, but got bits {bits} and channels "
            f"{(dim, value_dim)}."
        )
    entries = part.key_codes.shape[0] if part.key_codes.ndim else -1
    shapes = (
        (entries, dim * bits[0] // 8),
        (entries,),
        (entries, value_dim * bits[1] // 8),
        (entries,),
        (2, *starts.shape),
    )
    names = part._fields[:5]
    _check_fields(f"quantised entries of {bits} bits", names, part[:5], shapes, _QUANTIZED_DTYPES)


def _check_basis(basis: Basis, starts: Tensor, dim: int, value_dim: int) -> None:
    by_head = (*starts.shape, dim)
    shapes = by_head, by_head, (dim, dim), (value_dim, value_dim)
    by_channel = basis.mean.dtype if basis.mean.dtype in _BASIS_DTYPES else torch.float32
    dtypes = by_channel, by_channel, torch.float32, torch.float32
    _check_fields("tensors of the basis", basis._fields, basis, shapes, dtypes)
    if not all(x.is_contiguous() for x in basis):
        raise ValueError("The tensors of the basis must be contiguous: call .contiguous() on each.")


def _check_entering(basis: Basis, **tensors: Tensor) -> None:
    """Raise ValueError where PyTorch's own operators would read beyond a storage; on a CPU alone, as `_check_spans`."""
    if basis.mean.device.type == "cpu":
        for name, x in (*tensors.items(), *basis._asdict().items()):
            check_storage(name, x)


def _check_fields(
    what: str, names: Sequence[str], tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
) -> None:  # fmt: skip
    """Raise ValueError unless the tensors of a record have these shapes and dtypes."""
    for x, shape, dtype in zip(tensors, shapes, dtypes, strict=True):
        if x.shape != shape or x.dtype is not dtype or x.layout is not torch.strided or x.is_neg() or not x.data_ptr():
            break
    else:
        return
    for name, x, shape in zip(names, tensors, shapes, strict=True):
        check_tensor(name, x, len(shape))
    found = [(tuple(x.shape), x.dtype) for x in tensors]
    expected = list(zip(shapes, dtypes, strict=True))
    if found != expected:
        wanted, actual = (
            ", ".join(f"{name} {list(shape)} {dtype}" for name, (shape, dtype) in zip(names, pairs, strict=True))
            for pairs in (expected, found)
        )
        raise ValueError(f"The {what} do not fit starts and the pools: expected {wanted}, but got {actual}.")


def _check_none_quantized(backend: str, quantized: Sequence[QuantizedKV]) -> None:
    if quantized:
        raise BackendError(backend, "it reads no codes, as 'triton' and 'cpp' do: restore the entries.")


def _check_spans(k_pool: Tensor, starts: Tensor, lens: Tensor, added: int | None = None) -> None:
    """Raise ValueError where a span, or the slots of the `added` new entries after it, lie outside of the pools.

    On a CPU alone: elsewhere reading the answer would wait for the device.
    """
    if starts.device.type != "cpu":
        return
    for start, length in zip(starts.flatten().tolist(), lens.flatten().tolist(), strict=True):
        first, count = (start, length) if added is None else (start + length, added)
        if first < 0 or length < 0 or first + count > len(k_pool):
            raise ValueError(
                f"The {count} entries from {first} on, of a span of {length}, reach beyond the pools of {len(k_pool)}."
            )


def _append(key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor) -> None:
    for name, x in (("key", key), ("value", value), ("k_pool", k_pool), ("v_pool", v_pool), ("starts", starts),
                    ("lens", lens)):  # fmt: skip
        check_storage(name, x)
    _check_spans(k_pool, starts, lens, key.shape[2])
    _module("loop").append(key, value, k_pool, v_pool, starts, lens)


def _choose(
    backend: str, q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, *new: Tensor,
    quantized: Sequence[QuantizedKV] = (),
) -> str:  # fmt: skip
    """The name of the backend for these tensors."""
    chosen = _chosen(backend, q.device, q.dtype, k_pool.shape[1], v_pool.shape[1])
    if chosen not in _FUSED:
        return chosen
    # Why compiled code that takes addresses cannot read these tensors, in one sentence.
    if not (k_pool.is_contiguous() and v_pool.is_contiguous() and starts.is_contiguous() and lens.is_contiguous()):
        reason = "pools, starts and lens must be contiguous."
    elif starts.dtype != torch.int32 or lens.dtype != torch.int32:
        reason = f"starts and lens must be int32, not {starts.dtype} and {lens.dtype}."
    elif not all(x.is_contiguous() for part in quantized for x in part[:5]):
        reason = "codes, norms and tables must be contiguous."
    else:
        reason = _module(chosen).unfit(q, k_pool, v_pool, *new)
    if backend == "auto":
        rows = q.shape[2] * (q.shape[1] // starts.shape[1])
        return "loop" if reason or (chosen == "cpp" and rows > _MAX_ROWS_OF_CPP) else chosen
    if reason:
        raise BackendError(chosen, reason)
    return chosen


@functools.cache
def _chosen(backend: str, device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str:
    """The backend by device, dtype and head sizes; cached, so that a fallback is logged once."""
    if backend != "auto":
        if backend not in BACKENDS:
            raise ValueError(f"backend is {backend!r}, but it must be 'auto' or one of {BACKENDS}.")
        if reason := _refusal(backend, device, dtype, dim, value_dim):
            raise BackendError(backend, reason)
        return backend
    if not devices.is_gpu(device):
        return "loop" if _refusal("cpp", device, dtype, dim, value_dim) else "cpp"
    reasons = {name: _refusal(name, device, dtype, dim, value_dim) for name in _GPU_BACKENDS}
    chosen = next(name for name in _GPU_BACKENDS if reasons[name] is None)
    for name in _GPU_BACKENDS[: _GPU_BACKENDS.index(chosen)]:
        logging.getLogger(__name__).warning("ragged attention goes without %r: %s", name, reasons[name])
    return chosen


def _refusal(backend: str, device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """Why a backend cannot run, in one sentence; None where it can."""
    if backend in ("loop", "reference"):
        return None
    try:
        module = _module(backend)
    except ImportError as error:
        return f"{error.name or backend} cannot be imported ({error})."
    # A package that is broken or does not go with another one must not take the rest with it.
    except Exception as error:
        return f"{backend} cannot be imported ({type(error).__name__}: {error})."
    return module.refusal(device, dtype, dim, value_dim)


@functools.cache
def _module(name: str) -> ModuleType:
    return import_module(f"lkv.kernels.ragged_attention.{name}")
