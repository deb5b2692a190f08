"""Ragged attention and append in Triton, in equal slices of the flat axis whatever the heads' lengths (Sec. 4.5).

Heads differ several-fold in length, so a grid with one share a head leaves most of a GPU idle. Here every program reads
the same number of entries, begins and ends inside any head, and finds out where from the lengths on the device: no
plan is made and nothing waits for the host. A second kernel joins the parts of each head. In a decode step it also
attends to the new token, appends it to the pools and counts it, so that a step is two launches, and every replay of
them (CUDA graphs) is a step of its own.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

import lkv.ops.ragged_attention.triton_kernels as kernels
from lkv import devices
from lkv.ops.ragged_attention.codes import Codes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_DIM = 256
_LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
# Below this many entries a program has too little to read to be worth starting.
_LEAST_SLICE = 128
_PARTS_AT_ONCE = 32
_PROGRAMS_WITHOUT_GPU = 7
_APPENDED_AT_ONCE = 16
# What the join does for new tokens: nothing; attend to one and append it; count those that are in the pools already.
_NONE, _SINGLE, _COUNT = 0, 1, 2
# What Triton takes beside blocks, queries and shares, to exchange numbers between warps.
_OWN_SHARED_MEMORY = 4096


@triton.jit
def _slice_kernel(
    q,
    k_pool,
    v_pool,
    starts,
    lens,
    parts,
    extremes,
    counted,
    spans,
    kv_heads,
    rows,
    added,
    scale,
    q_batch,
    q_head,
    q_row,
    GROUP: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    SPANS: tl.constexpr,  # noqa: N803
    LEAST: tl.constexpr,  # noqa: N803
    CAUSAL: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    """One slice of the flat axis for one tile of packed rows; row m of a span is new token m // GROUP.

    `added` entries a span are in the pools, but not counted in `lens` yet; `counted` gets the lengths that were read.
    """
    program, tile = tl.program_id(0), tl.program_id(1)
    all_spans = tl.arange(0, SPANS)
    held = tl.load(lens + all_spans, mask=all_spans < spans, other=-added) + added
    if (program == 0) & (tile == 0):
        tl.store(counted + all_spans, held, mask=all_spans < spans)
    ends = tl.cumsum(held, 0)
    total = tl.sum(held, 0)
    size = tl.maximum(tl.cdiv(total, tl.num_programs(0)), LEAST)
    low = program * size
    high = tl.minimum(low + size, total)

    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = packed // GROUP
    within = packed < rows * GROUP
    latest = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, rows - 1)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)

    if low < high:
        first = tl.sum((ends <= low).to(tl.int32), 0)
        last = tl.sum((ends < high).to(tl.int32), 0)
        for span in range(first, last + 1):
            length = tl.load(lens + span) + added
            before = tl.sum(tl.where(all_spans < span, held, 0), 0)
            begin = tl.maximum(low - before, 0)
            end = tl.minimum(high - before, length)
            visible = length - 1 + 0 * token
            if CAUSAL:
                # New tokens that no row of this tile sees are not read.
                end = tl.minimum(end, length - rows + latest + 1)
                visible = length - rows + token
            start = tl.load(starts + span).to(tl.int64)
            head = (span % kv_heads) * GROUP + packed % GROUP
            query_at = q + (span // kv_heads).to(tl.int64) * q_batch + head * q_head + token * q_row
            query = tl.load(query_at[:, None] + dims[None, :], mask=within[:, None] & (dims[None, :] < DIM), other=0.0)
            query = query.to(tl.float32) if WIDEN else query
            highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            weight = tl.zeros([BLOCK_M], tl.float32)
            sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            k_own, v_own = k_pool + start * DIM, v_pool + start * VALUE_DIM
            for at in range(begin, end, BLOCK_N):
                entry = at + tl.arange(0, BLOCK_N)
                inside = entry < end
                key = tl.load(
                    k_own + entry[None, :].to(tl.int64) * DIM + dims[:, None],
                    mask=inside[None, :] & (dims[:, None] < DIM),
                    other=0.0,
                )
                value = tl.load(
                    v_own + entry[:, None].to(tl.int64) * VALUE_DIM + value_dims[None, :],
                    mask=inside[:, None] & (value_dims[None, :] < VALUE_DIM),
                    other=0.0,
                )
                key, value = (key.to(tl.float32), value.to(tl.float32)) if WIDEN else (key, value)
                scores = tl.dot(query, key, input_precision="ieee") * scale
                seen = inside[None, :] & (entry[None, :] <= visible[:, None])
                scores = tl.where(seen, scores, float("-inf"))
                new = tl.maximum(highest, tl.max(scores, 1))
                # A row that sees nothing yet would give inf - inf.
                base = tl.where(new == float("-inf"), 0.0, new)
                shrink = tl.exp2(highest - base)
                share = tl.exp2(scores - base[:, None])
                weight = weight * shrink + tl.sum(share, 1)
                sums = sums * shrink[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
                highest = new
            # Programs and spans rise together, so their sum is a place that no other pair has.
            slot = ((program + span) * rows * GROUP).to(tl.int64) + packed
            tl.store(extremes + 2 * slot, highest, mask=within)
            tl.store(extremes + 2 * slot + 1, weight, mask=within)
            tl.store(
                parts + slot[:, None] * VALUE_DIM + value_dims[None, :],
                sums,
                mask=within[:, None] & (value_dims[None, :] < VALUE_DIM),
            )


@triton.jit
def _join_kernel(
    parts,
    extremes,
    counted,
    out,
    lse,
    q,
    key,
    value,
    k_pool,
    v_pool,
    starts,
    lens,
    spans,
    kv_heads,
    rows,
    programs,
    scale,
    out_batch,
    out_head,
    out_row,
    q_batch,
    q_head,
    k_batch,
    k_head,
    v_batch,
    v_head,
    NEW: tl.constexpr,  # noqa: N803
    LSE: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    SPANS: tl.constexpr,  # noqa: N803
    LEAST: tl.constexpr,  # noqa: N803
    BLOCK_S: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    """One packed row of one span from its parts and, if NEW is 1, the new token; the lengths grow if it is not 0."""
    # Packed rows first: a part of a prompt has more of them than the second axis of a grid may have.
    packed, span = tl.program_id(0), tl.program_id(1)
    all_spans = tl.arange(0, SPANS)
    held = tl.load(counted + all_spans, mask=all_spans < spans, other=0)
    size = tl.maximum(tl.cdiv(tl.sum(held, 0), programs), LEAST)
    before = tl.sum(tl.where(all_spans < span, held, 0), 0)
    length = tl.load(counted + span)
    first = before // size + span
    # A span without entries has no parts.
    last = tl.where(length > 0, (before + length - 1) // size + span, first - 1)

    dims = tl.arange(0, BLOCK_V)
    highest = tl.full([1], float("-inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    sums = tl.zeros([BLOCK_V], tl.float32)
    for at in range(first, last + 1, BLOCK_S):
        part = at + tl.arange(0, BLOCK_S)
        inside = part <= last
        slot = part.to(tl.int64) * rows * GROUP + packed
        peak = tl.load(extremes + 2 * slot, mask=inside, other=float("-inf"))
        share = tl.load(extremes + 2 * slot + 1, mask=inside, other=0.0)
        part_sums = tl.load(
            parts + slot[:, None] * VALUE_DIM + dims[None, :],
            mask=inside[:, None] & (dims[None, :] < VALUE_DIM),
            other=0.0,
        )
        new = tl.maximum(highest, tl.max(peak, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        shrink, factor = tl.exp2(highest - base), tl.exp2(peak - base)
        weight = weight * shrink + tl.sum(share * factor, 0)
        sums = sums * shrink + tl.sum(part_sums * factor[:, None], 0)
        highest = new
    batch, kv_head = (span // kv_heads).to(tl.int64), span % kv_heads
    head = kv_head * GROUP + packed % GROUP
    if NEW == 1:
        channels = tl.arange(0, BLOCK_D)
        query = tl.load(q + batch * q_batch + head * q_head + channels, mask=channels < DIM, other=0.0)
        fresh = tl.load(key + batch * k_batch + kv_head * k_head + channels, mask=channels < DIM, other=0.0)
        fresh_value = tl.load(value + batch * v_batch + kv_head * v_head + dims, mask=dims < VALUE_DIM, other=0.0)
        score = tl.sum(query.to(tl.float32) * fresh.to(tl.float32), 0) * scale
        new = tl.maximum(highest, score)
        shrink, factor = tl.exp2(highest - new), tl.exp2(score - new)
        weight = weight * shrink + factor
        sums = sums * shrink + fresh_value.to(tl.float32) * factor
        if packed == 0:
            end = (tl.load(starts + span) + length).to(tl.int64)
            tl.store(k_pool + end * DIM + channels, fresh, mask=channels < DIM)
            tl.store(v_pool + end * VALUE_DIM + dims, fresh_value, mask=dims < VALUE_DIM)
            # Nothing in this launch reads `lens`, so that programs of any order agree.
            tl.store(lens + span, length + 1)
    elif NEW == 2:  # noqa: SIM102
        if packed == 0:
            tl.store(lens + span, length)
    if LSE:
        # Of a span without entries: 0, with a logarithm of -inf.
        row = ((span // kv_heads) * kv_heads * GROUP + head) * rows + packed // GROUP
        weight = tl.where(weight == 0.0, 1.0, weight)
        tl.store(lse + row + tl.arange(0, 1), (highest + tl.log2(weight)) * LN_2)
    slot = out + batch * out_batch + head * out_head + (packed // GROUP) * out_row
    tl.store(slot + dims, (sums / weight).to(out.dtype.element_ty), mask=dims < VALUE_DIM)


@triton.jit
def _append_kernel(
    key,
    value,
    k_pool,
    v_pool,
    starts,
    lens,
    kv_heads,
    rows,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    DIM: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    BLOCK_T: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    """New entries of one span, copied to its end; `lens` stays as it is."""
    span, tile = tl.program_id(0), tl.program_id(1)
    batch, head = (span // kv_heads).to(tl.int64), span % kv_heads
    end = (tl.load(starts + span) + tl.load(lens + span)).to(tl.int64)
    row = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    inside = (row[:, None] < rows) & (dims[None, :] < DIM)
    new = tl.load(key + batch * k_batch + head * k_head + row[:, None] * k_row + dims[None, :], mask=inside)
    tl.store(k_pool + (end + row[:, None]) * DIM + dims[None, :], new, mask=inside)
    inside = (row[:, None] < rows) & (value_dims[None, :] < VALUE_DIM)
    new = tl.load(value + batch * v_batch + head * v_head + row[:, None] * v_row + value_dims[None, :], mask=inside)
    tl.store(v_pool + (end + row[:, None]) * VALUE_DIM + value_dims[None, :], new, mask=inside)


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1), on any device."""
    return not isinstance(_slice_kernel, triton.JITFunction)


