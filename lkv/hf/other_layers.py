"""Layers without eviction: sliding windows, and the states of recurrent and convolution layers.

transformers states the kind of each layer of a model and has a class for each kind. LKV's subclasses add `fork`,
`state` and `restore`.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicSlidingWindowLayer

from lkv.errors import CacheError
from lkv.hf import positions
from lkv.hf.model_spec import ModelSpec

try:
    from transformers.cache_utils import LinearAttentionLayer, get_layer_types_and_kwargs
except ImportError:  # before 5.24 these models have other cache classes, which LKV rejects
    LinearAttentionLayer = object  # type: ignore[misc, assignment]

FULL = "full_attention"
STATE_NAMES = ("sliding_", "conv_", "recurrent_")  # prefixes of the saved tensors of other layers


class OtherLayer(Protocol):
    """A layer without eviction, or that part of a hybrid layer."""

    def fork(self) -> "OtherLayer":
        """Return a copy that continues independently."""

    def reset(self) -> None:
        """Drop all stored tokens and free their memory."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i a copy of the row `beam_idx[i]`."""

    def state(self) -> dict[str, Tensor]:
        """Return the stored tensors, for saving. Raises CacheError if no text was read."""

    def restore(self, state: dict[str, Tensor], tokens: int, spec: ModelSpec, like: Tensor) -> None:
        """Load the tensors that `state` returned for one text.

        Args:
            state: The tensors.
            tokens: The length of the text.
            spec: The description of the model.
            like: A tensor of the dtype and on the device to store them in.

        Raises:
            ValueError: For tensors that `state` cannot have returned.
        """

    def nbytes(self) -> int:
        """Return the bytes of storage."""


class SlidingWindowLayer(DynamicSlidingWindowLayer):
    """transformers' sliding-window layer, for caches with eviction in other layers."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append k and v; return all k and v that the new tokens may see."""
        rows = key_states.shape[0]
        if self.keys is not None and self.values is not None and len(self.keys) == 1 < rows:
            # One text continues in several rows.
            self.keys, self.values = self.keys.expand(rows, -1, -1, -1), self.values.expand(rows, -1, -1, -1)
        visible = super().update(key_states, value_states, *args, **kwargs)
        # The stored tensor is a view of all keys; after a long prompt it would keep the whole prompt in memory.
        if key_states.shape[2] > self.sliding_window and self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.clone(), self.values.clone()
        return visible

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (length, offset) of the keys that `update` returns."""
        stored = min(self.cumulative_length, self.sliding_window - 1)
        return stored + query_length, self.cumulative_length - stored

    def reset(self) -> None:
        """Drop all stored tokens; forks are unaffected."""
        self.keys = self.values = None
        self.is_initialized, self.cumulative_length = False, 0

    def fork(self) -> "SlidingWindowLayer":
        """Return a copy that continues independently: tensors are replaced, never written to."""
        return copy.copy(self)

    def state(self) -> dict[str, Tensor]:
        """Return the last tokens: k and v [B, H, T, d]."""
        if self.keys is None or self.values is None:
            raise CacheError("there is no text in a sliding layer to save; read one first.")
        return {"sliding_k": self.keys, "sliding_v": self.values}

    def restore(self, state: dict[str, Tensor], tokens: int, spec: ModelSpec, like: Tensor) -> None:
        """Load what `state` returned for one text; see `OtherLayer`."""
        # Its heads may differ from those of the layers that `spec` describes.
        heads, width = (
            state["sliding_k"].shape[axis] if state.get("sliding_k", like).ndim == 4 else 0 for axis in (1, 3)
        )
        shape = (1, heads, min(tokens, self.sliding_window - 1), width)
        is_whole = state.keys() == {"sliding_k", "sliding_v"}
        if not is_whole or any(tuple(x.shape) != shape or not x.is_floating_point() for x in state.values()):
            raise ValueError(f"k and v of a sliding layer are not {shape}")
        self.lazy_initialization(like, like)
        self.keys, self.values = state["sliding_k"].to(like), state["sliding_v"].to(like)
        self.cumulative_length = tokens

    def nbytes(self) -> int:
        """Return the bytes of k and v."""
        tensors = (self.keys, self.values) if self.is_initialized else ()
        return sum(x.untyped_storage().nbytes() for x in tensors if x is not None)


class RecurrentLayer(LinearAttentionLayer):
    """The states of a recurrent layer (linear attention, Mamba) or of a convolution, as transformers stores them.

    Args:
        number_of_states: The number of state pairs of the layer.
        is_stepwise: Whether the model's code reads several tokens after a text as if there were no states.
    """

    def __init__(self, number_of_states: int = 1, is_stepwise: bool = False):
        super().__init__(number_of_states=number_of_states)
        self.is_stepwise = is_stepwise

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, *args: Any, **kwargs: Any) -> Tensor:
        """Store the convolution state; return the previous and the new state concatenated."""
        if self.is_stepwise and self.has_previous_state[state_idx] and conv_states.shape[-1] > 1:
            raise CacheError(
                "transformers reads several tokens after a text wrongly in this model: read them one by one, with "
                "generate(..., prefill_chunk_size=1); call rewind() first if the prompt was complete."
            )
        return super().update_conv_state(conv_states, state_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Store the recurrent state: in place, unless a backward pass may need the previous one."""
        if recurrent_states.requires_grad:
            self.is_recurrent_states_initialized[state_idx] = False
        return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def fork(self) -> "RecurrentLayer":
        """Return a copy with its own states, since models write to states in place."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict):
                setattr(twin, name, {i: x.clone() if isinstance(x, Tensor) else x for i, x in value.items()})
        return twin

    def reset(self) -> None:
        """Drop all stored tokens and free their memory."""
        self.__init__(self.number_of_states, self.is_stepwise)  # type: ignore[misc]

    def state(self) -> dict[str, Tensor]:
        """Return the states: conv_I and recurrent_I, where the layer has them."""
        if not any(self.has_previous_state.values()):
            raise CacheError("there is no text in a recurrent layer to save; read one first.")
        states = (("conv", self.conv_states), ("recurrent", self.recurrent_states))
        return {f"{name}_{i}": x for name, own in states for i, x in own.items() if x is not None}

    def restore(self, state: dict[str, Tensor], tokens: int, spec: ModelSpec, like: Tensor) -> None:
        """Load what `state` returned for one text; see `OtherLayer`."""
        self.reset()
        for i in range(self.number_of_states):
            conv, recurrent = state.pop(f"conv_{i}"), state.pop(f"recurrent_{i}", None)
            if any(len(x) != 1 or not x.is_floating_point() for x in (conv, recurrent) if x is not None):
                raise ValueError("the states of a recurrent layer are not those of one text")
            # The recurrent state may have a wider dtype than the model's activations.
            dtype = None if recurrent is None or recurrent.dtype != conv.dtype else like.dtype
            self.update_conv_state(conv.to(like), i)
            if recurrent is not None:
                self.update_recurrent_state(recurrent.to(like.device, dtype), i)
        if state:
            raise ValueError(f"a recurrent layer has no {', '.join(sorted(state))}")

    def nbytes(self) -> int:
        """Return the bytes of the states."""
        states = (*self.conv_states.values(), *self.recurrent_states.values())
        return sum(x.untyped_storage().nbytes() for x in states if x is not None)


@dataclass(frozen=True)
class LayerKind:
    """The kind of cache state of one decoder layer.

    Attributes:
        name: transformers' name of the kind.
        other: The class of the part without eviction; None if the layer has no such part.
        options: Arguments of that class.
        readers: The indices of later layers that have no keys and values of their own, but read those of this one.
    """

    name: str
    other: Callable[..., Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    readers: tuple[int, ...] = ()

    @property
    def is_evicted(self) -> bool:
        """Whether the layer has full attention, which LKV evicts from."""
        return self.name in (FULL, "hybrid")

    @property
    def is_recurrent(self) -> bool:
        """Whether the layer has recurrent or convolution states."""
        return self.other is RecurrentLayer

    @property
    def is_stepwise(self) -> bool:
        """Whether the model's code ignores earlier states in passes of several tokens."""
        return bool(self.options.get("is_stepwise"))


# The storage of each kind of layer other than full attention.
_WINDOWS = ("sliding_attention", "chunked_attention")  # they differ in their masks only
_OTHERS: dict[str, Callable[..., Any] | None] = {FULL: None} | dict.fromkeys(_WINDOWS, SlidingWindowLayer)
if LinearAttentionLayer is not object:
    _OTHERS |= {"linear_attention": RecurrentLayer, "conv": RecurrentLayer, "hybrid": RecurrentLayer, "dummy": None}


def layer_kinds(config: Any) -> list[LayerKind]:
    """Return the kind of each decoder layer of a model, from the configuration of its text model."""
    window, names = positions.attention_window(config), getattr(config, "layer_types", None)
    if names is None:
        # Without a list of kinds the window applies to all layers.
        names = ["sliding_attention" if window else FULL] * config.num_hidden_layers
    options: list[dict[str, Any]] = [{} for _ in names]
    if LinearAttentionLayer is not object and getattr(config, "layer_types", None) is not None:
        names, options = get_layer_types_and_kwargs(config)
    kinds = []
    for name, own in zip(names, options, strict=True):
        if name in _WINDOWS:  # a window as long as any text masks nothing
            size = window if name == "sliding_attention" else config.attention_chunk_size
            kinds.append(LayerKind(name, SlidingWindowLayer, {"sliding_window": size}) if size else LayerKind(FULL))
        else:
            kinds.append(LayerKind(name, _OTHERS.get(name), own))
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(kinds)
    for index in (index for index, mode in enumerate(modes) if mode == "reuse"):
        earlier = [
            i for i in range(index) if modes[i] != "reuse" and config.layer_types[i] == config.layer_types[index]
        ]
        for i in earlier[-1:]:
            kinds[i] = replace(kinds[i], readers=(*kinds[i].readers, index))
    return kinds


def unknown_kinds(kinds: Sequence[LayerKind]) -> list[str]:
    """Return the sorted names of the `kinds` that LKV does not support."""
    return sorted({kind.name for kind in kinds} - _OTHERS.keys())


def evicted_kinds(kinds: Sequence[LayerKind]) -> list[LayerKind]:
    """Return the `kinds` that LKV evicts from, in order."""
    return [kind for kind in kinds if kind.is_evicted]


def make_layers(kinds: Sequence[LayerKind], attention: Iterable[Any]) -> tuple[list[Any], dict[int, OtherLayer]]:
    """Return the layers of a cache: `attention` for full attention, new layers for the rest.

    The second result maps layer indices to the parts without eviction, including those of hybrid layers.
    """
    others = {index: kind.other(**kind.options) for index, kind in enumerate(kinds) if kind.other is not None}
    return join_layers(kinds, attention, others), others


def join_layers(kinds: Sequence[LayerKind], attention: Iterable[Any], others: dict[int, OtherLayer]) -> list[Any]:
    """Return the layers of a cache: `attention` for full attention, else `others`."""
    attention = list(attention)
    for layer, kind in zip(attention, evicted_kinds(kinds), strict=True):
        layer.readers = len(kind.readers)
    remaining = iter(attention)
    return [
        next(remaining) if kind.is_evicted else others[index] if index in others else cache_utils.DummyLayer()
        for index, kind in enumerate(kinds)
    ]
