"""Compile the package's Triton kernels ahead of time for GPUs that are not there, through its own launch code.

TRITON_INTERPRET=0 python -m tests.kernels.compile_kernels [--arch 80 89 90 100] [--dim 64 80 96 128 256]
    [--dtype float32 ...] [--kernels attention decode tiers training eviction]    (all take an hour of one core)

Prints one JSON line a kernel: shared memory and the limit of the GPU, tensor memory, stack (spilled registers), whether
the code traps, and how many of its copies are asynchronous; and why it could not run, or would be slow.
"""

import argparse
import functools
import itertools
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

import lkv.kernels.ragged_attention.triton as ragged
import lkv.kernels.selection.triton as selection
import lkv.kernels.soft_mask_attention.triton as soft
from lkv.cache.tiers import code_width
from lkv.kernels import FP8, triton_helpers
from lkv.kernels.ragged_attention import Basis, QuantizedKV, RaggedKV
from lkv.kernels.selection import ScoreWeights
from lkv.utils import devices

# Bytes of shared memory that one block may use, and multiprocessors.
GPUS = {
    80: (166_912, 108),
    86: (101_376, 84),
    89: (101_376, 128),
    90: (232_448, 132),
    100: (232_448, 148),
    120: (101_376, 170),
}
DTYPES = ("bfloat16", "float16", "float32")
DUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TENSOR_COLUMNS = 512
TIERS = (((8, 8), (4, 4)), ((8, 4), (4, 3)), ((3, 3), (FP8, FP8)))  # bits of k and v


class Driver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, arch: int):
        self.arch, self.utils = arch, self

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_device_properties(self, index: int) -> dict[str, int]:
        return {"max_shared_mem": GPUS[self.arch][0], "multiprocessor_count": GPUS[self.arch][1]}


