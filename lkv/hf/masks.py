"""Masks of LKV caches: of their full-attention layers no more is stated than which keys are padding."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lkv.errors import PromptError
from lkv.kernels.causal_attention import causal_attention


class KeyOffset(int):
    """The position of the first key that a mask covers, from a cache layer for which `key_mask` is enough.

    transformers hands it from the cache to the mask function, which learns neither the cache nor its layer.
    """


def key_mask(attention_mask: Tensor | None, queries: int, keys: int, offset: int) -> Tensor | None:
    """Which keys are not padding, [B, keys] bool; None where none is known to be padding.

    It is on the CPU, so that no layer waits for a device. For a single query it stays where it was: only a prompt that
    is read token by token looks at it.

    Args:
        attention_mask: The mask that the model was given, bool [B, tokens].
        queries: The number of new tokens.
        keys: The number of keys that a layer attends to.
        offset: The position of the first of them.
    """
    if attention_mask is None:
        return None
    mask = attention_mask[:, offset : offset + keys]
    if mask.shape[1] < keys:
        mask = pad(mask, (0, keys - mask.shape[1]))
    if queries == 1 and mask.device.type != "cpu":
        return mask
    mask = mask.cpu()
    # What the mask says would be a constant of a compiled graph.
    return mask if torch.compiler.is_compiling() or not bool(mask.all()) else None


def attend_prompt(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of the last tokens of a prompt to all of it, [B, T, Hq, dv]; `mask` is a `key_mask`."""
    padding = None if mask is None else padding_lengths(mask)
    return causal_attention(query, key, value, scale, padding).transpose(1, 2)


def padding_lengths(mask: Tensor) -> list[int]:
    """How many keys each row of `mask`, a `key_mask` or a causal mask [B, 1, Tq, Tk], hides from the first one on.

    Raises PromptError for padding anywhere else.
    """
    visible = _keys_of_last_query(mask).cpu()
    hidden = (visible.cumsum(-1) == 0).sum(-1)
    if bool((visible.sum(-1) != visible.shape[-1] - hidden).any()):
        raise PromptError("the batch is padded on the right; pad it on the left (tokenizer.padding_side = 'left').")
    return hidden.tolist()


def expand_mask(mask: Tensor | None, queries: int, keys: int, device: torch.device) -> Tensor:
    """Which keys each query sees, bool, broadcast to [B, 1, queries, keys].

    `mask`: None, a `key_mask` or a causal mask [B, 1, queries, keys], bool or additive.
    """
    if mask is not None and mask.ndim == 4:
        return _visible(mask)
    causal = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return causal if mask is None else causal & mask.to(device)[:, None, None]


def _visible(mask: Tensor) -> Tensor:
    """`mask`, bool or additive, as bool: True where a query sees a key."""
    return mask if mask.dtype == torch.bool else mask == 0


class PaddingReader:
    """Reads the padding from what `key_mask` returned, or from causal masks [B, 1, Tq, Tk] (bool, additive or None).

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

    def hidden_keys(self, mask: Any, queries: int) -> Tensor | None:
        """Which keys `mask` hides from the last of the queries, [B, Tk] on the CPU; None where it sees all.

        Of a single query no more is read than whether it is padding itself, and on a CPU alone: elsewhere every layer
        of every decode step would wait for the device. Raises PromptError for a row whose queries are all padding.
        """
        if not isinstance(mask, Tensor) or (queries == 1 and mask.device.type != "cpu"):
            return None
        return self._read(_hidden_keys, mask, queries)

    def _read(self, function: Any, mask: Tensor, *args: Any) -> Any:
        if self._mask is None or self._mask() is not mask:
            _check_padding_alone(mask)
            self._mask, self._results = weakref.ref(mask), {}
        if function not in self._results:
            self._results[function] = function(mask, *args)
        return self._results[function]


def _keys_of_last_query(mask: Tensor) -> Tensor:
    """Which keys the last query sees, [B, Tk]."""
    return _visible(mask if mask.ndim == 2 else mask[:, 0, -1])


def _check_padding_alone(mask: Tensor) -> None:
    """Raise PromptError for a mask [B, 1, Tq, Tk] by which the last query does not see what are no padding tokens.

    Padding sees nothing, or, as transformers has it for some models, everything.
    """
    if mask.ndim == 2:
        return
    visible, (queries, keys) = _visible(mask)[:, 0], mask.shape[-2:]
    own = torch.arange(keys - queries, keys, device=mask.device)
    sees_itself = visible[:, torch.arange(queries, device=mask.device), own]
    is_text = sees_itself & ~visible[:, -1, own]
    if bool(is_text.any()) and bool((is_text & ~visible.all(-1)).any()):
        raise PromptError(
            "the attention mask hides tokens from the last one that are no padding, such as another text in the same "
            "row; a compressed cache keeps what the last token may see, so give each text a row of its own."
        )


def _hidden_keys(mask: Tensor, queries: int) -> Tensor | None:
    hidden = ~_keys_of_last_query(mask).cpu()
    if bool(hidden[:, -queries:].all(-1).any()):
        raise PromptError("a row of the batch is nothing but padding; leave it out.")
    return hidden if queries > 1 and bool(hidden.any()) else None


def _left_padding(mask: Tensor) -> list[int] | None:
    lengths = padding_lengths(mask)
    if max(lengths) == mask.shape[-1]:
        raise PromptError("a row of the batch is nothing but padding; leave it out.")
    return lengths if any(lengths) else None
