"""FullCache: a cache without eviction, with the interface of `RaggedCache`."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Cache, DynamicCache, PreTrainedModel

from lkv.hf.attention import patch_attention
from lkv.hf.fingerprint import read_adapters
from lkv.hf.image_positions import ImageOffset
from lkv.hf.spec import unwrap_model


class FullCache(DynamicCache):
    """A transformers cache that keeps every entry.

    Args:
        model: The model that the cache is used with.

    Attributes:
        adapters: As in `RaggedCache`, the adapters that the text is read with.
        is_rewindable: Whether the tokens after the text can be cropped: not in models with recurrent states.
        is_shareable: False, as `SharedCache` supports compressed texts only.
        is_stepwise: As in `RaggedCache`.
        on_layer_start: Not called.
        image_offset: As in `RaggedCache`.
    """

    is_shareable = False
    on_layer_start: Callable[[int], None] | None = None
    image_offset: ImageOffset | None = None

    def __init__(self, model: PreTrainedModel):
        # Sliding layers keep all tokens, so that they can be cropped; recurrent states cannot be.
        kinds = patch_attention(model).kinds
        self.is_rewindable = not any(kind.is_recurrent for kind in kinds)
        self.is_stepwise = any(kind.is_stepwise for kind in kinds)
        super().__init__(config=None if self.is_rewindable else model.config)
        self.adapters = read_adapters(unwrap_model(model))

    def fork(self) -> "FullCache":
        """Return a copy that continues independently."""
        return copy.deepcopy(self)

    @contextmanager
    def temporary_slots(self) -> Iterator[None]:
        """Do nothing: a full cache has no free slots."""
        yield

    def realised_retention(self) -> float:
        """Return 1: all entries are kept."""
        return 1.0

    def nbytes(self) -> int:
        """Return the bytes of k and v storage."""
        return kv_nbytes(self)

    def full_nbytes(self) -> int:
        """Return `nbytes()`."""
        return kv_nbytes(self)


def kv_nbytes(cache: Cache) -> int:
    """Return the bytes of storage behind k, v and states of one of transformers' own caches."""
    layers: list[Any] = list(cache.layers)
    names = ("conv_states", "recurrent_states")
    tensors = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    tensors += [x for layer in layers for name in names for x in getattr(layer, name, {}).values()]
    return sum(x.untyped_storage().nbytes() for x in tensors if x is not None)