def refusal(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """Why these kernels cannot run, in one sentence; None where they can."""
    if not devices.is_gpu(device) and not interpreted():
        return f"the pools are on {device.type!r}, but Triton needs a CUDA device (or TRITON_INTERPRET=1)."
    if dtype not in DTYPES:
        return f"the dtype is {dtype}, but the Triton kernels take float32, bfloat16 and float16."
    if not 0 < min(dim, value_dim) <= max(dim, value_dim) <= LARGEST_DIM:
        return f"the head sizes are {dim} and {value_dim}, but the Triton kernels take 1 to {LARGEST_DIM}."
    if not devices.is_gpu(device) or interpreted():
        return None
    gpu = devices.runtime(device).get_device_properties(device)
    if gpu.major < 8:
        return f"{gpu.name} has compute capability {gpu.major}.{gpu.minor}, but the Triton kernels need 8.0."
    if not fitting(16, dim, value_dim, dtype, _shared_memory(device)):
        return f"{gpu.name} has too little shared memory for heads of {dim} in {dtype}."
    return None


class Ready(NamedTuple):
    """The two kernels of a step as they are compiled, and their constants."""

    slices: Any
    slice_constants: tuple[Any, ...]
    join: Any
    join_constants: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Launch:
    """Everything about a call that its shapes decide; `ready` by what else of the arguments is compiled in."""

    programs: int
    tiles: int
    slice_options: dict[str, Any]
    join_options: dict[str, Any]
    append_options: dict[str, Any]
    ready: dict[Any, Ready] = field(default_factory=dict)


def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float) -> Tensor:
    """Shapes as in `api.ragged_attention`. Nothing here waits for the device."""
    with devices.current(q.device):
        return _attend(q, q, q, k_pool, v_pool, starts, lens, scale, _NONE, None)


