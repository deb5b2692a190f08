"""Soft-masked attention (App. B): validation, choice of the backend, and the backends in plain PyTorch."""

import functools
import logging
from functools import partial
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from lkv.errors import BackendError
from lkv.kernels.causal_attention import causal_attention, pad_heads
from lkv.kernels.checks import check_devices, check_storages, check_tensor, import_problem
from lkv.kernels.soft_mask_attention import cpu
from lkv.kernels.softcap import cap_scores
from lkv.utils import devices

_NAMES = ("reference", "sdpa", "triton")


def soft_mask_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_mask: Tensor,
    scale: float | None = None,
    backend: str = "auto",
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute causal attention with weights m_i on keys: p_i ~ m_i exp(scale q k_i) (App. B, Sec. 3.5).

    A row without visible keys of m > 0 has output 0 and zero gradients.

    Args:
        q: Queries [B, Hq, Tq, d], the last Tq positions; Hq is a multiple of Hkv.
        k: Keys [B, Hkv, Tk, d], Tk >= Tq.
        v: Values [B, Hkv, Tk, dv].
        log_mask: Logarithm of the mask [B, Hkv, Tk]: 0 leaves a key as it is, -inf removes it.
        scale: What scores are multiplied by, d ** -0.5 by default.
        backend: "auto" takes Triton on CUDA where it can run (else the reason is logged once), SDPA elsewhere.
            "triton", "sdpa" and "reference" by name never fall back.
        sinks: Attention sinks [Hq]: one more logit of each query head, without a value.
        softcap: Scores become softcap * tanh(scores / softcap) before the mask; by "reference" only, not with `sinks`.

    Returns:
        Outputs [B, Hq, Tq, dv], differentiable in `q`, `k`, `v` and `log_mask`.

    Raises:
        ValueError: Shapes, dtypes, devices or masks do not fit. `log_mask` is checked for NaN and +inf on the CPU only,
            because on other devices this would synchronise.
        BackendError: The backend given by name cannot run.
    """
    _check_sequence(q, k, v, log_mask)
    scale = k.shape[3] ** -0.5 if scale is None else scale
    if softcap is not None:
        _check_capped(backend, sinks)
    elif sinks is not None:
        q, (k, v), log_mask = _append_sinks(q, sinks, scale), _prepend_sink(k, v), pad(log_mask, (1, 0))
    return _attend(q, k, v, log_mask, scale, backend, softcap)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, log_mask: Tensor, scale: float, backend: str, softcap: float | None
) -> Tensor:
    """Compute `soft_mask_attention` of checked arguments, without sinks."""
    if softcap is not None:
        return _attend_capped(q, k, v, log_mask, scale, softcap)
    chosen = _available_backend(backend, q.device, q.dtype, q.shape[3], v.shape[3])
    attend = {"reference": attend_by_formula, "sdpa": _attend_by_sdpa}.get(chosen) or _triton_module().attend
    return attend(q, k, v, log_mask, scale)


def continuation_attention(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    prompt_key: Tensor,
    prompt_value: Tensor,
    log_mask: Tensor | None = None,
    owners: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend from continuations to a frozen prompt with weights m_i on keys, and causally to themselves.

    With Triton the prompt is neither copied for each continuation nor saved for the backward pass.

    Args:
        q: Queries [n, Hq, t, d] of n continuations.
        key: Their own keys [n, Hkv, t, d].
        value: Their own values [n, Hkv, t, d].
        prompt_key: Keys [C, Hkv, T, d] of C prompts; no gradient reaches them.
        prompt_value: Values [C, Hkv, T, d] of the prompts, as `prompt_key`.
        log_mask: Logarithm of the prompt's mask [n, Hkv, T]; None for the full cache.
        owners: int64 [n], the index of each continuation's prompt; None for one prompt.
        scale: As in `soft_mask_attention`.
        backend: As in `soft_mask_attention`; "auto" on a CPU takes the flash kernel and matrix products, likewise.
        sinks: As in `soft_mask_attention`.
        softcap: As in `soft_mask_attention`.

    Returns:
        Outputs [n, Hq, t, d], differentiable in `q`, `key`, `value` and `log_mask`.

    Raises:
        ValueError: As `soft_mask_attention`.
        BackendError: As `soft_mask_attention`.
    """
    _check_continuations(q, key, value, prompt_key, prompt_value, log_mask, owners)
    rows, scale = len(q), q.shape[-1] ** -0.5 if scale is None else scale
    prompt_key, prompt_value = prompt_key.detach().to(q.dtype), prompt_value.detach().to(q.dtype)
    if softcap is not None:
        _check_capped(backend, sinks)
    elif sinks is not None:
        q, key = _append_sinks(q, sinks, scale), pad(key, (0, 1))
        prompt_key, prompt_value = _prepend_sink(prompt_key, prompt_value)
        log_mask = None if log_mask is None else pad(log_mask, (1, 0))
    if backend == "auto" and q.device.type == "cpu" and softcap is None:
        return cpu.attend(scale, q, key, value, prompt_key, prompt_value, log_mask, owners)
    if log_mask is None:
        log_mask = q.new_zeros((rows, *prompt_key.shape[1:3]), dtype=torch.float32)
    if softcap is None and _available_backend(backend, q.device, q.dtype, q.shape[-1], value.shape[-1]) == "triton":
        owners = torch.zeros(rows, dtype=torch.int64, device=q.device) if owners is None else owners
        return _triton_module().attend_continuations(scale, q, key, value, prompt_key, prompt_value, log_mask, owners)
    k, v = (
        torch.cat([x.expand(rows, -1, -1, -1) if owners is None else x[owners], own], 2)
        for x, own in ((prompt_key, key), (prompt_value, value))
    )
    whole_mask = torch.cat([log_mask, log_mask.new_zeros((rows, *key.shape[1:3]))], -1)
    return _attend(q, k, v, whole_mask, scale, backend, softcap)


