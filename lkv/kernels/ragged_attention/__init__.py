"""Attention over spans of unequal length in one flat pool (Sec. 4.5).

`api` chooses a backend and `arguments` has the checks; `cpp` (CPU, with `cpu_kernel.cpp`), `triton` (GPU, with
`triton_kernels`), `loop` (any device) and `reference` (the oracle) compute.
"""

from lkv.kernels.ragged_attention.api import (
    append,
    append_and_attend,
    can_attend_quantized,
    can_replay,
    join_sinks,
    masked_attention,
    merge_attention,
    ragged_attention,
)
from lkv.kernels.ragged_attention.arguments import MAX_QUANTIZED, Basis, QuantizedKV, RaggedKV

__all__ = [
    "MAX_QUANTIZED",
    "Basis",
    "QuantizedKV",
    "RaggedKV",
    "append",
    "append_and_attend",
    "can_attend_quantized",
    "can_replay",
    "join_sinks",
    "masked_attention",
    "merge_attention",
    "ragged_attention",
]
