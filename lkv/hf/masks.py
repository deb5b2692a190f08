"""Masks of LKV caches: for full-attention layers the mask marks padding only."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lkv.errors import PromptError
from lkv.kernels.causal_attention import causal_attention

# A layer's mask, as transformers or `key_mask` made it; None where attention is causal.
Mask = Tensor | None


class MaskOffset(int):
    """The position of the first key that a mask covers; marks the layers of LKV caches.

    transformers passes it from the cache to the mask function, which sees neither the cache nor its layer.
    """


class KeyOffset(MaskOffset):
    """A `MaskOffset` of a layer for which `key_mask` is enough."""


def key_mask(attention_mask: Tensor | None, queries: int, keys: int, offset: int) -> Tensor | None:
    """Return a bool mask [B, keys], False for padding; None if no key is known to be padding.

    It is on the CPU, so that no layer waits for a device. For a single query it stays on its device: it is only read
    if a prompt is fed token by token.

    Args:
        attention_mask: The mask passed to the model, bool [B, tokens].
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
    # The mask's values would become constants of the compiled graph.
    return mask if torch.compiler.is_compiling() or not bool(mask.all()) else None


def attend_prompt(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute attention of a prompt's last tokens over the whole prompt, [B, T, Hq, dv]; `mask` is a `key_mask`."""
    padding = None if mask is None else padding_lengths(mask)
    return causal_attention(query, key, value, scale, padding).transpose(1, 2)


def padding_lengths(mask: Tensor) -> list[int]:
    """Return the left padding of each row of `mask`, a `key_mask` or a causal mask [B, 1, Tq, Tk].

    Raises PromptError for padding anywhere else.
    """
    visible = _keys_of_last_query(mask).cpu()
    hidden = (visible.cumsum(-1) == 0).sum(-1)
    if bool((visible.sum(-1) != visible.shape[-1] - hidden).any()):
        if not bool(visible[:, -1].all()):
            raise PromptError("the batch is padded on the right; pad it on the left (tokenizer.padding_side = 'left').")
        row, token = (~visible & (visible.cumsum(-1) > 0)).nonzero()[0].tolist()
        raise PromptError(
            f"the attention mask hides tokens between others, in row {row} from token {token} on; remove them from the "
            "prompt, and pad rows on the left instead."
        )
    return hidden.tolist()


def expand_mask(mask: Tensor | None, queries: int, keys: int, device: torch.device) -> Tensor:
    """Return a bool mask of the keys that each query sees, broadcastable to [B, 1, queries, keys].

    `mask`: None, a `key_mask` or a causal mask [B, 1, queries, keys], bool or additive.
    """
    if mask is not None and mask.ndim == 4:
        return _visible(mask)
    causal = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return causal if mask is None else causal & mask.to(device)[:, None, None]


def _visible(mask: Tensor) -> Tensor:
    """Convert `mask`, bool or additive, to bool: True if a query sees a key."""
    return mask if mask.dtype == torch.bool else mask == 0


class PaddingReader:
    """Reads padding from a `key_mask` or a causal mask [B, 1, Tq, Tk] (bool, additive or None).

    All layers of a forward pass share one mask, so it is read, and its device waited for, only once.
    """

    def __init__(self) -> None:
        self._mask: weakref.ref[Tensor] | None = None
        self._results: dict[Any, Any] = {}

    def left_padding(self, mask: Mask) -> list[int] | None:
        """Return the left padding of each row of `mask`; None without padding.

        Raises PromptError for padding anywhere else, and for a row that is all padding.
        """
        return self._read(_left_padding, mask) if isinstance(mask, Tensor) else None

    def hidden_keys(self, mask: Mask, queries: int) -> Tensor | None:
        """Return the keys that `mask` hides from the last query, bool [B, Tk] on the CPU; None if it sees all.

        For a single query this only checks, on the CPU, whether the query itself is padding: on other devices every
        layer of every decode step would wait. Raises PromptError for a row whose queries are all padding.
        """
        if not isinstance(mask, Tensor) or (queries == 1 and mask.device.type != "cpu"):
            return None
        return self._read(_hidden_keys, mask, queries)

    def _read(self, function: Callable[..., Any], mask: Tensor, *args: object) -> Any:
        if self._mask is None or self._mask() is not mask:
            _check_padding_alone(mask)
            self._mask, self._results = weakref.ref(mask), {}
        if function not in self._results:
            self._results[function] = function(mask, *args)
        return self._results[function]


def _keys_of_last_query(mask: Tensor) -> Tensor:
    """Return the keys that the last query sees, bool [B, Tk]."""
    return _visible(mask if mask.ndim == 2 else mask[:, 0, -1])


def _check_padding_alone(mask: Tensor) -> None:
    """Raise PromptError for a mask [B, 1, Tq, Tk] that hides non-padding tokens from the last query.

    Padding queries see nothing, or, for some models in transformers, everything.
    """
    if mask.ndim == 2:
        return
    visible, (queries, keys) = _visible(mask)[:, 0], mask.shape[-2:]
    own = torch.arange(keys - queries, keys, device=mask.device)
    sees_itself = visible[:, torch.arange(queries, device=mask.device), own]
    is_text = sees_itself & ~visible[:, -1, own]
    if bool(is_text.any()) and bool((is_text & ~visible.all(-1)).any()):
        raise PromptError(
            "the attention mask hides tokens from the last one that are not padding, such as another text in the same "
            "row; a compressed cache keeps what the last token may see, so give each text a row of its own."
        )


def _hidden_keys(mask: Tensor, queries: int) -> Tensor | None:
    hidden = ~_keys_of_last_query(mask).cpu()
    if mask.ndim == 4:
        _check_causal(mask, ~hidden, queries)
    if bool(hidden[:, -queries:].all(-1).any()):
        raise PromptError("a row of the batch is nothing but padding; leave it out.")
    return hidden if queries > 1 and bool(hidden.any()) else None


def _check_causal(mask: Tensor, is_text: Tensor, queries: int) -> None:
    """Raise PromptError if one of the last `queries` tokens of `mask` [B, 1, Tq, Tk] sees a later one.

    `is_text` [B, Tk] on the CPU: the keys that are not padding; padding queries may see everything.
    """
    own = _visible(mask)[:, 0, -queries:, -queries:].cpu()
    if bool((own & is_text[:, -queries:, None]).triu(1).any()):
        raise PromptError(
            "the attention mask lets tokens see later ones, as within an image in Gemma-3, but entries are appended "
            "in order: give all images in the first pass of the prompt, without streaming."
        )


def _left_padding(mask: Tensor) -> list[int] | None:
    lengths = padding_lengths(mask)
    if max(lengths) == mask.shape[-1]:
        raise PromptError("a row of the batch is nothing but padding; leave it out.")
    return lengths if any(lengths) else None
