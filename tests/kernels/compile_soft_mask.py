"""Compile the soft-mask kernels for Hopper, bfloat16, d = 128, and print the shared memory that each one needs.

python tests/kernels/compile_soft_mask.py KERNELS.py ROWS COLUMNS WARPS STAGES (three times: forward, dQ, dK and dV)
"""

import importlib.util
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FLOAT32 = ("log_mask", "lse", "delta", "d_mask")
BFLOAT16 = ("q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v")


def compiled(kernel: Any, rows: int, columns: int, warps: int, stages: int) -> Any:
    """The kernel for pointers and strides that are multiples of 16."""
    constants = {"block_rows": rows, "block_columns": columns, "dim": 128, "width": 128, "bounded": True}
    types = dict.fromkeys(FLOAT32, "*fp32") | dict.fromkeys(BFLOAT16, "*bf16") | {"scale": "fp32"}
    types |= {f"{x}_{axis}": "i64" for x in "qkv" for axis in ("batch", "head")}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(names) if x in types or x.endswith("_row")}
    del aligned[names.index("scale"),]
    values = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    source = ASTSource(kernel, signature, values, aligned)
    return triton.compile(source, GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})


def main() -> None:
    spec = importlib.util.spec_from_file_location("triton_kernels", sys.argv[1])
    assert spec is not None and spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    sys.modules["triton_kernels"] = kernels
    spec.loader.exec_module(kernels)
    numbers = [int(x) for x in sys.argv[2:]]
    for i, name in enumerate(("forward", "query_gradient", "key_gradient")):
        print(compiled(getattr(kernels, name), *numbers[4 * i : 4 * i + 4]).metadata.shared)


if __name__ == "__main__":
    main()
