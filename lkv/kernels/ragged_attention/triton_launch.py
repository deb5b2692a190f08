"""How the kernels of `triton` are launched: what shapes and the device decide, made once for each."""

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

import lkv.kernels.ragged_attention.triton_kernels as kernels
from lkv.utils import devices

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_DIM = 256
APPENDED_AT_ONCE = 16
# Below this many entries a program has too little to read to be worth starting.
_LEAST_SLICE = 128
_PARTS_AT_ONCE = 32
_PROGRAMS_WITHOUT_GPU = 7
# What Triton takes beside blocks, queries and shares, to exchange numbers between warps.
_OWN_SHARED_MEMORY = 4096


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


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1), on any device."""
    return not isinstance(kernels.slice_kernel, triton.JITFunction)


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


def launch_of(q: Tensor, starts: Tensor, value_dim: int, packed: int) -> Launch:
    """How to launch the kernels for the queries `q` with `packed` rows a span; see `_launch`."""
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
        sizes | {"BLOCK_T": APPENDED_AT_ONCE, "num_warps": 4},
    )  # fmt: skip


def code_options(launch: Launch, dtype: torch.dtype, bits: int, group: int) -> dict[str, Any]:
    """How to launch the slice kernel over codes: its blocks are at most groups of entries."""
    options = launch.slice_options
    # QuantizedKV and what restores them take registers as well.
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
