"""Stores as tensors of a saved context: check them, and make the store again."""

from collections.abc import Iterable

from torch import Tensor

from lkv.cache.ragged_store import KVStore, RaggedStore
from lkv.cache.tiered_store import TieredStore


def number_tensors(states: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of several layers in one dictionary, their names followed by the number of the layer."""
    return {f"{name}.{index}": tensor for index, state in enumerate(states) for name, tensor in state.items()}


def split_numbered(tensors: dict[str, Tensor], layers: int) -> list[dict[str, Tensor]]:
    """Undo `number_tensors` for that many layers. Raises ValueError for a tensor of none of them."""
    states: list[dict[str, Tensor]] = [{} for _ in range(layers)]
    for name, tensor in tensors.items():
        field, _, index = name.rpartition(".")
        if index not in map(str, range(layers)):
            raise ValueError(f"its tensor {name!r} belongs to no layer")
        states[int(index)][field] = tensor
    return states


def check_store(state: dict[str, Tensor], lens: Tensor, width: int) -> None:
    """Check that `state`, what a store's `state()` returned, has `lens` [B, H] entries with `width` channels.

    Raises KeyError, ValueError or CacheError otherwise.
    """
    if "key_basis" in state:
        TieredStore.check_state(state, lens, width)
        return
    shape = (int(lens.sum()), width)
    if any(tuple(state[side].shape) != shape or not state[side].is_floating_point() for side in "kv"):
        raise ValueError(f"its k and v are not {shape}")


def restore_store(state: dict[str, Tensor], lens: Tensor, free_slots: int, like: Tensor) -> KVStore:
    """The store that returned `state`, on the device and in the dtype of `like`."""
    if "key_basis" in state:
        return TieredStore.restore_state(state, free_slots, like)
    key, value = state["k"].to(like), state["v"].to(like)
    store = RaggedStore(lens, free_slots, key, value)
    store.fill(key, value)
    return store
