"""Attention under a soft mask on the keys (App. B)."""

from lkv.kernels.soft_mask_attention.api import continuation_attention, soft_mask_attention

__all__ = ["continuation_attention", "soft_mask_attention"]