def _check_sequence(q: Tensor, k: Tensor, v: Tensor, log_mask: Tensor) -> None:
    for name, x, ndim in (("q", q, 4), ("k", k, 4), ("v", v, 4), ("log_mask", log_mask, 3)):
        check_tensor(name, x, ndim)
    check_storages(q=q, k=k, v=v, log_mask=log_mask)
    check_devices(q=q, k=k, v=v, log_mask=log_mask)
    batch, kv_heads, length, head_dim = k.shape
    if v.shape[:3] != k.shape[:3] or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"v {list(v.shape)} {v.dtype} does not fit k {list(k.shape)} {k.dtype} and q of {q.dtype}: batch, heads, "
            "length and dtype must be the same."
        )
    if log_mask.shape != (batch, kv_heads, length):
        raise ValueError(f"Expected log_mask of shape {[batch, kv_heads, length]} but got {list(log_mask.shape)}.")
    if q.shape[0] != batch or q.shape[3] != head_dim or q.shape[1] % kv_heads or not 1 <= q.shape[2] <= length:
        raise ValueError(f"q has shape {tuple(q.shape)}, which does not fit k of shape {tuple(k.shape)}.")
    _check_mask(log_mask)


def _check_continuations(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    prompt_key: Tensor,
    prompt_value: Tensor,
    log_mask: Tensor | None,
    owners: Tensor | None,
) -> None:
    arguments = {"q": q, "key": key, "value": value, "prompt_key": prompt_key, "prompt_value": prompt_value}
    arguments |= {} if log_mask is None else {"log_mask": log_mask}
    arguments |= {} if owners is None else {"owners": owners}
    for name, x in arguments.items():
        check_tensor(name, x, {"log_mask": 3, "owners": 1}.get(name, 4))
    check_storages(**arguments)
    check_devices(**arguments)
    (rows, kv_heads, tokens, dim), (prompts, _, length, _) = key.shape, prompt_key.shape
    if not (
        q.shape[0] == rows
        and q.shape[2:] == (tokens, dim)
        and kv_heads
        and q.shape[1] % kv_heads == 0
        and prompt_key.shape[1::2] == (kv_heads, dim)
        and value.shape[:3] == key.shape[:3]
        and prompt_value.shape == (prompts, kv_heads, length, value.shape[3])
        and (log_mask is None or log_mask.shape == (rows, kv_heads, length))
        and (prompts == 1 if owners is None else owners.shape == (rows,))
    ):
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in arguments.items())
        raise ValueError(f"The shapes do not fit each other: {shapes}.")
    if not q.dtype == key.dtype == value.dtype:
        raise ValueError(f"key is {key.dtype} and value {value.dtype}, but they must have the dtype of q, {q.dtype}.")
    if log_mask is not None:
        _check_mask(log_mask)
    if owners is not None and owners.dtype != torch.int64:
        raise ValueError(f"owners is {owners.dtype}, but it must be torch.int64.")
    if owners is not None and owners.device.type == "cpu" and not bool(((owners >= 0) & (owners < prompts)).all()):
        raise ValueError(f"owners names prompts that are not there; give numbers from 0 to {prompts - 1}.")


