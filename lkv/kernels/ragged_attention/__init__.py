"""Attention over spans of unequal length in one flat pool (Sec. 4.5)."""

from lkv.kernels.ragged_attention.api import append, extend, ragged_attention, reads_codes
from lkv.kernels.ragged_attention.codes import Codes
from lkv.kernels.ragged_attention.partial import attend_masked, join

__all__ = ["Codes", "append", "attend_masked", "extend", "join", "ragged_attention", "reads_codes"]
