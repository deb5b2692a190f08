"""Attention over spans of unequal length in one flat pool (Sec. 4.5)."""

from lkv.ops.ragged_attention.api import extend, ragged_attention

__all__ = ["extend", "ragged_attention"]
