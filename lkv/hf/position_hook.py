"""A hook that records the positions of a pass in models with multimodal RoPE (M-RoPE), see `image_positions`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lkv.hf.spec import unwrap_model
from lkv.hf.state import note_positions, take_positions


def has_image_positions(model: nn.Module) -> bool:
    """Return whether a model has multimodal RoPE."""
    return hasattr(unwrap_model(model).base_model, "get_rope_index")


def record_positions(model: PreTrainedModel) -> Callable[[], None] | None:
    """Make a model with multimodal RoPE record the positions of each pass; returns a function that undoes this."""
    if not has_image_positions(model):
        return None
    return model.get_decoder().rotary_emb.register_forward_pre_hook(_note, with_kwargs=True).remove


@torch.compiler.disable
def _note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    note_positions(args[1] if len(args) > 1 else kwargs["position_ids"])


def take_image_positions(rows: int, tokens: int) -> Tensor | None:
    """Return the positions [3, rows, tokens] of the pass that a model with multimodal RoPE has begun.

    None unless the pass has images. On a GPU this synchronises.
    """
    positions = take_positions()
    if positions is None or positions.ndim != 3 or positions.shape != (3, rows, tokens):
        return None
    return positions if bool((positions != positions[:1]).any()) else None
