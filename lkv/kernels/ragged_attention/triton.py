"""Ragged attention and append in Triton, in equal slices of the flat axis whatever the heads' lengths (Sec. 4.5).

Heads differ several-fold in length, so a grid with one share a head leaves most of a GPU idle. Here every program reads
the same number of entries, begins and ends inside any head, and finds out where from the lengths on the device: no
plan is made and nothing waits for the host. A second kernel joins the parts of each head. In a decode step it also
attends to the new token, appends it to the pools and counts it, so that a step is two launches, and every replay of
them (CUDA graphs) is a step of its own.
"""

from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

import lkv.kernels.ragged_attention.triton_code_kernels as code_kernels
import lkv.kernels.ragged_attention.triton_kernels as kernels
from lkv.kernels.ragged_attention.api import QuantizedKV
from lkv.kernels.ragged_attention.triton_launch import APPENDED_AT_ONCE, Ready, code_options, launch_of, refusal
from lkv.utils import devices

__all__ = ["append_and_attend", "attend", "refusal", "unfit"]

_LOG2_E = 1.4426950408889634
# What the join does for new tokens: nothing; attend to one and append it; count those that are in the pools already.
GROUP_SIZES = (16, 32, 64, 128)
_NONE, _SINGLE, _COUNT = 0, 1, 2


def unfit(*tensors: Tensor, quantized: QuantizedKV | None = None) -> str | None:
    """Why these kernels cannot run on these tensors, in one sentence; None where they can."""
    if quantized is not None and quantized.group_size not in GROUP_SIZES:
        return f"groups are of {quantized.group_size} values, but the Triton kernels take {GROUP_SIZES}."
    return None


def attend(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float,
    causal: bool = True, with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Shapes as in `api.ragged_attention`. Nothing here waits for the device."""
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if with_lse else None
    with devices.current(q.device):
        return _attend(q, q, q, k_pool, v_pool, starts, lens, scale, _NONE, None, None, causal, lse), lse


def append_and_attend(
    q: Tensor, key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float,
    buffers: dict[Any, Any] | None = None, codes: QuantizedKV | None = None,
) -> Tensor:  # fmt: skip
    """As `api.append_and_attend`. Two launches for one new token, three for more; nothing waits for the device."""
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    rows = key.shape[2]
    with devices.current(q.device):
        if rows == 1:
            return _attend(q, key, value, k_pool, v_pool, starts, lens, scale, _SINGLE, buffers, codes)
        kernels.append_kernel[(starts.numel(), -(-rows // APPENDED_AT_ONCE))](
            key, value, k_pool, v_pool, starts, lens, starts.shape[1], rows, *key.stride()[:3], *value.stride()[:3],
            **launch_of(q, starts, value.shape[-1], 1).append_options,
        )  # fmt: skip
        return _attend(q, key, value, k_pool, v_pool, starts, lens, scale, _COUNT, None, codes)


def _attend(
    q: Tensor, key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float,
    new: int, buffers: dict[Any, Any] | None, codes: QuantizedKV | None = None, causal: bool = True,
    lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    batch, heads, rows, _ = q.shape
    kv_heads, value_dim, spans = starts.shape[1], v_pool.shape[-1], starts.numel()
    q = q if q.stride(-1) == 1 else q.contiguous()
    packed = rows * (heads // kv_heads)
    launch = launch_of(q, starts, value_dim, packed)
    parts, extremes, counted = _room(q, (launch.programs + spans - 1) * packed, value_dim, spans, buffers)
    # Laid out by token, as the caller's next product reads it.
    out = q.new_empty((batch, rows, heads, value_dim)).transpose(1, 2)
    scale *= _LOG2_E
    strides = q.stride(), key.stride(), value.stride()
    (q_batch, q_head, q_row, _), (k_batch, k_head, _, _), (v_batch, v_head, _, _) = strides
    to_slices: tuple[Any, ...] = (
        q, k_pool, v_pool, starts, lens, parts, extremes, counted, spans, kv_heads, rows, rows if new == _COUNT else 0,
        scale, q_batch, q_head, q_row,
    )  # fmt: skip
    if codes is not None:
        to_slices += codes[:7]
    to_join = (
        parts, extremes, counted, out, extremes if lse is None else lse, q, key, value, k_pool, v_pool, starts, lens,
        spans, kv_heads, rows, launch.programs, scale, *out.stride()[:3], q_batch, q_head, k_batch, k_head, v_batch,
        v_head,
    )  # fmt: skip
    grids = (launch.programs, launch.tiles, 1), (packed, spans, 1)
    compiled = new, strides, None if codes is None else codes[7:], causal, lse is None
    known = compiled if _aligned(q, key, value, *to_slices[1:5]) else None
    ready = launch.ready.get(known)
    if ready is not None and (codes is None or _aligned(*codes[:7])):
        ready.slices[grids[0]](*to_slices, *ready.slice_constants)
        ready.join[grids[1]](*to_join, *ready.join_constants)
        return out
    kernel, options = kernels.slice_kernel, launch.slice_options | {"CAUSAL": causal}
    if codes is not None:
        kernel, options = code_kernels.code_slice_kernel, code_options(launch, q.dtype, codes.bits, codes.group_size)
    slices = kernel[grids[0]](*to_slices, **options)
    join_options = launch.join_options | {"NEW": new, "LSE": lse is not None}
    join = kernels.join_kernel[grids[1]](*to_join, **join_options)
    if known is not None and isinstance(slices, CompiledKernel) and (codes is None or _aligned(*codes[:7])):
        launch.ready[known] = Ready(
            slices, _constants(kernel, options), join, _constants(kernels.join_kernel, join_options)
        )
    return out


def _aligned(*tensors: Tensor) -> bool:
    """Whether all begin at multiples of 16 bytes, as Triton's code for such may be used for."""
    places = 0
    for tensor in tensors:
        places |= tensor.data_ptr()
    return not places & 15


def _constants(kernel: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """What is constant of the arguments, which come last."""
    return tuple(options[name] for name in kernel.arg_names if name in options)


def _room(
    q: Tensor, places: int, value_dim: int, spans: int, buffers: dict[Any, Any] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums [places, value_dim] and extremes [places, 2] of the parts, and the lengths read [spans]: from `buffers`
    where there are some, so that they are made once."""
    key = (q.device, places, value_dim, spans)
    if buffers is not None and key in buffers:
        return buffers[key]
    made = (
        q.new_empty((places, value_dim), dtype=torch.float32),
        q.new_empty((places, 2), dtype=torch.float32),
        q.new_empty(spans, dtype=torch.int32),
    )
    if buffers is not None:
        buffers.clear()
        buffers[key] = made
    return made
