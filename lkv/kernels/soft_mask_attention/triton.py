"""Soft-masked attention in Triton: tile sizes, launches and autograd functions around the kernels."""

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

import lkv.kernels.soft_mask_attention.triton_kernels as kernels
from lkv.kernels import triton_helpers
from lkv.utils import devices

HEAD_DIMS = (64, 80, 96, 128, 256)


class Tile(NamedTuple):
    """Block sizes of one kernel: query rows, key columns, warps and pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """The tiles of the three kernels.

    Also the shared memory in bytes that the largest of them needs, and the major compute capabilities on which they
    exceed other resources.
    """

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile
    shared: int
    not_on: tuple[int, ...] = ()


# By bytes a number and padded head dim, the largest first: in half precision the largest that leave the loops over full
# blocks without register spills on Hopper (as ptxas reports; `experiments.soft_mask_attention --tune` times others).
_TILES = {
    (2, 64): (Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2), 83_000),),
    (2, 128): (
        Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2), 133_000),
        Tiles(Tile(128, 32, 8, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), 100_000),
    ),
    (2, 256): (
        Tiles(Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), Tile(32, 64, 8, 2), 197_000),
        Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), 100_000),
    ),
    # Float32 has no tensor cores of full precision: the products take registers, and larger tiles spill them.
    (4, 64): (
        Tiles(Tile(64, 32, 8, 2), Tile(64, 32, 8, 1), Tile(32, 64, 8, 1), 83_000, (8, 10, 12)),
        Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), 100_000),
    ),
    (4, 128): (Tiles(Tile(32, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), 100_000),),
    (4, 256): (Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), 100_000),),
}


def unsupported_reason(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """Return why these kernels cannot run, in one sentence; None if they can."""
    if reason := triton_helpers.unsupported_reason(device, dtype):
        return reason
    if dim not in HEAD_DIMS or value_dim != dim:
        return f"the head sizes are {dim} and {value_dim}, but the Triton kernels take {HEAD_DIMS}, equal for k and v."
    if tiles_on(device, dtype, dim) is None:
        name = devices.runtime(device).get_device_properties(device).name
        size = triton_helpers.shared_memory(device)
        return f"{name} has {size} bytes of shared memory a block, too little for heads of {dim} in {dtype}."
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, log_mask: Tensor, scale: float, tiles: Tiles | None = None) -> Tensor:
    """As `api.soft_mask_attention`, if `unsupported_reason` returns None. `tiles`: block sizes to try out."""
    tiles = tiles or tiles_on(q.device, q.dtype, q.shape[3])
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    with devices.device_guard(q.device):
        return _SoftMaskAttention.apply(q, k, v, log_mask.float().contiguous(), scale, tiles)


@functools.cache
def tiles_on(device: torch.device, dtype: torch.dtype, dim: int) -> Tiles | None:
    """Return the tiles in use on a device; None if its shared memory is too small."""
    options = _TILES[dtype.itemsize, triton.next_power_of_2(dim)]
    if not triton_helpers.is_compiled_for(device):
        return options[0]
    memory, major = triton_helpers.shared_memory(device), devices.runtime(device).get_device_properties(device).major
    return next((tiles for tiles in options if tiles.shared <= memory and major not in tiles.not_on), None)


class _SoftMaskAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_mask: Tensor, scale: float, tiles: Tiles) -> Tensor:
        batch, heads, rows, _ = q.shape
        out = laid_out_as_rows(q)
        lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
        tile = tiles.forward
        grid = (triton.cdiv(rows, tile.rows), batch * heads)
        kernels.forward[grid](q, k, v, log_mask, out, lse, **shared_arguments(q, k, v, scale, tile))
        ctx.save_for_backward(q, k, v, log_mask, out, lse)
        ctx.scale, ctx.tiles = scale, tiles
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_mask, out, lse = ctx.saved_tensors
        batch, heads, rows, _ = q.shape
        d_out = laid_out_as_rows(d_out).copy_(d_out) if d_out.stride() != out.stride() else d_out
        d_q, d_k, d_v = (laid_out_as_rows(x) for x in (q, k, v))
        d_mask, delta = torch.empty_like(log_mask), torch.empty_like(lse)
        tile = ctx.tiles.query_gradient
        kernels.query_gradient[(triton.cdiv(rows, tile.rows), batch * heads)](
            q, k, v, log_mask, out, d_out, lse, delta, d_q, **shared_arguments(q, k, v, ctx.scale, tile)
        )
        results = d_k, d_v, d_mask
        launch_key_gradient(q, k, v, log_mask, d_out, lse, delta, *results, ctx.scale, ctx.tiles.key_gradient)
        return d_q, d_k, d_v, d_mask, None, None


def launch_key_gradient(
    q: Tensor, k: Tensor, v: Tensor, log_mask: Tensor, d_out: Tensor, lse: Tensor, delta: Tensor, d_k: Tensor,
    d_v: Tensor, d_mask: Tensor, scale: float, tile: Tile,
) -> None:  # fmt: skip
    """Fill the gradients of k, v and log m."""
    arguments = shared_arguments(q, k, v, scale, tile) | {"bounded": q.shape[2] % tile.rows != 0}
    grid = (triton.cdiv(k.shape[2], tile.columns), len(k) * k.shape[1])
    kernels.key_gradient[grid](q, k, v, log_mask, d_out, lse, delta, d_k, d_v, d_mask, **arguments)


def laid_out_as_rows(x: Tensor) -> Tensor:
    """Return an empty tensor of the shape of x [B, H, T, d], laid out as [B, T, H, d], the layout of models."""
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2)


def shared_arguments(q: Tensor, k: Tensor, v: Tensor, scale: float, tile: Tile) -> dict[str, Any]:
    """Return the strides, sizes and options that all kernels take.

    Args:
        q: Queries [B, Hq, Tq, d].
        k: Keys [B, Hkv, Tk, d].
        v: Values [B, Hkv, Tk, d].
        scale: The attention scaling factor.
        tile: The block sizes.
    """
    strides = {
        f"{name}_{axis}": stride
        for name, x in (("q", q), ("k", k), ("v", v))
        for axis, stride in zip(("batch", "head", "row"), x.stride(), strict=False)
    }
    return strides | {
        "scale": scale,
        "rows": q.shape[2],
        "columns": k.shape[2],
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "dim": q.shape[3],
        "width": triton.next_power_of_2(q.shape[3]),
        "block_rows": tile.rows,
        "block_columns": tile.columns,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def attend_continuations(scale: float, *tensors: Tensor) -> Tensor:
    """As `api.continuation_attention`, with its tensors from q to `owners`, if `unsupported_reason` returns None.

    Nothing of the prompt is copied or differentiated, and only the continuations' own tensors and the mask are saved.
    """
    *parts, log_mask, owners = tensors
    q = parts[0]
    tiles = tiles_on(q.device, q.dtype, q.shape[3])
    parts = [x if x.stride(3) == 1 else x.contiguous() for x in parts]
    with devices.device_guard(q.device):
        return _ContinuationAttention.apply(scale, tiles, *parts, log_mask.float().contiguous(), owners)


class _ContinuationAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: float, tiles: Tiles, *tensors: Tensor) -> Tensor:
        q, key, value, prompt_key, prompt_value, log_mask, owners = tensors
        batch, heads, rows, _ = q.shape
        out = laid_out_as_rows(q)
        lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
        tail_mask = q.new_zeros((batch, key.shape[1], rows), dtype=torch.float32)
        saved = q, key, value, tail_mask, prompt_key, prompt_value, log_mask, owners, out, lse
        grid = (triton.cdiv(rows, tiles.forward.rows), batch * heads)
        kernels.continuation_forward[grid](
            *saved, **_continuation_arguments(q, key, value, prompt_key, prompt_value, scale, tiles.forward)
        )
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
        d_out = laid_out_as_rows(d_out).copy_(d_out) if d_out.stride() != out.stride() else d_out
        d_q, d_key, d_value = (laid_out_as_rows(x) for x in (q, key, value))
        d_mask, d_tail_mask, delta = torch.empty_like(log_mask), torch.empty_like(tail_mask), torch.empty_like(lse)
        tile = ctx.tiles.query_gradient
        arguments = _continuation_arguments(q, key, value, prompt_key, prompt_value, ctx.scale, tile)
        kernels.continuation_query_gradient[(triton.cdiv(rows, tile.rows), batch * heads)](
            *given, out, d_out, lse, delta, d_q, **arguments
        )
        tile, results = ctx.tiles.key_gradient, (d_key, d_value, d_tail_mask)
        launch_key_gradient(q, key, value, tail_mask, d_out, lse, delta, *results, ctx.scale, tile)
        if ctx.needs_input_grad[7]:
            arguments = _continuation_arguments(q, key, value, prompt_key, prompt_value, ctx.scale, tile)
            prompt_arguments = {name: x for name, x in arguments.items() if not name.startswith(("k_", "v_"))}
            kernels.mask_gradient[(triton.cdiv(columns, tile.columns), batch * kv_heads)](
                q, prompt_key, prompt_value, log_mask, owners, d_out, lse, delta, d_mask, **prompt_arguments
            )
        return None, None, d_q, d_key, d_value, None, None, d_mask, None


def _continuation_arguments(
    q: Tensor, key: Tensor, value: Tensor, prompt_key: Tensor, prompt_value: Tensor, scale: float, tile: Tile
) -> dict[str, Any]:
    of_prompt = shared_arguments(q, prompt_key, prompt_value, scale, tile)
    strides = {f"prompt_{name}": x for name, x in of_prompt.items() if name.startswith(("k_", "v_"))}
    return shared_arguments(q, key, value, scale, tile) | strides | {"columns": prompt_key.shape[2]}
