"""Ragged attention and append in Triton, in equal slices of the flat axis whatever the heads' lengths (Sec. 4.5).

Heads differ several-fold in length, so a grid with one share a head leaves most of a GPU idle. Here every program reads
the same number of entries, begins and ends inside any head, and finds out where from the lengths on the device: no
plan is made and nothing waits for the host. A second kernel joins the parts of each head.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_DIM = 256
_LOG2_E = 1.4426950408889634
# Below this many entries a program has too little to read to be worth starting.
_LEAST_SLICE = 128
_PARTS_AT_ONCE = 32
_PROGRAMS_WITHOUT_GPU = 7


@triton.jit
def _slice_kernel(
    q,
    k_pool,
    v_pool,
    starts,
    lens,
    parts,
    extremes,
    spans,
    kv_heads,
    rows,
    scale,
    q_batch,
    q_head,
    q_row,
    GROUP: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    SPANS: tl.constexpr,  # noqa: N803
    LEAST: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    """One slice of the flat axis for one tile of packed rows; row m of a span is new token m // GROUP."""
    program, tile = tl.program_id(0), tl.program_id(1)
    every = tl.arange(0, SPANS)
    held = tl.load(lens + every, mask=every < spans, other=0)
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
            length = tl.load(lens + span)
            before = tl.sum(tl.where(every < span, held, 0), 0)
            begin = tl.maximum(low - before, 0)
            # New tokens that no row of this tile sees are not read.
            end = tl.minimum(tl.minimum(high - before, length), length - rows + latest + 1)
            start = tl.load(starts + span).to(tl.int64)
            head = (span % kv_heads) * GROUP + packed % GROUP
            own = q + (span // kv_heads).to(tl.int64) * q_batch + head * q_head + token * q_row
            query = tl.load(own[:, None] + dims[None, :], mask=within[:, None] & (dims[None, :] < DIM), other=0.0)
            query = query.to(tl.float32) if WIDEN else query
            visible = length - rows + token
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
            place = ((program + span) * rows * GROUP).to(tl.int64) + packed
            tl.store(extremes + 2 * place, highest, mask=within)
            tl.store(extremes + 2 * place + 1, weight, mask=within)
            tl.store(
                parts + place[:, None] * VALUE_DIM + value_dims[None, :],
                sums,
                mask=within[:, None] & (value_dims[None, :] < VALUE_DIM),
            )


@triton.jit
def _join_kernel(
    parts,
    extremes,
    lens,
    out,
    spans,
    kv_heads,
    rows,
    programs,
    out_batch,
    out_head,
    out_row,
    GROUP: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    SPANS: tl.constexpr,  # noqa: N803
    LEAST: tl.constexpr,  # noqa: N803
    BLOCK_S: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    """One packed row of one span from its parts."""
    span, packed = tl.program_id(0), tl.program_id(1)
    every = tl.arange(0, SPANS)
    held = tl.load(lens + every, mask=every < spans, other=0)
    size = tl.maximum(tl.cdiv(tl.sum(held, 0), programs), LEAST)
    before = tl.sum(tl.where(every < span, held, 0), 0)
    first = before // size + span
    last = (before + tl.load(lens + span) - 1) // size + span

    dims = tl.arange(0, BLOCK_V)
    highest = tl.full([1], float("-inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    sums = tl.zeros([BLOCK_V], tl.float32)
    for at in range(first, last + 1, BLOCK_S):
        part = at + tl.arange(0, BLOCK_S)
        inside = part <= last
        place = part.to(tl.int64) * rows * GROUP + packed
        peak = tl.load(extremes + 2 * place, mask=inside, other=float("-inf"))
        share = tl.load(extremes + 2 * place + 1, mask=inside, other=0.0)
        found = tl.load(
            parts + place[:, None] * VALUE_DIM + dims[None, :],
            mask=inside[:, None] & (dims[None, :] < VALUE_DIM),
            other=0.0,
        )
        new = tl.maximum(highest, tl.max(peak, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        shrink, factor = tl.exp2(highest - base), tl.exp2(peak - base)
        weight = weight * shrink + tl.sum(share * factor, 0)
        sums = sums * shrink + tl.sum(found * factor[:, None], 0)
        highest = new
    head = (span % kv_heads) * GROUP + packed % GROUP
    own = out + (span // kv_heads).to(tl.int64) * out_batch + head * out_head + (packed // GROUP) * out_row
    tl.store(own + dims, (sums / weight).to(out.dtype.element_ty), mask=dims < VALUE_DIM)


@triton.jit
def _append_kernel(
    key,
    value,
    k_pool,
    v_pool,
    starts,
    lens,
    longer,
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
    """New entries of one span, copied to its end."""
    span, tile = tl.program_id(0), tl.program_id(1)
    batch, head = (span // kv_heads).to(tl.int64), span % kv_heads
    length = tl.load(lens + span)
    end = (tl.load(starts + span) + length).to(tl.int64)
    row = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    here = (row[:, None] < rows) & (dims[None, :] < DIM)
    new = tl.load(key + batch * k_batch + head * k_head + row[:, None] * k_row + dims[None, :], mask=here)
    tl.store(k_pool + (end + row[:, None]) * DIM + dims[None, :], new, mask=here)
    here = (row[:, None] < rows) & (value_dims[None, :] < VALUE_DIM)
    new = tl.load(value + batch * v_batch + head * v_head + row[:, None] * v_row + value_dims[None, :], mask=here)
    tl.store(v_pool + (end + row[:, None]) * VALUE_DIM + value_dims[None, :], new, mask=here)
    if tile == 0:
        tl.store(longer + span, length + rows)


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1), on any device."""
    return not isinstance(_slice_kernel, triton.JITFunction)


def refusal(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """Why these kernels cannot run, in one sentence; None where they can."""
    if device.type != "cuda" and not interpreted():
        return f"the pools are on {device.type!r}, but Triton needs a CUDA device (or TRITON_INTERPRET=1)."
    if dtype not in DTYPES:
        return f"the dtype is {dtype}, but the Triton kernels take float32, bfloat16 and float16."
    if not 0 < min(dim, value_dim) <= max(dim, value_dim) <= LARGEST_DIM:
        return f"the head sizes are {dim} and {value_dim}, but the Triton kernels take 1 to {LARGEST_DIM}."
    if device.type == "cuda" and not _stages(_shared_memory(device.index), _blocks(dim, value_dim, dtype), dtype):
        return f"{torch.cuda.get_device_name(device)} has too little shared memory for heads of {dim} in {dtype}."
    return None


def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float) -> Tensor:
    """Shapes as in `api.ragged_attention`. Nothing here waits for the device."""
    batch, heads, rows, dim = q.shape
    kv_heads, value_dim = starts.shape[1], v_pool.shape[-1]
    spans, group = starts.numel(), heads // kv_heads
    q = q if q.stride(-1) == 1 else q.contiguous()
    packed = rows * group
    block_m = min(64, max(16, triton.next_power_of_2(packed)))
    tiles = triton.cdiv(packed, block_m)
    blocks = _blocks(dim, value_dim, q.dtype)
    wanted, stages = _PROGRAMS_WITHOUT_GPU, 1
    if q.device.type == "cuda":
        wanted = 2 * _multiprocessors(q.device.index)
        stages = _stages(_shared_memory(q.device.index), blocks, q.dtype)
    # Many tiles fill a GPU by themselves, and every slice costs room for its part.
    programs = max(1, wanted // tiles)
    parts = q.new_empty(((programs + spans - 1) * packed, value_dim), dtype=torch.float32)
    extremes = q.new_empty(((programs + spans - 1) * packed, 2), dtype=torch.float32)
    # Laid out by token, as the caller's next product reads it.
    out = q.new_empty((batch, rows, heads, value_dim)).transpose(1, 2)
    shared = {
        "GROUP": group, "VALUE_DIM": value_dim, "SPANS": triton.next_power_of_2(spans), "LEAST": _LEAST_SLICE,
        "BLOCK_V": blocks["BLOCK_V"],
    }  # fmt: skip
    _slice_kernel[(programs, tiles)](
        q, k_pool, v_pool, starts, lens, parts, extremes, spans, kv_heads, rows, scale * _LOG2_E, *q.stride()[:3],
        DIM=dim, BLOCK_M=block_m, BLOCK_N=blocks["BLOCK_N"], BLOCK_D=blocks["BLOCK_D"], **shared,
        # The interpreter knows bfloat16 as bits, and would multiply those.
        WIDEN=interpreted() and q.dtype == torch.bfloat16,
        num_warps=8 if block_m * blocks["BLOCK_V"] > 8192 else 4, num_stages=stages,
    )  # fmt: skip
    _join_kernel[(spans, packed)](
        parts, extremes, lens, out, spans, kv_heads, rows, programs, *out.stride()[:3],
        BLOCK_S=_PARTS_AT_ONCE, **shared, num_warps=4,
    )  # fmt: skip
    return out


def append(key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor) -> Tensor:
    """Shapes as in `api.append`; one kernel for k, v and the new lengths."""
    _, kv_heads, rows, dim = key.shape
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    longer = torch.empty_like(lens)
    block = min(16, triton.next_power_of_2(rows))
    _append_kernel[(starts.numel(), triton.cdiv(rows, block))](
        key, value, k_pool, v_pool, starts, lens, longer, kv_heads, rows, *key.stride()[:3], *value.stride()[:3],
        DIM=dim, VALUE_DIM=value.shape[-1], BLOCK_T=block,
        BLOCK_D=triton.next_power_of_2(dim), BLOCK_V=triton.next_power_of_2(value.shape[-1]), num_warps=4,
    )  # fmt: skip
    return longer


def _blocks(dim: int, value_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes; a dot product takes at least 16 of everything."""
    block_d, block_v = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    # About 16 KiB of k at once: enough loads in flight, and room for several stages.
    wide = max(block_d, block_v) * dtype.itemsize
    return {"BLOCK_D": block_d, "BLOCK_V": block_v, "BLOCK_N": max(16, min(128, 16384 // wide))}


def _stages(shared_memory: int, blocks: dict[str, int], dtype: torch.dtype) -> int:
    """How many blocks of k and v may be on their way at once, with two programs on a multiprocessor."""
    one = blocks["BLOCK_N"] * (blocks["BLOCK_D"] + blocks["BLOCK_V"]) * dtype.itemsize
    return min(4, shared_memory // (2 * one))


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def _shared_memory(index: int) -> int:
    return triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
