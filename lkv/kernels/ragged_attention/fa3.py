"""Ragged attention by FlashAttention-3, where it is installed, on Hopper GPUs. Every span is a sequence."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lkv.kernels.ragged_attention import sequences
from lkv.kernels.ragged_attention.sequences import Sequences


def refusal(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """Why this cannot run, in one sentence; None where it can."""
    reason = sequences.refusal(device, dtype, dim, value_dim, major=9, exactly=True)
    if reason is None:
        try:
            _operator()
        except ImportError as error:
            return f"FlashAttention-3 is not installed ({error})."
    return reason


def attend(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float,
    causal: bool = True, with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Shapes as in `api.ragged_attention`. Nothing here waits for the device."""
    spans, rows = Sequences.of(q, k_pool, v_pool, starts, lens), q.shape[2]
    has_lse = with_lse or not causal
    attended = _operator()(
        spans.query, spans.key, spans.value, spans.query_starts, spans.starts, rows, spans.longest,
        seqused_k=spans.lens, softmax_scale=scale, causal=causal and rows > 1,
        # Long sequences are split on the device, and the heads of a group share one tile.
        num_splits=0, pack_gqa=True, return_attn_probs=has_lse,
    )  # fmt: skip
    return spans.outputs(*attended) if has_lse else spans.outputs(attended)


def _operator() -> Any:
    return import_module("flash_attn_interface").flash_attn_varlen_func
