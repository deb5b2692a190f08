"""Attention over spans of unequal length in one flat pool (Sec. 4.5).

`api` chooses a backend and `arguments` has the checks; `cpp` (CPU, with `cpu_kernel.cpp`), `triton` (GPU, with
`triton_kernels`), `loop` (any device) and `reference` (the oracle) compute. `basis` holds the coordinates in which
entries may be stored.
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
from lkv.kernels.ragged_attention.arguments import MAX_QUANTIZED, QuantizedKV, RaggedKV
from lkv.kernels.ragged_attention.basis import Basis

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