class OnGpu(Tensor):
    """A tensor of the CPU that says it is on the GPU that is compiled for."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", driver.active.arch)


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype).as_subclass(OnGpu)


class Compiler:
    """Collects what the launches in a block would have run."""

    def __init__(self, arch: int):
        self._arch, self.rows = arch, []
        self._run = jit.JITFunction.run

    def __enter__(self) -> "Compiler":
        driver.set_active(Driver(self._arch))
        properties = SimpleNamespace(name=f"sm_{self._arch}", major=self._arch // 10, minor=self._arch % 10,
                                     multi_processor_count=GPUS[self._arch][1])  # fmt: skip
        torch.cuda.get_device_properties = lambda device=None: properties
        # There is no device to make the current one.
        devices.device_guard = lambda device: nullcontext()
        for cached in (ragged._launch, triton_helpers.shared_memory, triton_helpers.multiprocessors, soft.tiles_on):
            cached.cache_clear()
        plain, rows, limit, arch = self._run, self.rows, GPUS[self._arch][0], self._arch

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            kernel = plain(self, *args, grid=grid, warmup=True, **options)
            row = {"kernel": self.__name__, "limit": limit, "grid": [int(n) for n in grid]}
            rows.append(row | {"bits": options.get("BITS", ())} | facts(kernel, arch))
            return kernel

        jit.JITFunction.run = run
        return self

    def __exit__(self, *_: Any) -> None:
        jit.JITFunction.run = self._run


INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][A-Z0-9_.]*)(.*?);", re.MULTILINE)


def product_loops(sass: str) -> list[dict[str, int]]:
    """Of each innermost loop with matrix products, in the order of the code: warp instructions of a pass, and those of
    them that restoring in registers does without."""
    found = [(int(at, 16), name, rest) for at, name, rest in INSTRUCTION.findall(sass)]
    targets = [(at, re.search(r"0x([0-9a-f]+)", rest)) for at, name, rest in found if name.startswith("BRA")]
    loops = sorted({(int(target[1], 16), at) for at, target in targets if target and int(target[1], 16) < at})
    rows = []
    for low, high in loops:
        if any((low, high) != other and low <= other[0] and other[1] <= high for other in loops):
            continue
        names = [name for at, name, _ in found if low <= at <= high]
        if any(name.startswith("HMMA") for name in names):
            avoided = {"byte_loads": "LDS.U8", "wide_stores": "STS.128", "spill_loads": "LDL", "spill_stores": "STL"}
            counts = {key: sum(name.startswith(start) for name in names) for key, start in avoided.items()}
            rows.append({"instructions": len(names)} | counts)
    return rows


@functools.cache
def facts(kernel: Any, arch: int) -> dict[str, Any]:
    """What the compiled code takes of a GPU, and its instructions that matter."""
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        shown = subprocess.run(
            [DUMP, "--dump-resource-usage", "--dump-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    used = {name: int(n) for name, n in re.findall(r"(REG|STACK):(\d+)", shown)}
    names = [name for _, name, _ in INSTRUCTION.findall(shown)]
    counted = Counter(name.split(".")[0] for name in names)
    copies = [name for name in names if name.startswith("LDGSTS")]
    threads, shared = 32 * kernel.metadata.num_warps, kernel.metadata.shared
    return {
        "shared": shared,
        "tensor_columns": getattr(kernel.metadata, "tmem_size", 0) or 0,
        "warps": kernel.metadata.num_warps,
        "stages": kernel.metadata.num_stages,
        "registers": used["REG"],
        "stack": used["STACK"],
        "traps": len(re.findall(r"\btrap;", ptx)),
        "asynchronous": ptx.count("cp.async.c") + ptx.count("cp.async.bulk"),
        "instructions": len(names),
        "loops": product_loops(shown),
        "copies": len(copies),
        "wide_copies": sum(bool(re.search(r"\.128(\.|$)", name)) for name in copies),
        "local": counted["LDL"] + counted["STL"],
        "barriers": counted["BAR"],
        # A multiprocessor has 1 KiB more of shared memory than a block may use, which each block takes for itself.
        "programs": min(65_536 // (threads * -(-used["REG"] // 8) * 8), (GPUS[arch][0] + 1024) // (shared + 1024)),
    }


def decode_rows(dim: int, dtype: torch.dtype, rows: int = 1, tiers: tuple[tuple[int, int], ...] = ()) -> None:
    """One step over 8 heads in groups of 4; the first entries may be in `tiers` of these bits of k and v."""
    # What is compiled already would be launched.
    ragged._launch.cache_clear()
    q, new = on_gpu(1, 32, rows, dim, dtype=dtype), on_gpu(1, 8, rows, dim, dtype=dtype)
    pool = on_gpu(4096, dim, dtype=dtype)
    kv = RaggedKV(pool, pool, *(on_gpu(1, 8, dtype=torch.int32) for _ in range(2)))
    if tiers:
        quantized = []
        for bits in tiers:
            sides = [(on_gpu(4096, code_width(number, dim), dtype=torch.uint8), on_gpu(4096, dtype=torch.bfloat16))
                     for number in bits]  # fmt: skip
            quantized.append(QuantizedKV(*sides[0], *sides[1], on_gpu(2, 1, 8, dtype=torch.int32), *bits))
        by_head, rotation = on_gpu(1, 8, dim, dtype=torch.bfloat16), on_gpu(dim, dim)
        kv = kv._replace(quantized=quantized, basis=Basis(by_head, by_head, rotation, rotation))
    ragged.append_and_attend(q, new, new, kv, dim**-0.5)


def eviction_rows(dim: int, dtype: torch.dtype) -> None:
    """A prompt of 8 heads in groups of 4: its scores, ranks and move. Then the scores of entries in pools."""
    key = on_gpu(1, 8, 4100, dim, dtype=dtype)
    starts, keep = (on_gpu(1, 8, dtype=torch.int32) for _ in range(2))
    wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    by_head = [on_gpu(8, *shape) for shape in ((dim,), (dim,), (20, dim), (4,), (), (13,), (13,))]
    weights, back = ScoreWeights(on_gpu(8, 2 * dim, dim, dtype=wide), *by_head), on_gpu(4100, dim, dtype=dtype)
    prompt, ahead = selection.Entries.of_prompt(key, key), on_gpu(dim)
    scores = selection.score(prompt, weights, (back, back), (ahead, ahead), 0, 4100, dim**-0.5)
    pool, extra = on_gpu(999, dim, dtype=dtype), (on_gpu(999), on_gpu(999, dtype=torch.int32))
    pools, order, three = (pool, pool, starts), on_gpu(999, dtype=torch.int32), torch.stack([keep] * 3)
    selection.move(prompt, pools, scores, three, order=(order, three))
    stored = selection.Entries.of_pools(pool, pool, starts, keep, 100)
    options = {"scores": extra[0], "positions": extra[1]}
    selection.score(stored, weights, (back, back), None, 7, 107, dim**-0.5, eviction=False, **options)
    scores = selection.score(stored, weights, None, (ahead, ahead), 0, 107, dim**-0.5, arrival=False, **options)
    selection.rank(scores, keep[None], counts=keep)
    selection.move(stored, pools, None, None, *extra, extra)
    selection.move(stored, pools, scores, keep[None], *extra, extra, recent=selection.RecentTokens(107, 32))


def quantise_rows(dim: int, dtype: torch.dtype) -> None:
    """The entries of 8 heads into three tiers: what k is measured by, then k and v."""
    values, tables, measured = on_gpu(4096, dim, dtype=dtype), on_gpu(11, 8, dtype=torch.int32), on_gpu(2, 8, dim)
    selection.measure(values, tables)
    order, basis = on_gpu(4096, dtype=torch.int32), on_gpu(2, 1, 8, dim, dtype=torch.bfloat16)
    for bits, entered in (((16, 8, 4), (basis, measured)), ((16, 3, FP8), ())):
        codes = [(on_gpu(999, code_width(number, dim), dtype=torch.uint8), on_gpu(999, dtype=torch.bfloat16))
                 for number in bits[1:]]  # fmt: skip
        invalid, outputs = on_gpu(1, dtype=torch.uint8), [(values, None), *codes]
        selection.quantise(values, order, tables, on_gpu(dim, dim), outputs, bits, invalid, *entered)


def saving_context() -> Any:
    """What an autograd function saves its tensors in."""
    context: Any = SimpleNamespace(needs_input_grad=[True] * 9)
    context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
    return context


def training_rows(dim: int, dtype: torch.dtype) -> int:
    """Forward and backward of 512 rows over 2,048 columns, and of 4 continuations of 130 rows over one prompt.

    Returns the shared memory that their tiles state.
    """
    q, k, mask = on_gpu(1, 8, 512, dim, dtype=dtype), on_gpu(1, 2, 2048, dim, dtype=dtype), on_gpu(1, 2, 2048)
    tiles, context = soft.tiles_on(q.device, dtype, dim), saving_context()
    assert tiles is not None, "no tiles fit"
    out = soft._SoftMaskAttention.forward(context, q, k, k, mask, dim**-0.5, tiles)
    soft._SoftMaskAttention.backward(context, out)
    q, new = on_gpu(4, 8, 130, dim, dtype=dtype), on_gpu(4, 2, 130, dim, dtype=dtype)
    prompt, mask, owners = on_gpu(1, 2, 2100, dim, dtype=dtype), on_gpu(4, 2, 2100), on_gpu(4, dtype=torch.int64)
    call, context = soft._ContinuationAttention, saving_context()
    out = call.forward(context, dim**-0.5, tiles, q, new, new, prompt, prompt, mask, owners)
    call.backward(context, out)
    return tiles.shared


def compiled(arch: int, dim: int, dtype: str, kernels: str) -> list[dict[str, Any]]:
    """A row a kernel; a length that is not a multiple of the tiles is the harder one to compile."""
    numbers: torch.dtype = getattr(torch, dtype)
    with Compiler(arch) as compiler, torch.no_grad():
        if kernels == "eviction":
            eviction_rows(dim, numbers)
            quantise_rows(dim, numbers)
        elif kernels == "decode":
            for new in (1, 16, 64):
                decode_rows(dim, numbers, new)
        elif kernels == "tiers":
            decode_rows(dim, numbers, tiers=TIERS[1])
        elif kernels == "training":
            stated = training_rows(dim, numbers)
            if arch == 90:  # for which the tiles state what they need
                for row in compiler.rows:
                    row["limit"] = stated
        else:
            for new in (1, 64):
                decode_rows(dim, numbers, new)
            for tiers in TIERS:
                decode_rows(dim, numbers, tiers=tiers)
            decode_rows(dim, numbers, 64, TIERS[1])
    return [{"arch": arch, "dim": dim, "dtype": dtype} | row for row in compiler.rows]


def problems(row: dict[str, Any]) -> list[str]:
    """Why a compiled kernel cannot run on its GPU, or is slower than it must be."""
    found = {
        "needs more shared memory than there is": row["shared"] > row["limit"],
        "needs more tensor memory than there is": row["tensor_columns"] > TENSOR_COLUMNS,
        "traps": row["traps"] > 0,
        # Registers that spill, in bytes of stack.
        "spills": row["stack"] > 512,
        "copies nothing asynchronously": row["kernel"] == "slice_kernel" and not row["asynchronous"],
        "has a grid that is too large": row["grid"][1] > 65_535,
    }
    return [name for name, wrong in found.items() if wrong]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 89, 90, 100], choices=GPUS)
    parser.add_argument("--dim", type=int, nargs="+", default=[64, 80, 96, 128, 256])
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument(
        "--kernels", nargs="+", default=["attention"], choices=("attention", "decode", "tiers", "training", "eviction")
    )
    options = parser.parse_args()
    assert os.environ.get("TRITON_INTERPRET") == "0", "set TRITON_INTERPRET=0"
    for given in itertools.product(options.arch, options.dim, options.dtype):
        for row in (row for kernels in options.kernels for row in compiled(*given, kernels)):
            print(json.dumps(row | {"problems": problems(row)}), flush=True)


if __name__ == "__main__":
    main()
