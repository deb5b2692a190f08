"""Attention of continuations over a frozen prompt under a mask, in Triton: launches and the autograd function.

Nothing of the prompt is copied or differentiated, and only the continuations' own tensors and the mask are saved.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

import lkv.kernels.soft_mask_attention.continuation_kernels as kernels
import lkv.kernels.soft_mask_attention.triton as soft
from lkv.kernels.soft_mask_attention.arguments import Continuations
from lkv.utils import devices


def attend(given: Continuations, scale: float, tiles: soft.Tiles | None = None) -> Tensor:
    """As `api.continuation_attention` with a mask and owners, where `triton.refusal` has no objection."""
    *tensors, log_mask, owners = given
    assert log_mask is not None
    tiles = tiles or soft.tiles_on(given.q.device, given.q.dtype, given.q.shape[3])
    tensors = [x if x.stride(3) == 1 else x.contiguous() for x in tensors]
    with devices.device_guard(given.q.device):
        return _ContinuationAttention.apply(scale, tiles, *tensors, log_mask.float().contiguous(), owners)


class _ContinuationAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: float, tiles: soft.Tiles, *tensors: Tensor) -> Tensor:
        q, key, value, prompt_key, prompt_value, log_mask, owners = tensors
        batch, heads, rows, _ = q.shape
        out = soft.laid_out_as_rows(q)
        lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
        tail_mask = q.new_zeros((batch, key.shape[1], rows), dtype=torch.float32)
        saved = q, key, value, tail_mask, prompt_key, prompt_value, log_mask, owners, out, lse
        grid = (triton.cdiv(rows, tiles.forward.rows), batch * heads)
        kernels.forward[grid](*saved, **_arguments(q, key, value, prompt_key, prompt_value, scale, tiles.forward))
        ctx.save_for_backward(*saved)
        ctx.scale, ctx.tiles = scale, tiles
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *given, out, lse = ctx.saved_tensors
        q, key, value, tail_mask, prompt_key, prompt_value, log_mask, owners = given
        batch, heads, rows, _ = q.shape
        kv_heads, columns = prompt_key.shape[1:3]
        d_out = soft.laid_out_as_rows(d_out).copy_(d_out) if d_out.stride() != out.stride() else d_out
        d_q, d_key, d_value = (soft.laid_out_as_rows(x) for x in (q, key, value))
        d_mask, d_tail_mask, delta = torch.empty_like(log_mask), torch.empty_like(tail_mask), torch.empty_like(lse)
        tile = ctx.tiles.query_gradient
        arguments = _arguments(q, key, value, prompt_key, prompt_value, ctx.scale, tile)
        kernels.query_gradient[(triton.cdiv(rows, tile.rows), batch * heads)](
            *given, out, d_out, lse, delta, d_q, **arguments
        )
        tile, results = ctx.tiles.key_gradient, (d_key, d_value, d_tail_mask)
        soft.launch_key_gradient(q, key, value, tail_mask, d_out, lse, delta, *results, ctx.scale, tile)
        if ctx.needs_input_grad[7]:
            arguments = _arguments(q, key, value, prompt_key, prompt_value, ctx.scale, tile)
            prompt_arguments = {name: x for name, x in arguments.items() if not name.startswith(("k_", "v_"))}
            kernels.mask_gradient[(triton.cdiv(columns, tile.columns), batch * kv_heads)](
                q, prompt_key, prompt_value, log_mask, owners, d_out, lse, delta, d_mask, **prompt_arguments
            )
        return None, None, d_q, d_key, d_value, None, None, d_mask, None


def _arguments(
    q: Tensor, key: Tensor, value: Tensor, prompt_key: Tensor, prompt_value: Tensor, scale: float, tile: soft.Tile
) -> dict[str, Any]:
    of_prompt = soft.shared_arguments(q, prompt_key, prompt_value, scale, tile)
    strides = {f"prompt_{name}": x for name, x in of_prompt.items() if name.startswith(("k_", "v_"))}
    return soft.shared_arguments(q, key, value, scale, tile) | strides | {"columns": prompt_key.shape[2]}
