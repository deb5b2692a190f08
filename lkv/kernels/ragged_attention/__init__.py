"""Attention over spans of unequal length in one flat pool (Sec. 4.5).

`api` checks the arguments and chooses a backend; `cpp` (CPU, with `cpu_kernel.cpp`), `triton` (GPU, with
`triton_kernels`), `varlen` (GPU without Triton), `loop` (any device) and `reference` (the oracle) compute.
"""

from lkv.kernels.ragged_attention.api import (
    QuantizedKV,
    append,
    append_and_attend,
    can_attend_quantized,
    masked_attention,
    merge_attention,
    ragged_attention,
)

__all__ = [
    "QuantizedKV",
    "append",
    "append_and_attend",
    "can_attend_quantized",
    "masked_attention",
    "merge_attention",
    "ragged_attention",
]
