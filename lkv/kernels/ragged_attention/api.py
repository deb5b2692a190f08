"""Attention over the ragged cache (Sec. 4.5): the public functions.

They check their arguments (`arguments.py`) and choose a backend.

Names of shapes: B batch rows, Hq query heads, Hkv KV heads, Tq new tokens, d and dv channels of k and v, P entries of
the pools, which hold the spans of all heads one after another.
"""

import functools
import logging
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, overload

import torch
from torch import Tensor

from lkv.errors import BackendError
from lkv.kernels.causal_attention import merge
from lkv.kernels.checks import check_devices, check_storages, check_tensor, import_problem
from lkv.kernels.ragged_attention.arguments import (
    MAX_QUANTIZED,
    RaggedKV,
    check_arguments,
    check_entering,
    check_none_quantized,
    check_spans,
)
from lkv.utils import devices

BACKENDS = ("cpp", "loop", "reference", "triton")
_FUSED = ("cpp", "triton")  # fused append and attention, also over codes and in a basis
# The most query rows per span for which "auto" uses "cpp": for more, a matrix library is faster.
_MAX_ROWS_OF_CPP = 64


@overload
def ragged_attention(
    q: Tensor, kv: RaggedKV, scale: float, backend: str = "auto", *, causal: bool = True, lse: Literal[False] = False,
    sinks: Tensor | None = None, softcap: float | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def ragged_attention(
    q: Tensor, kv: RaggedKV, scale: float, backend: str = "auto", *, causal: bool = True, lse: Literal[True],
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def ragged_attention(
    q: Tensor, kv: RaggedKV, scale: float, backend: str = "auto", *, causal: bool = True, lse: bool = False,
    sinks: Tensor | None = None, softcap: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attend from new tokens to the KV entries of each head, including their own k and v.

    Args:
        q: Queries [B, Hq, Tq, d] in the dtype of the pools, Hq a multiple of Hkv.
        kv: The entries. The last Tq of each span are the new tokens: causal among themselves; everything older is
            visible.
        scale: What scores are multiplied by, usually d ** -0.5.
        backend: "auto" uses "triton" on CUDA, or "loop" if Triton cannot run (the reason is logged once); on a CPU
            "cpp" if it can run and there are few query rows, else "loop". An explicit backend, also "reference", never
            falls back. "loop" and "reference" synchronise with the device; "cpp" and "triton" have no gradients.
        causal: If False the k and v of the new tokens lie elsewhere, and each of the Tq sees the whole span.
        lse: Whether to also return the log-sum-exp of the scores, for `merge_attention`.
        sinks: Attention sinks [Hq], see `join_sinks`; not together with `lse`.
        softcap: Scores become softcap * tanh(scores / softcap) before the softmax. With it, `kv.basis.mean`
            must be 0: subtracting a mean shifts all scores of a query, which changes capped ones.

    Returns:
        Outputs [B, Hq, Tq, dv] in the dtype of `q`, and if `lse` their log-sum-exp [B, Hq, Tq] in float32 (float64
        for float64). A span without entries has outputs of 0 and a log-sum-exp of -inf.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, `lse` is requested with `sinks`, or on a CPU a span reaches
            beyond the pools.
        BackendError: The backend given by name cannot run, or `can_attend_quantized` returns False.
    """
    check_arguments(q, kv)
    if lse and sinks is not None:
        raise ValueError("Expected no sinks together with lse=True: merge first, then call join_sinks.")
    chosen = _select_backend(backend, q, kv)
    if chosen not in _FUSED:
        check_none_quantized(chosen, kv)
        check_storages(q=q, **kv.tensors())
        check_spans(kv)
    if not q.numel():
        out = q.new_zeros((*q.shape[:3], kv.v_pool.shape[1]))
        return (out, out.new_zeros(q.shape[:3])) if lse else out
    has_lse = lse or sinks is not None
    basis = None if chosen in _FUSED else kv.basis
    if basis is None:
        out, log_sum_exp = _module(chosen).attend(q, kv, scale, causal, has_lse, softcap)
    else:
        check_entering(basis, q=q)
        out, log_sum_exp = _module(chosen).attend(basis.enter_queries(q), kv, scale, causal, has_lse, softcap)
        out, log_sum_exp = basis.leave_outputs(out), basis.leave_lse(log_sum_exp, q, scale) if has_lse else None
    if sinks is not None:
        return join_sinks(out, log_sum_exp, sinks)
    return (out, log_sum_exp) if lse else out


def append_and_attend(
    q: Tensor, key: Tensor, value: Tensor, kv: RaggedKV, scale: float, backend: str = "auto",
    buffers: dict[Any, Any] | None = None, sinks: Tensor | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Append the k and v of new tokens to the spans, then attend as `ragged_attention` does: a decode step.

    Updates the pools and `kv.lens` in place: every replay of a CUDA graph appends its tokens.

    Args:
        q: Queries [B, Hq, Tq, d].
        key: New keys [B, Hkv, Tq, d].
        value: New values [B, Hkv, Tq, dv].
        kv: The entries without the new tokens, with free slots for Tq after each span.
        scale: As in `ragged_attention`.
        backend: As in `ragged_attention`.
        buffers: A dictionary for a backend's work space, reused between steps and shared by the layers of one cache.
        sinks: As in `ragged_attention`.
        softcap: As in `ragged_attention`.

    Returns:
        Outputs [B, Hq, Tq, dv].

    Raises:
        ValueError: As `ragged_attention`, for the quantised entries too.
        BackendError: As `ragged_attention`, and where `can_attend_quantized` returns False.
    """
    check_arguments(q, kv, key, value)
    chosen = _select_backend(backend, q, kv, key, value)
    if not q.numel():
        return q.new_zeros((*q.shape[:3], kv.v_pool.shape[1]))
    # Sinks need the log-sum-exp, which the fused `append_and_attend` does not return.
    if chosen in _FUSED and sinks is None:
        return _module(chosen).append_and_attend(q, key, value, kv, scale, buffers, softcap)
    if chosen not in _FUSED:
        check_none_quantized(chosen, kv)
    _append(key, value, kv)
    return ragged_attention(q, kv, scale, chosen, sinks=sinks, softcap=softcap)


def can_attend_quantized(q: Tensor, kv: RaggedKV, *new: Tensor) -> bool:
    """Return whether attention can read the codes of `kv` directly; `new`: k and v to append."""
    # Rows of a batch may have different tiers.
    return len(kv.quantized) <= MAX_QUANTIZED and _select_backend("auto", q, kv, *new) in _FUSED


def can_replay(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Return whether the launches of `append_and_attend` can be captured and replayed as decode steps."""
    return _available_backend("auto", device, dtype, dim, dim) in _FUSED


def append(key: Tensor, value: Tensor, kv: RaggedKV) -> None:
    """Append the k and v of new tokens by plain indexing; waits for no device.

    Arguments and errors are those of `append_and_attend`, which also attends.
    """
    check_arguments(None, kv, key, value)
    _append(key, value, kv)


def masked_attention(
    q: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to the same number of keys in each head under a mask, for `merge_attention`.

    Args:
        q: Queries [B, Hq, Tq, d].
        key: Keys [B, Hkv, Tk, d].
        value: Values [B, Hkv, Tk, dv].
        visible: bool, broadcast to [B, Hkv, Tq, Tk]: which keys a query sees.
        scale: What scores are multiplied by.
        softcap: As in `ragged_attention`.

    Returns:
        Outputs [B, Hq, Tq, dv] in the dtype of `q`, and the log-sum-exp of the scores [B, Hq, Tq]. A row that sees
        nothing has outputs of 0 and a log-sum-exp of -inf.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    for name, x in (("q", q), ("key", key), ("value", value), ("visible", visible)):
        check_tensor(name, x, 4)
    check_storages(q=q, key=key, value=value, visible=visible)
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
    return _module("loop").attend_masked(q, key, value, visible, scale, softcap)


def merge_attention(left: Tensor, left_lse: Tensor, right: Tensor, right_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention over two sets of keys.

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
    check_storages(left=left, left_lse=left_lse, right=right, right_lse=right_lse)
    return merge(left, left_lse, right, right_lse)


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Apply attention sinks: an extra logit per query head, without a value.

    Args:
        out: Outputs [B, Hq, Tq, dv] without sinks.
        lse: Log-sum-exp [B, Hq, Tq] of the scores, -inf where nothing was visible.
        sinks: The logits of the sinks, [Hq].

    Returns:
        Outputs [B, Hq, Tq, dv] in the dtype of `out`.

    Raises:
        ValueError: Shapes do not fit.
    """
    if out.ndim != 4 or lse.shape != out.shape[:-1] or sinks.shape != out.shape[1:2]:
        raise ValueError(
            f"Expected outputs [B, Hq, Tq, dv], their log-sum-exps [B, Hq, Tq] and sinks [Hq], but got "
            f"{list(out.shape)}, {list(lse.shape)} and {list(sinks.shape)}."
        )
    check_storages(out=out, lse=lse, sinks=sinks)
    check_devices(out=out, lse=lse, sinks=sinks)
    share = torch.sigmoid(lse - sinks.to(lse)[:, None])
    return (out * share[..., None]).to(out.dtype)


def _append(key: Tensor, value: Tensor, kv: RaggedKV) -> None:
    if kv.basis is not None:
        check_entering(kv.basis, key=key, value=value)
        key, value = kv.basis.enter_entries(key, value)
    check_storages(key=key, value=value, **kv.tensors())
    check_spans(kv, key.shape[2])
    _module("loop").append(key, value, kv)


def _select_backend(backend: str, q: Tensor, kv: RaggedKV, *new: Tensor) -> str:
    """Return the name of the backend for these tensors."""
    k_pool, v_pool, starts, lens, quantized, _ = kv
    chosen = _available_backend(backend, q.device, q.dtype, k_pool.shape[1], v_pool.shape[1])
    if chosen not in _FUSED:
        return chosen
    # The reason why compiled code cannot read the addresses of these tensors, in one sentence.
    if not (k_pool.is_contiguous() and v_pool.is_contiguous() and starts.is_contiguous() and lens.is_contiguous()):
        reason = "pools, starts and lens must be contiguous."
    elif starts.dtype != torch.int32 or lens.dtype != torch.int32:
        reason = f"starts and lens must be int32, not {starts.dtype} and {lens.dtype}."
    elif not all(x.is_contiguous() for part in quantized for x in part[:5]):
        reason = "codes, norms and tables must be contiguous."
    elif torch.is_grad_enabled() and any(x.requires_grad for x in (q, k_pool, v_pool, *new)):
        reason = "it gives no gradients: use torch.no_grad()."
    else:
        reason = ""
    if backend == "auto":
        rows = q.shape[2] * (q.shape[1] // starts.shape[1])
        return "loop" if reason or (chosen == "cpp" and rows > _MAX_ROWS_OF_CPP) else chosen
    if reason:
        raise BackendError(chosen, reason)
    return chosen


@functools.cache
def _available_backend(backend: str, device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str:
    """Return the backend by device, dtype and head sizes; cached, so that a fallback is logged once."""
    if backend != "auto":
        if backend not in BACKENDS:
            raise ValueError(f"backend is {backend!r}, but it must be 'auto' or one of {BACKENDS}.")
        if reason := _unsupported_reason(backend, device, dtype, dim, value_dim):
            raise BackendError(backend, reason)
        return backend
    fastest = "triton" if devices.is_gpu(device) else "cpp"
    reason = _unsupported_reason(fastest, device, dtype, dim, value_dim)
    if reason and fastest == "triton":  # "cpp" logs by itself why it cannot be compiled
        logging.getLogger(__name__).warning("ragged attention goes without %r: %s", fastest, reason)
    return "loop" if reason else fastest


def _unsupported_reason(backend: str, device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """Return why a backend cannot run, in one sentence; None if it can."""
    if backend in ("loop", "reference"):
        return None
    try:
        module = _module(backend)
    except Exception as error:
        return import_problem(backend, error)
    return module.unsupported_reason(device, dtype, dim, value_dim)


@functools.cache
def _module(name: str) -> ModuleType:
    return import_module(f"lkv.kernels.ragged_attention.{name}")
