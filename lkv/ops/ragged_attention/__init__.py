"""Attention over spans of unequal length in one flat pool (Sec. 4.5)."""

from lkv.ops.ragged_attention.api import append, extend, ragged_attention

__all__ = ["append", "extend", "ragged_attention"]
