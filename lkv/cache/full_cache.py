"""FullCache: the cache of a text that nothing is evicted from, with the interface of `RaggedCache`."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from lkv.hf.fingerprint import read_adapters
from lkv.hf.spec import unwrap_model


class FullCache(DynamicCache):
    """A transformers cache that keeps every entry.

    Args:
        model: The model that the cache is used with; its attention is not patched.

    Attributes:
        adapters: As in `RaggedCache`, the adapters that the text is read with.
        is_rewindable: True, as the tokens after the text can be cut off again.
        is_shareable: False, as `SharedCache` takes compressed texts alone.
        on_layer_start: Not called.
    """

    is_rewindable = True
    is_shareable = False
    on_layer_start: Callable[[int], None] | None = None

    def __init__(self, model: PreTrainedModel):
        super().__init__()
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
        """Return the same as `nbytes`."""
        return kv_nbytes(self)


def kv_nbytes(cache: Cache) -> int:
    """Return the bytes of storage behind the k and v of one of transformers' own caches."""
    layers: list[Any] = list(cache.layers)
    tensors: list[Tensor] = [x for layer in layers for x in (layer.keys, layer.values)]
    return sum(x.untyped_storage().nbytes() for x in tensors)
