"""All state that LKV keeps outside the arguments of a forward pass.

transformers does not pass the cache to attention functions, token ids to a cache, or objects to a compiled graph. So
this state connects one call with the next. (1) `BaseCache.update` records the layer and its keys in a thread-local; the
attention function, called right afterwards, takes the layer. It matches the key tensor by identity, so a record left by
an exception matches no later call. (2) While `torch.compile` traces, `update` records the cache and the layer index
instead. (3) Compiled operators find a cache by its registration number, valid until the cache is freed. (4) The results
of `patch_attention` are kept here until `unpatch_attention` or until the model is freed; a model's own attributes would
be saved and copied. (5) The wrapper of `prepare_inputs_for_generation` announces token ids to the cache, whose
`TokenHistory` keeps them until the forward pass that reads them. (6) In models with multimodal RoPE a hook on the
rotary embedding records the positions of a pass, which transformers does not pass to a cache either. `override_method`
(in `utils/overrides.py`) replaces further methods for the duration of a `with` block.
"""

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from lkv.errors import CacheError, UnsupportedModelError
from lkv.hf.cache_layers import AttentionCacheLayer
from lkv.hf.model_spec import ModelSpec
from lkv.hf.other_layers import LayerKind
from lkv.hf.rotation import Rotation
from lkv.hf.weight_digests import WeightDigests

NOT_PATCHED = (
    "the model computed attention without LKV; call lkv.patch_attention(model), then continue after cache.rewind(), or "
    "after cache.reset() if the prompt was being read."
)


class _Notes(threading.local):
    # Not a ContextVar: torch.compile cannot trace it, and graphs of models with transformers' own caches would break.
    pending_layer: "weakref.ref[AttentionCacheLayer] | None" = None
    positions: Tensor | None = None
    shared_layers: "tuple[weakref.ref[AttentionCacheLayer], ...]" = ()  # later layers of the model read them again
    shared_cache: "weakref.ref[Any] | None" = None  # the cache of these layers


class _Trace:
    """The cache and layer of the last traced `update`, until its attention is traced."""

    layer: tuple[Any, int] | None = None


_notes = _Notes()
_trace = _Trace()
_caches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def note_pending_layer(cache: object, layer: AttentionCacheLayer, key: Tensor) -> None:
    """Record that `layer` of `cache` returned `key` and waits for attention over it."""
    layer.pending_key = key
    _notes.pending_layer = weakref.ref(layer)
    if _notes.shared_cache is not None and _notes.shared_cache() is not cache:  # its last pass has ended, or failed
        _notes.shared_layers, _notes.shared_cache = (), None
    if layer.readers:
        _notes.shared_cache = weakref.ref(cache)
        layer.shared_key, layer.reads_left = key, layer.readers
        others = (other for other in _notes.shared_layers if other() not in (None, layer))
        _notes.shared_layers = (*others, _notes.pending_layer)


def has_waiting_layer() -> bool:
    """Return whether an LKV layer may be waiting for the next attention call of this thread or trace."""
    return bool(_notes.pending_layer or _notes.shared_layers) or (
        torch.compiler.is_dynamo_compiling() and _trace.layer is not None
    )


def take_pending_layer(key: Tensor) -> AttentionCacheLayer | None:
    """Remove and return the layer that waits for attention over `key`, if there is one."""
    layer = None if _notes.pending_layer is None else _notes.pending_layer()
    _notes.pending_layer = None
    if layer is None or layer.pending_key is not key:
        return None
    layer.pending_key = None
    return layer


def note_positions(positions: Tensor) -> None:
    """Record the positions with which a model with multimodal RoPE begins a pass."""
    _notes.positions = positions


def take_positions() -> Tensor | None:
    """Remove and return the positions of the pass that has begun, if its model has multimodal RoPE."""
    positions, _notes.positions = _notes.positions, None
    return positions


def take_shared_layer(key: Tensor) -> AttentionCacheLayer | None:
    """Return the layer whose keys `key` a later layer reads again, if there is one, and count the read.

    Raises UnsupportedModelError if the keys were copied to another device.
    """
    for reference in _notes.shared_layers:
        layer = reference()
        if layer is None or layer.shared_key is None or layer.shared_key.shape != key.shape:
            continue
        if layer.shared_key.device != key.device:
            raise UnsupportedModelError(
                "layers on several devices share keys and values, which LKV cannot follow; load the model on one."
            )
        if layer.shared_key is key:
            layer.reads_left -= 1
            if not layer.reads_left:
                layer.shared_key = None
                _notes.shared_layers = tuple(other for other in _notes.shared_layers if other is not reference)
            return layer
    return None


def note_traced_layer(cache: object, layer: int) -> None:
    """Record that `cache.update` was traced for the layer with this index."""
    _trace.layer = cache, layer


def take_traced_layer() -> tuple[Any, int] | None:
    """Remove and return the cache and layer index whose attention is being traced; None if no LKV layer waits."""
    noted, _trace.layer = _trace.layer, None
    return noted