def _append_sinks(q: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Return q' = [q, sink / scale] for `sinks` [Hq]: a channel for `_prepend_sink`, so that no backend knows sinks."""
    column = (sinks.to(torch.promote_types(q.dtype, torch.float32)) / scale).to(q.dtype)[:, None, None]
    return torch.cat([q, column.expand(*q.shape[:3], 1)], -1)


def _prepend_sink(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v with a first token for the sinks, k' = [0, 1] and v = 0; all other k' = [k, 0]."""
    first = pad(key.new_zeros(key.shape[3]), (0, 1), value=1.0).expand((*key.shape[:2], 1, -1))
    return torch.cat([first, pad(key, (0, 1))], 2), pad(value, (0, 0, 1, 0))


def _check_capped(backend: str, sinks: Tensor | None) -> None:
    if backend not in ("auto", "reference") or sinks is not None:
        raise ValueError("Capped scores are computed by the backend 'reference' only, and without sinks.")


def _attend_capped(q: Tensor, k: Tensor, v: Tensor, log_mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Compute `attend_by_formula`, again in the backward pass: its matrices would take more memory than the model."""
    if not torch.is_grad_enabled():
        return attend_by_formula(q, k, v, log_mask, scale, softcap)
    attend = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return attend(attend_by_formula, q, k, v, log_mask, scale, softcap)


def _check_mask(log_mask: Tensor) -> None:
    if log_mask.device.type == "cpu" and not bool((log_mask < torch.inf).all()):
        raise ValueError(
            "log_mask contains NaN or +inf, but it must be the logarithm of a finite mask m >= 0 (-inf where m = 0)."
        )


@functools.cache
def _available_backend(backend: str, device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str:
    """Return the name of the backend to use; cached, so that a fallback is logged once."""
    if backend not in ("auto", *_NAMES):
        raise ValueError(f"backend is {backend!r}, but it must be 'auto' or one of {_NAMES}.")
    if backend not in ("auto", "triton"):
        return backend
    if backend == "auto" and not devices.is_gpu(device):
        return "sdpa"
    reason = _unsupported_reason(device, dtype, dim, value_dim)
    if reason is None:
        return "triton"
    if backend == "triton":
        raise BackendError("triton", reason)
    logging.getLogger(__name__).warning("soft-masked attention goes without 'triton': %s", reason)
    return "sdpa"


def _unsupported_reason(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """Return why Triton cannot run, in one sentence; None if it can."""
    try:
        module = _triton_module()
    except Exception as error:
        return import_problem("triton", error)
    return module.unsupported_reason(device, dtype, dim, value_dim)


def _triton_module() -> ModuleType:
    return import_module("lkv.kernels.soft_mask_attention.triton")


def attend_by_formula(
    q: Tensor, k: Tensor, v: Tensor, log_mask: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """Compute App. B literally, with all matrices materialised: the oracle for the fast backends.

    Arguments as in `soft_mask_attention`, with a scale.
    """
    groups = q.shape[1] // k.shape[1]
    k, v, log_mask = (t.repeat_interleave(groups, dim=1) for t in (k, v, log_mask))
    scores = cap_scores(q @ k.transpose(-1, -2) * scale, softcap) + log_mask[..., None, :]
    rows, columns = scores.shape[-2:]
    visible = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
    scores = scores.masked_fill(~visible, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0).to(v.dtype) @ v


def _attend_by_sdpa(q: Tensor, k: Tensor, v: Tensor, log_mask: Tensor, scale: float) -> Tensor:
    """Attend with PyTorch's SDPA, with the mask as an extra column of k.

    With q' = [q, 1] and k' = [k, log m / scale], SDPA computes softmax(scale q k + log m), and the gradient of log m is
    that of a key channel: no T x T bias, and no 1/m.
    """
    value_dim = v.shape[-1]
    q, k, v = pad_heads(*cpu.append_mask(q, k, log_mask, scale), v)
    groups, rows, length = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    out = causal_attention(q, k, v, scale)
    empty = (log_mask > -torch.inf).cumsum(-1)[..., length - rows :] == 0
    return out[..., :value_dim].masked_fill(empty.repeat_interleave(groups, 1)[..., None], 0.0)
