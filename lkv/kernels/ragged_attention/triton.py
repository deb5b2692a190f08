"""Ragged attention and append in Triton, in equal slices of the flat axis for heads of any lengths (Sec. 4.5).

Heads differ several-fold in length, so a grid with one program a head leaves most of a GPU idle. Here every program
reads the same number of entries. Slices may begin and end inside a head; programs locate them from the lengths on the
device, without a plan from the host. The last program that reads a head's entries reduces the partial results. In a
decode step it also attends to the new token and appends it to the pools, so that a step is one launch, and every
replay (CUDA graphs) is a new step. Where entries are in a basis, programs transform the queries of their heads, and the
last one of a head transforms its outputs back.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

import lkv.kernels.ragged_attention.tier_kernels as tier_kernels
import lkv.kernels.ragged_attention.triton_kernels as kernels
from lkv.kernels import triton_helpers
from lkv.kernels.ragged_attention.arguments import MAX_QUANTIZED, RaggedKV
from lkv.kernels.triton_helpers import LOG2_E
from lkv.utils import devices

LARGEST_DIM = 256
_RESTORED_BLOCK = 32
# Of more packed rows a span, its codes are restored once for all, rather than in every tile of up to 16 rows.
_MAX_ROWS_OVER_CODES = 128
_APPENDED_ROWS = 16  # new tokens of a span that a program appends
# The least entries per program that make its launch worthwhile.
_MIN_SLICE = 128
_JOINED_ROWS = 16  # packed rows whose partial results are reduced at once
_JOINED_AT_ONCE = 16_384  # numbers of these parts; each round waits for the memory once
_PROGRAMS_WITHOUT_GPU = 7
# Shared memory for Triton's exchanges between warps, in addition to blocks, queries and probabilities.
_OWN_SHARED_MEMORY = 4096
# What is done for new tokens: nothing; attend to one and append it; count those that are in the pools already.
_NONE, _SINGLE, _COUNT = 0, 1, 2
# Whether codes are restored by PTX, which Triton's interpreter does not know.
_ALLOWS_PTX = not triton_helpers.is_interpreted()
_NO_BASIS = (None,) * 4
_TIER_TENSORS = 5 * MAX_QUANTIZED  # of all tiers that the slice kernel takes


@dataclass(frozen=True, eq=False)
class Launch:
    """The launch parameters that depend only on a call's shapes.

    `compiled` caches compiled kernels and their constants by the other compile-time arguments. Launching them directly
    takes less than half of the host time of Triton's own launch, which binds some forty arguments again.
    `python -m tests.cache.host_time` measures it.
    """

    programs: int
    tiles: int
    slice_options: dict[str, Any]
    compiled: dict[Any, tuple[CompiledKernel, tuple[Any, ...]]] = field(default_factory=dict)

    def start(
        self, kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], options: dict[str, Any],
        variant: tuple[Any, ...], is_aligned: bool,
    ) -> None:  # fmt: skip
        """Launch `kernel`; `variant` are the other compile-time arguments, if the tensors are aligned."""
        place = kernel, *variant
        known = self.compiled.get(place) if is_aligned else None
        if known is not None:
            compiled_kernel, constants = known
            compiled_kernel[grid](*arguments, *constants)
            return
        compiled_kernel = kernel[grid](*arguments, **options)
        if is_aligned and isinstance(compiled_kernel, CompiledKernel):
            # The constexpr arguments come last.
            constants = tuple(options[name] for name in kernel.arg_names if name in options)
            self.compiled[place] = compiled_kernel, constants


def unsupported_reason(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """Return why these kernels cannot run, in one sentence; None if they can."""
    if reason := triton_helpers.unsupported_reason(device, dtype):
        return reason
    if not 0 < min(dim, value_dim) <= max(dim, value_dim) <= LARGEST_DIM:
        return f"the head sizes are {dim} and {value_dim}, but the Triton kernels take 1 to {LARGEST_DIM}."
    if not pipeline_stages(16, dim, value_dim, dtype, _memory(device)):
        name = devices.runtime(device).get_device_properties(device).name
        return f"{name} has too little shared memory for heads of {dim} in {dtype}."
    return None


def attend(
    q: Tensor, kv: RaggedKV, scale: float, causal: bool = True, with_lse: bool = False, softcap: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """Shapes as in `api.ragged_attention`. Nothing here waits for the device."""
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if with_lse else None
    with devices.device_guard(q.device):
        return _attend(q, q, q, kv, scale, softcap, _NONE, None, causal, lse), lse


def append_and_attend(
    q: Tensor, key: Tensor, value: Tensor, kv: RaggedKV, scale: float, buffers: dict[Any, Any] | None = None,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """As `api.append_and_attend`; nothing waits for the device.

    One launch for one new token, two for more; three where codes are restored before.
    """
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    is_single = key.shape[2] == 1 and not _restores(q, kv)
    with devices.device_guard(q.device):
        if not is_single:
            _append(key, value, kv)
        return _attend(q, key, value, kv, scale, softcap, _SINGLE if is_single else _COUNT, buffers)


def _append(key: Tensor, value: Tensor, kv: RaggedKV) -> None:
    """Store new tokens behind their spans, in the basis, without counting them."""
    (_, kv_heads, rows, dim), value_dim = key.shape, value.shape[-1]
    blocks = _blocks(dim, value_dim, key.dtype)
    kernels.append_kernel[kv.starts.numel(), -(-rows // _APPENDED_ROWS)](
        key, value, *kv[:4], *(kv.basis or _NO_BASIS), kv_heads, rows, *key.stride()[:3], *value.stride()[:3], DIM=dim,
        VALUE_DIM=value_dim, BLOCK_R=_APPENDED_ROWS, BLOCK_D=blocks["BLOCK_D"], BLOCK_V=blocks["BLOCK_V"],
    )  # fmt: skip


def _attend(
    q: Tensor, key: Tensor, value: Tensor, kv: RaggedKV, scale: float, softcap: float | None, new: int,
    buffers: dict[Any, Any] | None, causal: bool = True, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    batch, heads, rows, dim = q.shape
    added = rows if new == _COUNT else 0
    if _restores(q, kv):
        kv = _restore(kv, added)
    k_pool, v_pool, starts, lens, quantized, basis = kv
    kv_heads, value_dim, spans = starts.shape[1], v_pool.shape[-1], starts.numel()
    q = q if q.stride(-1) == 1 else q.contiguous()
    packed = rows * (heads // kv_heads)
    bits = tuple(number for tier in quantized for number in tier[5:])
    launch = _launch(q.device, q.dtype, packed, spans, heads // kv_heads, dim, value_dim, bits)
    # Only what a decode step needs is worth keeping.
    places = (launch.programs + spans - 1) * packed
    kept = buffers if new == _SINGLE else None
    parts, extremes = _work_space(q, "parts", places, value_dim, kept), _work_space(q, "extremes", places, 2, kept)
    block = launch.programs * launch.tiles * launch.slice_options["BLOCK_M"]
    turned = None if basis is None else _work_space(q, "queries", block, dim, kept)
    # Laid out by token, as the caller's next product reads it.
    out = q.new_empty((batch, rows, heads, value_dim)).transpose(1, 2)
    strides = q.stride(), key.stride(), value.stride()
    (q_batch, q_head, q_row, _), (k_batch, k_head, _, _), (v_batch, v_head, _, _) = strides
    codes = _tier_tensors(kv)
    arguments: tuple[Any, ...] = (
        q, key, value, k_pool, v_pool, starts, lens, out, lse, parts, extremes,
        _tickets(q, spans * launch.tiles + 1, buffers), spans, kv_heads, rows, added,
        scale * LOG2_E.value, *out.stride()[:3], q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head, turned,
        *(basis or _NO_BASIS), *codes,
    )  # fmt: skip
    launch.start(
        kernels.slice_kernel,
        (launch.programs, launch.tiles, 1),
        arguments,
        launch.slice_options | {"CAUSAL": causal, "NEW": new, "SOFTCAP": (softcap or 0.0) * LOG2_E.value},
        (kv_heads, new, strides, causal, lse is None, softcap, basis and basis.mean.dtype),
        _are_aligned(q, key, value, k_pool, v_pool, starts, lens, *(basis or ()), *(x for x in codes if x is not None)),
    )
    return out


def _restores(q: Tensor, kv: RaggedKV) -> bool:
    """Return whether codes are restored before attention: for many rows, and where they would spill registers."""
    spills = q.element_size() > 2 and max(q.shape[-1], kv.v_pool.shape[-1]) > 128
    has_many_rows = q.shape[1] * q.shape[2] > _MAX_ROWS_OVER_CODES * kv.starts.shape[1]
    return bool(kv.quantized) and (spills or has_many_rows)


def _restore(kv: RaggedKV, added: int) -> RaggedKV:
    """Return the entries, and `added` that are not counted yet, in pools without codes, in the same basis."""
    k_pool, v_pool, starts, lens, quantized, _ = kv
    dim, value_dim, spans = k_pool.shape[1], v_pool.shape[1], starts.numel()
    size = len(k_pool) + sum(len(tier.key_norms) for tier in quantized)
    new_k, new_v = (pool.new_empty((size, pool.shape[1])) for pool in (k_pool, v_pool))
    new_starts, blocks = torch.empty_like(starts), _blocks(dim, value_dim, k_pool.dtype)
    programs = _PROGRAMS_WITHOUT_GPU
    if triton_helpers.is_compiled_for(k_pool.device):
        programs = max(1, 4 * triton_helpers.multiprocessors(k_pool.device) // spans)
    tier_kernels.restore_kernel[programs, spans](
        k_pool, v_pool, starts, lens, added, new_k, new_v, new_starts, spans, *_tier_tensors(kv), DIM=dim,
        VALUE_DIM=value_dim, BITS=tuple(number for tier in quantized for number in tier[5:]), BLOCK=_RESTORED_BLOCK,
        BLOCK_D=blocks["BLOCK_D"], BLOCK_V=blocks["BLOCK_V"],
    )  # fmt: skip
    return kv._replace(k_pool=new_k, v_pool=new_v, starts=new_starts, quantized=())


def _tier_tensors(kv: RaggedKV) -> list[Tensor | None]:
    """Return codes, norms and tables of all tiers; None for those that do not exist."""
    tensors = [x for tier in kv.quantized for x in tier[:5]]
    return [*tensors, *[None] * (_TIER_TENSORS - len(tensors))]


def _are_aligned(*tensors: Tensor) -> bool:
    """Return whether all addresses are multiples of 16 bytes, as Triton's aligned code requires."""
    places = 0
    for tensor in tensors:
        places |= tensor.data_ptr()
    return not places & 15


def _work_space(q: Tensor, name: str, places: int, size: int, buffers: dict[Any, Any] | None) -> Tensor:
    """Return space [places, size] in float32; kept in `buffers` by its name if given."""
    place = name, q.device
    buffer = None if buffers is None else buffers.get(place)
    if buffer is None or buffer.shape != (places, size):
        buffer = q.new_empty((places, size), dtype=torch.float32)
        if buffers is not None:
            buffers[place] = buffer
    return buffer


def _tickets(q: Tensor, count: int, buffers: dict[Any, Any] | None) -> Tensor:
    """Return at least `count` zeros in int32, which every launch resets to zero; kept in `buffers` if given."""
    place = "tickets", q.device
    buffer = None if buffers is None else buffers.get(place)
    if buffer is None or len(buffer) < count:
        buffer = q.new_zeros(count, dtype=torch.int32)
        if buffers is not None:
            buffers[place] = buffer
    return buffer


@functools.lru_cache(maxsize=256)
def _launch(
    device: torch.device, dtype: torch.dtype, packed: int, spans: int, group: int, dim: int, value_dim: int,
    bits: tuple[int, ...] = (),
) -> Launch:  # fmt: skip
    """Return the launch parameters for `spans` with `packed` rows each and tiers of `bits`; cached by shape."""
    memory = _memory(device)
    # More rows than that do not fit a program's registers.
    most = 16 if bits else min(128 // dtype.itemsize, 64)
    block_m = min(most, max(16, triton.next_power_of_2(packed)))
    while not pipeline_stages(block_m, dim, value_dim, dtype, memory):
        block_m //= 2
    blocks, stages = _blocks(dim, value_dim, dtype), pipeline_stages(block_m, dim, value_dim, dtype, memory)
    wide = max(blocks["BLOCK_D"], blocks["BLOCK_V"]) > 128
    # Over tiers each warp has sums of its own, for which it has no registers otherwise.
    rows = max(8, min(8 if wide else 16, triton.next_power_of_2(packed))) if bits else block_m
    tiles = -(-packed // rows)
    warps = 8 if block_m * blocks["BLOCK_V"] > 8192 else 4
    programs = (
        2 * triton_helpers.multiprocessors(device) if triton_helpers.is_compiled_for(device) else _PROGRAMS_WITHOUT_GPU
    )
    sizes = {"DIM": dim, "VALUE_DIM": value_dim, "BLOCK_D": blocks["BLOCK_D"], "BLOCK_V": blocks["BLOCK_V"]}
    join_m = min(_JOINED_ROWS, triton.next_power_of_2(packed))
    return Launch(
        # Many tiles already fill a GPU, and every slice takes memory for its partial result.
        max(1, programs // tiles),
        tiles,
        sizes
        | {
            "GROUP": group,
            "SPANS": triton.next_power_of_2(spans),
            "LEAST": _MIN_SLICE,
            "BITS": bits,
            "ALLOWS_PTX": _ALLOWS_PTX,
            "WARPS": warps,
            "STAGES": 2 if wide else min(3, stages),
            "ROWS": rows,
            "BLOCK_M": block_m,
            "BLOCK_N": blocks["BLOCK_N"],
            "JOIN_M": join_m,
            "BLOCK_S": max(1, _JOINED_AT_ONCE // (join_m * blocks["BLOCK_V"])),
            "num_warps": warps,
            "num_stages": stages,
        },
    )


def _blocks(dim: int, value_dim: int, dtype: torch.dtype) -> dict[str, int]:
    block_d, block_v = triton_helpers.padded(dim), triton_helpers.padded(value_dim)
    # About 16 KiB of k at once: enough loads in flight, and memory for several stages.
    wide = max(block_d, block_v) * dtype.itemsize
    return {"BLOCK_D": block_d, "BLOCK_V": block_v, "BLOCK_N": max(16, min(128, 16384 // wide))}


def pipeline_stages(block_m: int, dim: int, value_dim: int, dtype: torch.dtype, shared_memory: int) -> int:
    """Return the pipeline stages for tiles of `block_m` packed rows.

    The most, up to 4, with which two programs share a multiprocessor; 2, the least for asynchronous copies, if only one
    program fits; 0 if none does.

    Args:
        block_m: Packed rows of a tile.
        dim: Channels of k.
        value_dim: Channels of v.
        dtype: Their dtype.
        shared_memory: Bytes that a program may use.
    """
    blocks = _blocks(dim, value_dim, dtype)
    block_n = blocks["BLOCK_N"]
    # One block is in registers while the others are loaded; queries and probabilities take shared memory as well.
    block = block_n * (blocks["BLOCK_D"] + blocks["BLOCK_V"]) * dtype.itemsize
    rest = block_m * (blocks["BLOCK_D"] + block_n) * dtype.itemsize + _OWN_SHARED_MEMORY
    for stages in (4, 3, 2):
        if 2 * ((stages - 1) * block + rest) <= shared_memory:
            return stages
    return 2 if block + rest <= shared_memory else 0


def _memory(device: torch.device) -> int:
    """Return the bytes of shared memory of a block; plenty in the interpreter."""
    return triton_helpers.shared_memory(device) if triton_helpers.is_compiled_for(device) else 2**20
