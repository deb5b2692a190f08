"""Ragged attention by PyTorch's own variable-length flash attention: a GPU without Triton. Every span is a sequence."""

import inspect
from typing import Any

import torch
from torch import Tensor

from lkv.kernels.ragged_attention import sequences
from lkv.kernels.ragged_attention.sequences import Sequences


def refusal(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """Why this cannot run, in one sentence; None where it can."""
    # Spans end in free slots, so their lengths are given apart from their starts.
    operator = _operator()
    if device.type == "cuda" and (operator is None or "seqused_k" not in inspect.signature(operator).parameters):
        return f"PyTorch {torch.__version__} has no variable-length attention that takes lengths apart from starts."
    return sequences.refusal(device, dtype, dim, value_dim, major=8, exactly=False)


def attend(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float,
    causal: bool = True, with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Shapes as in `api.ragged_attention`. Nothing here waits for the device."""
    spans, rows = Sequences.of(q, k_pool, v_pool, starts, lens), q.shape[2]
    options: dict[str, Any] = {}
    if with_lse or not causal:
        from torch.nn.attention.varlen import AuxRequest

        options["return_aux"] = AuxRequest(lse=True)
    attended = _operator()(
        spans.query, spans.key, spans.value, spans.query_starts, spans.starts, rows, spans.longest, scale=scale,
        # One new token sees everything. Under a window flash attention would neither pack the heads of a group into
        # one tile nor split a sequence among programs.
        window_size=(-1, 0 if causal and rows > 1 else -1), enable_gqa=True, seqused_k=spans.lens, **options,
    )  # fmt: skip
    return spans.outputs(*attended) if options else spans.outputs(attended)


def _operator() -> Any:
    """`varlen_attn`, None where PyTorch is too old to have it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn
