"""What transformers' attention masks say of padding."""

from typing import Any

import torch
from torch import Tensor

from lkv.errors import PromptError

_PADDING = "_lkv_left_padding"


def has_padding(mask: Any) -> bool:
    """Whether a causal mask [B, 1, Tq, Tk] (bool, additive or None) hides a key from the last query.

    Off the CPU a single query is taken for real: to look would make every layer of every decode step wait.
    """
    if not isinstance(mask, Tensor) or (mask.shape[-2] == 1 and mask.device.type != "cpu"):
        return False
    last = mask[:, :, -1]
    return not bool(last.all() if last.dtype == torch.bool else (last == 0).all())


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
    last = mask[:, 0, -1]
    visible = last if last.dtype == torch.bool else last == 0
    if not bool(visible.any(-1).all()):
        raise PromptError("a row of the batch is nothing but padding; leave it out.")
    first = visible.long().argmax(-1)
    if bool((visible.sum(-1) != visible.shape[-1] - first).any()):
        raise PromptError("the batch is padded on the right; pad it on the left (tokenizer.padding_side = 'left').")
    return first.tolist() if bool(first.any()) else None
