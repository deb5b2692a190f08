"""Stores as tensors of a saved context: check them, and restore the store."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lkv.cache.ragged_store import KVStore, RaggedStore
from lkv.cache.tiered_store import TieredStore
from lkv.hf.model_spec import ModelSpec


def number_tensors(states: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of several layers in one dictionary, with the layer index appended to their names."""
    return {f"{name}.{index}": tensor for index, state in enumerate(states) for name, tensor in state.items()}


def split_numbered(tensors: dict[str, Tensor], layers: int) -> list[dict[str, Tensor]]:
    """Undo `number_tensors` for `layers` layers. Raises ValueError for a tensor of another layer."""
    states: list[dict[str, Tensor]] = [{} for _ in range(layers)]
    for name, tensor in tensors.items():
        field, _, index = name.rpartition(".")
        if index not in map(str, range(layers)):
            raise ValueError(f"its tensor {name!r} belongs to no layer")
        states[int(index)][field] = tensor
    return states


def check_layer(state: dict[str, Tensor], tokens: int, spec: ModelSpec) -> None:
    """Check a result of `RaggedLayer.state` for one text of `tokens` tokens, before memory is allocated for it.

    Raises ValueError, KeyError or CacheError if it is invalid.
    """
    counts, real, length = state["kept"], state["real"], state["length"]
    if any(x.dtype != torch.long for x in (counts, real, length)):
        raise ValueError("its counts are not whole numbers")
    if counts.shape != (1, spec.kv_heads) or int(counts.min()) < 0 or int(counts.max()) > tokens:
        raise ValueError(f"its counts of kept entries are {tuple(counts.shape)}, or more than {tokens} tokens")
    if any(x.shape != (1,) or int(x) != tokens for x in (real, length)):
        raise ValueError(f"its lengths are not the {tokens} of its text")
    store = {name: tensor for name, tensor in state.items() if name not in ("kept", "real", "length")}
    if "key_basis" in store:
        TieredStore.check_state(store, counts, spec.head_dim)
        return
    shape = (int(counts.sum()), spec.head_dim)
    if any(tuple(store[side].shape) != shape or not store[side].is_floating_point() for side in "kv"):
        raise ValueError(f"its k and v are not {shape}")


def restore_store(state: dict[str, Tensor], lens: Tensor, free_slots: int, like: Tensor) -> KVStore:
    """Restore the store from its `state`, on the device and in the dtype of `like`."""
    if "key_basis" in state:
        return TieredStore.restore_state(state, free_slots, like)
    key, value = state["k"].to(like), state["v"].to(like)
    store = RaggedStore(lens, free_slots, key, value)
    store.fill(key, value)
    return store