def attend_with_lse(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """`attend` and the log-sum-exp of the scores, [B, Hq, Tq]; without `causal` all entries are visible."""
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    with devices.current(q.device):
        return _attend(q, q, q, k_pool, v_pool, starts, lens, scale, _NONE, None, None, causal, lse), lse


def extend(
    q: Tensor, key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float,
    buffers: dict[Any, Any] | None = None, codes: Codes | None = None,
) -> Tensor:  # fmt: skip
    """Shapes as in `api.extend`. Two launches for one new token, three for more; nothing here waits for the device."""
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    rows = key.shape[2]
    with devices.current(q.device):
        if rows == 1:
            return _attend(q, key, value, k_pool, v_pool, starts, lens, scale, _SINGLE, buffers, codes)
        _append_kernel[(starts.numel(), -(-rows // _APPENDED_AT_ONCE))](
            key, value, k_pool, v_pool, starts, lens, starts.shape[1], rows, *key.stride()[:3], *value.stride()[:3],
            **_launch_of(q, starts, value.shape[-1], 1).append_options,
        )  # fmt: skip
        return _attend(q, key, value, k_pool, v_pool, starts, lens, scale, _COUNT, None, codes)


def _attend(
    q: Tensor, key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float,
    new: int, buffers: dict[Any, Any] | None, codes: Codes | None = None, causal: bool = True,
    lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    batch, heads, rows, _ = q.shape
    kv_heads, value_dim, spans = starts.shape[1], v_pool.shape[-1], starts.numel()
    q = q if q.stride(-1) == 1 else q.contiguous()
    packed = rows * (heads // kv_heads)
    launch = _launch_of(q, starts, value_dim, packed)
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
    kernel, options = _slice_kernel, launch.slice_options | {"CAUSAL": causal}
    if codes is not None:
        kernel, options = kernels.code_slice_kernel, _code_options(launch, q.dtype, codes.bits, codes.group)
    slices = kernel[grids[0]](*to_slices, **options)
    join_options = launch.join_options | {"NEW": new, "LSE": lse is not None}
    join = _join_kernel[grids[1]](*to_join, **join_options)
    if known is not None and isinstance(slices, CompiledKernel) and (codes is None or _aligned(*codes[:7])):
        launch.ready[known] = Ready(slices, _constants(kernel, options), join, _constants(_join_kernel, join_options))
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


def _launch_of(q: Tensor, starts: Tensor, value_dim: int, packed: int) -> Launch:
    spans, kv_heads = starts.numel(), starts.shape[1]
    return _launch(q.device, q.dtype, packed, spans, q.shape[1] // kv_heads, q.shape[-1], value_dim)


@functools.lru_cache(maxsize=256)
def _launch(
    device: torch.device, dtype: torch.dtype, packed: int, spans: int, group: int, dim: int, value_dim: int
) -> Launch:  # fmt: skip
    """How to launch the kernels over `spans` with `packed` rows each; made once a shape."""
    gpu = devices.is_gpu(device) and not interpreted()
    memory = _shared_memory(device) if gpu else 2**20
    # More rows of float32 than that do not fit a program's registers.
    block_m = min(128 // dtype.itemsize, 64, max(16, triton.next_power_of_2(packed)))
    while not fitting(block_m, dim, value_dim, dtype, memory):
        block_m //= 2
    blocks, stages = _blocks(dim, value_dim, dtype), fitting(block_m, dim, value_dim, dtype, memory)
    tiles = -(-packed // block_m)
    wanted = 2 * _multiprocessors(device) if gpu else _PROGRAMS_WITHOUT_GPU
    sizes = {"DIM": dim, "VALUE_DIM": value_dim, "BLOCK_D": blocks["BLOCK_D"], "BLOCK_V": blocks["BLOCK_V"]}
    shared = sizes | {"GROUP": group, "SPANS": triton.next_power_of_2(spans), "LEAST": _LEAST_SLICE}
    return Launch(
        # Many tiles fill a GPU by themselves, and every slice costs room for its part.
        max(1, wanted // tiles),
        tiles,
        shared | {
            "BLOCK_M": block_m, "BLOCK_N": blocks["BLOCK_N"],
            # The interpreter knows bfloat16 as bits, and would multiply those.
            "WIDEN": interpreted() and dtype == torch.bfloat16,
            "num_warps": 8 if block_m * blocks["BLOCK_V"] > 8192 else 4, "num_stages": stages,
        },
        shared | {"BLOCK_S": _PARTS_AT_ONCE, "num_warps": 4},
        sizes | {"BLOCK_T": _APPENDED_AT_ONCE, "num_warps": 4},
    )  # fmt: skip


def _code_options(launch: Launch, dtype: torch.dtype, bits: int, group: int) -> dict[str, Any]:
    """How to launch the slice kernel over codes: its blocks are at most groups of entries."""
    options = launch.slice_options
    # Codes and what restores them take registers as well.
    wide = dtype.itemsize * max(options["BLOCK_D"], options["BLOCK_V"]) >= 512
    block_n = min(group, max(16, options["BLOCK_N"] // 2) if wide else options["BLOCK_N"])
    blocks = {"BLOCK_N": block_n, "num_warps": 8 if wide else options["num_warps"]}
    return options | blocks | {"BITS": bits, "SHARING": group, "HALF": dtype == torch.float16}


def _blocks(dim: int, value_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes; a dot product takes at least 16 of everything."""
    block_d, block_v = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    # About 16 KiB of k at once: enough loads in flight, and room for several stages.
    wide = max(block_d, block_v) * dtype.itemsize
    return {"BLOCK_D": block_d, "BLOCK_V": block_v, "BLOCK_N": max(16, min(128, 16384 // wide))}


def fitting(block_m: int, dim: int, value_dim: int, dtype: torch.dtype, shared_memory: int) -> int:
    """Pipeline stages for tiles of `block_m` packed rows: as many, up to 4, as leave room for two programs on a
    multiprocessor, or the 2 that asynchronous copies need where one program alone has room; 0 where there is none."""
    blocks = _blocks(dim, value_dim, dtype)
    block_n = blocks["BLOCK_N"]
    # One block is in registers while the others are on their way; beside them lie the queries and the shares.
    block = block_n * (blocks["BLOCK_D"] + blocks["BLOCK_V"]) * dtype.itemsize
    rest = block_m * (blocks["BLOCK_D"] + block_n) * dtype.itemsize + _OWN_SHARED_MEMORY
    for stages in (4, 3, 2):
        if 2 * ((stages - 1) * block + rest) <= shared_memory:
            return stages
    return 2 if block + rest <= shared_memory else 0


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return devices.runtime(device).get_device_properties(device).multi_processor_count


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one block may use, as Triton checks them."""
    return triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
