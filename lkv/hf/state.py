"""State that LKV keeps beside the arguments of a forward pass, all of it here.

transformers gives an attention function no cache, a cache no token ids, and a compiled graph no objects, so one call
leaves a note for the next. (1) `BaseCache.update` notes in a thread-local which layer returned which keys; the
attention function, called right afterwards, takes that layer. The key tensor itself must match: a note that an
exception left behind matches no later call. (2) While `torch.compile` traces, `update` notes the cache and the index of
the layer instead. (3) Compiled operators find a cache by the number under which it is registered until it is freed. (4)
What `patch_attention` read of a model is kept here and not in the model, which may be saved and copied, until
`unpatch_attention` or until the model is freed. (5) The wrapper of `prepare_inputs_for_generation` announces token ids
to the cache, whose `TokenHistory` keeps them until the forward pass that reads them. `override_method` (in
`utils/overrides.py`) replaces further methods for the duration of a `with` block.
"""

import itertools
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lkv.errors import CacheError
from lkv.hf.cache_layers import AttentionCacheLayer
from lkv.hf.model_spec import ModelSpec
from lkv.hf.other_layers import LayerKind
from lkv.hf.rotation import Rotation

NOT_PATCHED = (
    "the model computed attention without LKV; call lkv.patch_attention(model), then continue after cache.rewind(), or "
    "after cache.reset() if the prompt was being read."
)


class _Notes(threading.local):
    # Not a ContextVar: torch.compile cannot trace those, and would break the graphs of models with a stock cache.
    pending_layer: "weakref.ref[AttentionCacheLayer] | None" = None


class _Trace:
    """The cache and the layer whose `update` was traced last, until attention over it is."""

    layer: tuple[Any, int] | None = None


_notes = _Notes()
_trace = _Trace()
_caches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def note_pending_layer(layer: AttentionCacheLayer, key: Tensor) -> None:
    """Note that `layer` returned `key` and waits for attention over it."""
    layer.pending_key = key
    _notes.pending_layer = weakref.ref(layer)


def has_waiting_layer() -> bool:
    """Whether an LKV layer may be waiting for the attention call that comes next in this thread, or in this trace."""
    return _notes.pending_layer is not None or (torch.compiler.is_dynamo_compiling() and _trace.layer is not None)


def take_pending_layer(key: Tensor) -> AttentionCacheLayer | None:
    """Return the layer that waits for attention over `key`, if there is one; it waits no longer."""
    layer = None if _notes.pending_layer is None else _notes.pending_layer()
    _notes.pending_layer = None
    if layer is None or layer.pending_key is not key:
        return None
    layer.pending_key = None
    return layer


def note_traced_layer(cache: Any, layer: int) -> None:
    """Note that `cache.update` was traced for the layer with this index."""
    _trace.layer = cache, layer


def take_traced_layer() -> tuple[Any, int] | None:
    """Return the cache and the index of the layer that attention is traced for; None where no LKV layer waits."""
    noted, _trace.layer = _trace.layer, None
    return noted


def register_cache(cache: Any) -> Tensor:
    """Return a tensor that names `cache` to compiled graphs, into which a number would be compiled."""
    number = next(_numbers)
    _caches[number] = cache
    with torch.inference_mode(False):
        return torch.tensor([number], device="cpu")


def registered_cache(name: Tensor) -> Any:
    """Return the cache for which `register_cache` returned `name`."""
    return _caches[int(name)]


@dataclass(frozen=True)
class PatchedModel:
    """What LKV reads of a model when it patches its attention.

    Attributes:
        spec: The model's description, by which policies and saved contexts recognise it.
        kinds: What each decoder layer caches.
        heads: The KV heads that this process computes (a part of them under tensor parallelism).
        rotations: The RoPE of each full-attention layer; None where LKV cannot undo it.
        sinks: The attention sinks of each full-attention layer, [Hq]; None where it has none.
        config: The configuration object of the model's decoder.
    """

    spec: ModelSpec
    kinds: tuple[LayerKind, ...]
    heads: slice
    rotations: tuple[Rotation | None, ...]
    sinks: tuple[Tensor | None, ...]
    config: Any


_patches: dict[int, PatchedModel] = {}  # by the id of the model


def get_patch(model: PreTrainedModel) -> PatchedModel | None:
    """Return what `patch_attention` read of a model, None for one that is not patched."""
    return _patches.get(id(model))


def set_patch(model: PreTrainedModel, patched: PatchedModel | None) -> None:
    """Note that a model is patched, or with None that it no longer is."""
    if patched is None:
        _patches.pop(id(model), None)
    else:
        weakref.finalize(model, _patches.pop, id(model), None)
        _patches[id(model)] = patched


def is_patched(config: Any) -> bool:
    """Whether a model is patched whose decoder has this configuration object."""
    return any(patched.config is config for patched in list(_patches.values()))


class TokenHistory:
    """The ids of the tokens that a cache has read, where `generate` announced them."""

    def __init__(self) -> None:
        self.ids: Tensor | None = None  # [B, k] of the first k tokens
        self._announced: Tensor | None = None
        self._only_chunks = False  # whether all that was read came as chunks of one prompt

    def continues_chunks(self, length: int, is_chunk: bool) -> bool:
        """Whether a chunk comes after others of the same prompt, which have `length` tokens together."""
        had_chunks = self._only_chunks and length > 0
        self._only_chunks = is_chunk and (self._only_chunks or not length)
        return is_chunk and had_chunks

    def announce(self, ids: Tensor, length: int, is_full: bool, is_first_step: bool) -> None:
        """Take the ids that come after `length` tokens; for the arguments see `BaseCache.announce_inputs`.

        Raises CacheError for ids that do not begin with those read, or that contain nothing new.
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
        """Record the announced ids as read, from `length` tokens on up to `tokens`; ids they replace are forgotten."""
        announced, self._announced = self._announced, None
        if announced is not None and announced.shape[1] == tokens:
            self.ids = announced
        elif self.ids is not None:
            self.ids = self.ids[:, :length]

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` [n], in that order."""
        if self.ids is not None:
            self.ids = self.ids[rows.to(self.ids.device)]
