"""Ragged attention by PyTorch's own variable-length flash attention: a GPU without Triton. Every span is a sequence."""

import inspect
from typing import Any

import torch
from torch import Tensor

from lkv.utils import devices

DTYPES = (torch.bfloat16, torch.float16)
LARGEST_DIM = 256


def refusal(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """Why this cannot run, in one sentence; None where it can."""
    if device.type != "cuda":
        return f"the pools are on {device.type!r}, but variable-length flash attention needs a CUDA device."
    # Spans end in free slots, so their lengths are given apart from their starts.
    operator = _operator()
    if operator is None or "seqused_k" not in inspect.signature(operator).parameters:
        return f"PyTorch {torch.__version__} has no variable-length attention that takes lengths apart from starts."
    if dtype not in DTYPES or dim != value_dim or dim > LARGEST_DIM or dim % 8:
        return (
            f"heads of {dim} and {value_dim} in {dtype} were given, but variable-length flash attention takes bfloat16 "
            f"and float16, with k and v of one size that is a multiple of 8 up to {LARGEST_DIM}."
        )
    gpu = devices.runtime(device).get_device_properties(device)
    if gpu.major < 8:
        return f"{gpu.name} has compute capability {gpu.major}.{gpu.minor}, but flash attention needs 8.0."
    return None


def attend(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float,
    causal: bool = True, with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Shapes as in `api.ragged_attention`. Nothing here waits for the device."""
    if causal and not with_lse:
        return _attend(q, k_pool, v_pool, starts, lens, scale, causal), None
    from torch.nn.attention.varlen import AuxRequest

    batch, heads, rows, _ = q.shape
    kv_heads = starts.shape[1]
    out, lse = _attend(q, k_pool, v_pool, starts, lens, scale, causal, return_aux=AuxRequest(lse=True))
    lse = lse.view(-1, batch, kv_heads, rows).permute(1, 2, 0, 3).reshape(batch, heads, rows)
    # PyTorch does not document what a sequence without keys gives.
    empty = (lens == 0).repeat_interleave(heads // kv_heads, 1)[..., None]
    return out.masked_fill(empty[..., None], 0.0), lse.float().masked_fill(empty, -torch.inf)


def _attend(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float, causal: bool, **wanted: Any
) -> Any:
    """Outputs [B, Hq, Tq, d]; with `return_aux` wanted also the log-sum-exp [group, B * Hkv * Tq]."""
    batch, heads, rows, dim = q.shape
    kv_heads, spans = starts.shape[1], starts.numel()
    grouped = q.view(batch, kv_heads, heads // kv_heads, rows, dim).transpose(2, 3).reshape(spans * rows, -1, dim)
    ends = torch.full_like(lens.flatten()[:1], len(k_pool))
    attended = _operator()(
        grouped,
        k_pool[:, None],
        v_pool[:, None],
        torch.arange(0, (spans + 1) * rows, rows, dtype=torch.int32, device=q.device),
        torch.cat([starts.flatten(), ends]),
        rows,
        # An upper bound: the greatest length is known on the device alone.
        len(k_pool),
        scale=scale,
        window_size=(-1, 0 if causal else -1),
        enable_gqa=True,
        seqused_k=lens.flatten(),
        **wanted,
    )
    out = attended[0] if wanted else attended
    out = out.view(batch, kv_heads, rows, -1, dim).transpose(2, 3).reshape(batch, heads, rows, dim)
    return (out, attended[1]) if wanted else out


def _operator() -> Any:
    """`varlen_attn`, None where PyTorch is too old to have it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn
