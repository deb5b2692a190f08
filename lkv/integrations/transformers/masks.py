"""Padding, read from the attention masks that transformers gives."""

import weakref
from typing import Any

import torch
from torch import Tensor

from lkv.errors import PromptError


class PaddingReader:
    """Reads the padding from causal attention masks [B, 1, Tq, Tk] (bool, additive or None).

    All layers of a forward pass get one mask: it is read, and its device waited for, once.
    """

    def __init__(self) -> None:
        self._mask: weakref.ref[Tensor] | None = None
        self._results: dict[Any, Any] = {}

    def left_padding(self, mask: Any) -> list[int] | None:
        """How many keys each row of `mask` hides at its beginning; None where nothing is hidden.

        Raises PromptError for padding anywhere else, and for a row of nothing but padding.
        """
        return self._read(_left_padding, mask) if isinstance(mask, Tensor) else None

    def hidden_keys(self, mask: Any) -> Tensor | None:
        """Which keys `mask` hides from the last query, [B, Tk] on the CPU; None where it sees all.

        Of a single query no more is read than whether it is padding itself, and on a CPU alone: elsewhere every layer
        of every decode step would wait for the device. Raises PromptError for a row whose queries are all padding.
        """
        if not isinstance(mask, Tensor) or (mask.shape[-2] == 1 and mask.device.type != "cpu"):
            return None
        return self._read(_hidden_keys, mask)

    def _read(self, function: Any, mask: Tensor) -> Any:
        if self._mask is None or self._mask() is not mask:
            self._mask, self._results = weakref.ref(mask), {}
        if function not in self._results:
            self._results[function] = function(mask)
        return self._results[function]


def visible_keys(mask: Tensor) -> Tensor:
    """`mask`, bool or additive, as bool: True where a query sees a key."""
    return mask if mask.dtype == torch.bool else mask == 0


def _hidden_keys(mask: Tensor) -> Tensor | None:
    hidden, new = ~visible_keys(mask[:, 0, -1]).cpu(), mask.shape[-2]
    if bool(hidden[:, -new:].all(-1).any()):
        raise PromptError("a row of the batch is nothing but padding; leave it out.")
    return hidden if new > 1 and bool(hidden.any()) else None


def _left_padding(mask: Tensor) -> list[int] | None:
    visible = visible_keys(mask[:, 0, -1])
    if not bool(visible.any(-1).all()):
        raise PromptError("a row of the batch is nothing but padding; leave it out.")
    first = visible.long().argmax(-1)
    if bool((visible.sum(-1) != visible.shape[-1] - first).any()):
        raise PromptError("the batch is padded on the right; pad it on the left (tokenizer.padding_side = 'left').")
    return first.tolist() if bool(first.any()) else None
