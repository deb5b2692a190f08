"""What transformers' attention masks say of padding."""

from typing import Any

import torch
from torch import Tensor

from lkv.errors import PromptError

_PADDING, _HIDDEN = "_lkv_left_padding", "_lkv_hidden_keys"


def hidden_keys(mask: Any) -> Tensor | None:
    """Which keys a causal mask [B, 1, Tq, Tk] (bool, additive or None) hides from the last query: [B, Tk] on the CPU,
    None where it sees all.

    Of a single query no more is looked at than whether it is padding itself, and that on a CPU alone: elsewhere it
    would make every layer of every decode step wait. Raises PromptError for a row whose queries are all padding.
    """
    if not isinstance(mask, Tensor) or (mask.shape[-2] == 1 and mask.device.type != "cpu"):
        return None
    # All layers of a forward pass get one mask: it is read, and waited for, once.
    if not hasattr(mask, _HIDDEN):
        setattr(mask, _HIDDEN, _hidden_keys(mask))
    return getattr(mask, _HIDDEN)


def _hidden_keys(mask: Tensor) -> Tensor | None:
    hidden, new = ~_visible(mask).cpu(), mask.shape[-2]
    if bool(hidden[:, -new:].all(-1).any()):
        raise PromptError("a row of the batch is nothing but padding; leave it out.")
    return hidden if new > 1 and bool(hidden.any()) else None


def _visible(mask: Tensor) -> Tensor:
    """The keys that the last query sees [B, Tk]."""
    last = mask[:, 0, -1]
    return last if last.dtype == torch.bool else last == 0


def left_padding(mask: Any) -> list[int] | None:
    """How many keys each row of a causal mask [B, 1, Tq, Tk] hides at its beginning; None where nothing is hidden.

    Raises PromptError for padding anywhere else, and for a row of nothing but padding.
    """
    if not isinstance(mask, Tensor):
        return None
    # All layers of a forward pass get one mask: it is read, and waited for, once.
    if not hasattr(mask, _PADDING):
        setattr(mask, _PADDING, _left_padding(mask))
    return getattr(mask, _PADDING)


def _left_padding(mask: Tensor) -> list[int] | None:
    visible = _visible(mask)
    if not bool(visible.any(-1).all()):
        raise PromptError("a row of the batch is nothing but padding; leave it out.")
    first = visible.long().argmax(-1)
    if bool((visible.sum(-1) != visible.shape[-1] - first).any()):
        raise PromptError("the batch is padded on the right; pad it on the left (tokenizer.padding_side = 'left').")
    return first.tolist() if bool(first.any()) else None