def register_cache(cache: object) -> Tensor:
    """Return a tensor that identifies `cache` in compiled graphs; a number would become a constant."""
    number = next(_numbers)
    _caches[number] = cache
    with torch.inference_mode(False):
        return torch.tensor([number], device="cpu")


def registered_cache(name: Tensor) -> Any:
    """Return the cache that `register_cache` named `name`."""
    return _caches[int(name)]


@dataclass(frozen=True)
class PatchedModel:
    """The properties of a model that `patch_attention` inspects.

    Attributes:
        spec: The model's description, by which policies and saved contexts recognise it.
        kinds: The kind of each decoder layer.
        heads: The KV heads that this process computes (a part of them under tensor parallelism).
        rotations: The RoPE of each full-attention layer; None if LKV cannot undo it.
        sinks: The attention sinks of each full-attention layer, [Hq], or None.
        softcap: The cap of attention scores, or None.
        config: The configuration object of the model's decoder.
        position_hook: Removes the hook that records positions, in models with multimodal RoPE.
        weights: The digests of its weights; None if they cannot be read here.
    """

    spec: ModelSpec
    kinds: tuple[LayerKind, ...]
    heads: slice
    rotations: tuple[Rotation | None, ...]
    sinks: tuple[Tensor | None, ...]
    softcap: float | None
    config: PreTrainedConfig
    position_hook: Callable[[], None] | None = None
    weights: WeightDigests | None = None


_patches: weakref.WeakKeyDictionary[PreTrainedModel, PatchedModel] = weakref.WeakKeyDictionary()
_patches_by_config: weakref.WeakValueDictionary[int, PatchedModel] = weakref.WeakValueDictionary()  # by its id


def get_patch(model: PreTrainedModel) -> PatchedModel | None:
    """Return the `PatchedModel` of a model, None if it is not patched."""
    return _patches.get(model)


def set_patch(model: PreTrainedModel, patched: PatchedModel | None) -> None:
    """Store the `PatchedModel` of a model; None removes it."""
    before = _patches.pop(model, None)
    if before is not None:
        _patches_by_config.pop(id(before.config), None)
        if before.position_hook is not None:
            before.position_hook()
    if patched is not None:
        _patches[model] = _patches_by_config[id(patched.config)] = patched


def patch_of_config(config: PreTrainedConfig) -> PatchedModel | None:
    """Return the `PatchedModel` of the model whose decoder has this configuration object, None if it is not patched."""
    found = _patches_by_config.get(id(config))  # looking through all models takes 2% of a decode step
    if found is not None and found.config is config:
        return found
    return next((patched for patched in list(_patches.values()) if patched.config is config), None)


class TokenHistory:
    """The ids of the tokens that a cache has read, if `generate` announced them."""

    def __init__(self) -> None:
        self.ids: Tensor | None = None  # [B, k] of the first k tokens
        self._announced: Tensor | None = None
        self._only_chunks = False  # whether all tokens read so far were chunks of one prompt

    def continues_chunks(self, length: int, is_chunk: bool) -> bool:
        """Return whether a chunk continues earlier chunks of the same prompt, of `length` tokens in total."""
        had_chunks = self._only_chunks and length > 0
        self._only_chunks = is_chunk and (self._only_chunks or not length)
        return is_chunk and had_chunks

    def announce(self, ids: Tensor, length: int, is_full: bool, is_first_step: bool) -> None:
        """Record the ids that follow `length` tokens; for the arguments see `BaseCache.announce_inputs`.

        Raises CacheError for ids that do not start with the ids read so far, or that contain no new ones.
        """
        read = self.ids
        if read is not None and len(read) != len(ids):
            read = None
        if not is_full:
            is_complete = read is not None and read.shape[1] == length
            self._announced = torch.cat([read, ids.to(read.device)], 1) if read is not None and is_complete else None
            return
        if length and ids.shape[1] <= length:
            raise CacheError(
                f"this cache has read {length} tokens, but the ids given are {ids.shape[1]}: give all that it has read "
                "followed by new ones, or make a new cache (or reset() this one) for another prompt."
            )
        if is_first_step and read is not None:
            common = min(length, read.shape[1])
            if not torch.equal(read[:, :common], ids[:, :common].to(read.device)):
                raise CacheError(
                    "the ids given do not begin with those that this cache has read; for another prompt make a new "
                    "cache, or reset() this one."
                )
        self._announced = ids

    def read(self, length: int, tokens: int) -> None:
        """Record the announced ids from `length` to `tokens` as read; they replace earlier ids from `length` on."""
        announced, self._announced = self._announced, None
        if announced is not None and announced.shape[1] == tokens:
            self.ids = announced
        elif self.ids is not None:
            self.ids = self.ids[:, :length]

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` [n], in that order."""
        if self.ids is not None:
            self.ids = self.ids[rows.to(self.ids.device)]
