"""Validation and choice of the backend for attention over the ragged cache (Sec. 4.5)."""

from torch import Tensor

from lkv.ops.ragged_attention import loop, reference

_BACKENDS = {"loop": loop.attend, "reference": reference.attend}


def ragged_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float, backend: str = "auto"
) -> Tensor:
    """Attention of new tokens over what each KV head holds, the new tokens' own k and v included.

    `q` [B, Hq, Tq, d]; `k_pool` [P, d], `v_pool` [P, dv]: the spans of all heads one after another; `starts`, `lens`
    [B, Hkv] int32: where the span of each head begins and how many entries it has, of which the last Tq are the new
    tokens (causal among themselves; everything older is visible). Returns [B, Hq, Tq, dv]. `backend`: "auto", "loop"
    or "reference"; a backend asked for by name never falls back. Raises ValueError for shapes that do not fit.
    """
    if backend != "auto" and backend not in _BACKENDS:
        raise ValueError(f"backend is {backend!r}, but it must be 'auto' or one of {sorted(_BACKENDS)}.")
    if starts.shape != lens.shape or starts.ndim != 2 or starts.shape[0] != q.shape[0] or q.shape[1] % starts.shape[1]:
        raise ValueError(f"starts {tuple(starts.shape)} and lens {tuple(lens.shape)} do not fit q {tuple(q.shape)}.")
    attend = _BACKENDS["loop" if backend == "auto" else backend]
    return attend(q, k_pool, v_pool, starts, lens, scale)
