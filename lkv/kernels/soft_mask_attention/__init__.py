"""Attention under a soft mask on the keys (App. B)."""

from lkv.kernels.soft_mask_attention.api import soft_mask_attention

__all__ = ["soft_mask_attention"]
