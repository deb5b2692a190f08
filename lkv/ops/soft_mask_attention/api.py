"""Validation and choice of the backend for soft-masked attention (App. B)."""

from torch import Tensor

from lkv.ops.soft_mask_attention import reference, sdpa

_BACKENDS = {"sdpa": sdpa.attend, "reference": reference.attend}


def soft_mask_attention(
    q: Tensor, k: Tensor, v: Tensor, log_mask: Tensor, scale: float | None = None, backend: str = "auto"
) -> Tensor:
    """Causal attention in which key i counts m_i times: p_i ~ m_i exp(scale q k_i) (App. B, Sec. 3.5).

    `q` [B, Hq, Tq, d]; `k`, `v` [B, Hkv, Tk, d] with Hq a multiple of Hkv and Tk >= Tq (the queries are the last Tq
    positions); `log_mask` [B, Hkv, Tk], the logarithm of the mask. `scale` defaults to d ** -0.5. Returns
    [B, Hq, Tq, d]. `backend`: "auto", "sdpa" or "reference"; a backend asked for by name never falls back to another.
    Raises ValueError for shapes that do not fit.
    """
    if backend != "auto" and backend not in _BACKENDS:
        raise ValueError(f"backend is {backend!r}, but it must be 'auto' or one of {sorted(_BACKENDS)}.")
    batch, kv_heads, length, head_dim = k.shape
    if log_mask.shape != (batch, kv_heads, length):
        raise ValueError(f"log_mask has shape {tuple(log_mask.shape)}, but k asks for {(batch, kv_heads, length)}.")
    if q.shape[0] != batch or q.shape[3] != head_dim or q.shape[1] % kv_heads or q.shape[2] > length:
        raise ValueError(f"q has shape {tuple(q.shape)}, which does not fit k of shape {tuple(k.shape)}.")
    attend = _BACKENDS["sdpa" if backend == "auto" else backend]
    return attend(q, k, v, log_mask, head_dim**-0.5 if scale is None else scale)
