"""Attention under a soft mask on the keys (App. B)."""

from lkv.ops.soft_mask_attention.api import soft_mask_attention

__all__ = ["soft_mask_attention"]
