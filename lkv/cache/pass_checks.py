"""Checks before a forward pass of a `RaggedCache`: equal lengths of all layers, a text that the model can read."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lkv.cache.cache_config import CacheConfig, SharedState
from lkv.cache.layer import RaggedLayer
from lkv.errors import CacheError, PromptError
from lkv.hf.model_spec import ModelSpec
from lkv.hf.other_layers import OtherLayer, RecurrentLayer, SlidingWindowLayer
from lkv.hf.position_hook import take_image_positions
from lkv.hf.positions import check_frequencies

_REMEDY = "call rewind() if the prompt was complete, else reset() and read the prompt again"


class PassTracker:
    """Tracks which layers a forward pass has reached, since recurrent layers do not count tokens.

    Attributes:
        has_states: Whether some layers have recurrent or convolution states.
        first_attention: The index of the first layer that gets keys.
        attention_before: The attention layer before each of these; for the first it is the last one.
    """

    def __init__(self, layers: Sequence[Any], others: Mapping[int, OtherLayer]):
        """Track a cache of `layers`, of which `others` are not evicted from."""
        states = [index for index, other in others.items() if isinstance(other, RecurrentLayer)]
        attention = [index for index, layer in enumerate(layers) if isinstance(layer, RaggedLayer | SlidingWindowLayer)]
        self.has_states, self.first_attention = bool(states), attention[0]
        self.attention_before = dict(zip(attention, [attention[-1], *attention[:-1]], strict=True))
        self._count = len(attention) + len(states)
        self._reached: frozenset[tuple[int, str]] = frozenset()

    def reset(self) -> None:
        """Expect a new pass."""
        self._reached = frozenset()

    def fork(self) -> "PassTracker":
        """Return a copy that continues independently."""
        return copy.copy(self)

    def enter(self, layer: int, part: str) -> bool:
        """Record that a pass has reached a `part` of a layer; return whether a new pass starts.

        Raises CacheError if the previous pass was interrupted.
        """
        if (layer, part) in self._reached:
            if self.has_states and len(self._reached) < self._count:
                raise CacheError(f"an interrupted forward pass left the layers of this cache unequal; {_REMEDY}.")
            self._reached = frozenset()
        self._reached |= {(layer, part)}
        return len(self._reached) == 1


def take_prompt_images(config: CacheConfig, shared: SharedState, rows: int, length: int, new: int) -> Tensor | None:
    """Return the positions [3, rows, new] of the pass that has begun, if it has images in a model with multimodal RoPE.

    Args:
        config: The configuration of the cache.
        shared: The state of its layers.
        rows: The rows of the pass.
        length: The tokens that the cache has read before.
        new: The tokens of the pass.

    Raises:
        CacheError: For images after the first pass, or in several rows of a cache that evicts later tokens.
    """
    # A single token is no image, and its positions would be waited for in every decode step.
    positions = take_image_positions(rows, new) if shared.has_image_positions and new > 1 else None
    if positions is not None and length:
        raise CacheError(
            "this cache has read tokens already, and images must be in the first pass of a prompt: make a new cache "
            "for a prompt with all images."
        )
    if positions is not None and rows > 1 and (config.request.decode_eviction or config.request.streaming):
        raise CacheError(
            "the rows of this batch have images, and so positions of their own, with which decode_eviction and "
            "streaming do not reckon; leave that out, or give one row at a time."
        )
    return positions


def check_pass(layers: Sequence[Any], rows: int, tokens: int, spec: ModelSpec) -> None:
    """Check a forward pass before it begins.

    Args:
        layers: The layers of the cache.
        rows: The rows of the pass.
        tokens: The tokens of the text after it.
        spec: The description of the model.

    Raises:
        CacheError: If an interrupted pass left layers of unequal length, or if the number of rows changed.
        PromptError: For a text that the model cannot read.
    """
    ragged = [layer for layer in layers if isinstance(layer, RaggedLayer)]
    lengths = {layer.get_seq_length() for layer in layers if isinstance(layer, RaggedLayer | SlidingWindowLayer)}
    if len(lengths) > 1 or len({layer.prompt_length for layer in ragged}) > 1:
        raise CacheError(f"an interrupted forward pass left the layers of this cache unequal; {_REMEDY}.")
    own_rows = len(ragged[0].lens)
    if own_rows and rows != own_rows:
        raise CacheError(
            f"this cache has {own_rows} rows, but {rows} were given; call batch_repeat_interleave(n) for n "
            "sequences from each compressed prompt, or make a new cache for other prompts."
        )
    if tokens > spec.max_positions:
        raise PromptError(
            f"the text would reach {tokens} tokens, but the model reads at most {spec.max_positions}; "
            "shorten it, or generate fewer tokens."
        )
    check_frequencies(ragged[0].model_config, ragged[0].get_seq_length(), tokens)


def check_rewind(appended: int, kept: int, has_others: bool, is_rewindable: bool, has_copy: bool) -> None:
    """Raise CacheError if a cache cannot go back to the end of its prompt.

    Args:
        appended: The tokens after the prompt.
        kept: How many of them the layers still have one by one.
        has_others: Whether the model has sliding-window or recurrent layers.
        is_rewindable: Whether tokens after the prompt are never evicted.
        has_copy: Whether the cache has a copy of those layers at the end of the prompt.
    """
    if not is_rewindable and appended and (has_others or kept < appended):
        raise CacheError(
            "decode_eviction=True evicts from the prompt and its answer together, so there is no way back to the end "
            "of the prompt; continue from a fork() made before, or read without decode_eviction."
        )
    if has_others and not has_copy and appended:
        raise CacheError(
            "sliding and recurrent layers cannot go back to an end of the prompt at which no pass ended; continue "
            "from a fork() made before."
        )
