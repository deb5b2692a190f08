"""Attention over spans of unequal length in one flat pool (Sec. 4.5)."""

from lkv.kernels.ragged_attention.api import append, append_and_attend, can_attend_quantized, ragged_attention
from lkv.kernels.ragged_attention.codes import QuantizedKV
from lkv.kernels.ragged_attention.partial import masked_attention, merge_attention

__all__ = [
    "QuantizedKV",
    "append",
    "append_and_attend",
    "can_attend_quantized",
    "masked_attention",
    "merge_attention",
    "ragged_attention",
]
