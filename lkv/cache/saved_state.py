"""Stores as tensors of a saved context: check them, and make the store again. Files of older versions are read, too."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from lkv.cache.ragged_store import RaggedStore
from lkv.cache.tiered_store import KVStore, TieredStore
from lkv.cache.tiers import TierSplit
from lkv.methods.memory_budget import Precision

_OLD_BITS = (8, 4)
_LARGEST_OLD_GROUP = 1024


def check_store(state: dict[str, Tensor], lens: Tensor, width: int) -> None:
    """Check that `state`, what a store's `state()` returned, has `lens` [B, H] entries with `width` channels.

    Raises KeyError, ValueError or CacheError otherwise.
    """
    shape = (int(lens.sum()), width)
    if "key_basis" in state:
        TieredStore.check_state(state, lens, width)
    elif "k" in state:
        if any(tuple(state[side].shape) != shape or not state[side].is_floating_point() for side in "kv"):
            raise ValueError(f"its k and v are not {shape}")
    else:
        _check_old_codes(state, lens, width)


def restore_store(state: dict[str, Tensor], lens: Tensor, free_slots: int, like: Tensor) -> KVStore:
    """The store that returned `state`, on the device and in the dtype of `like`."""
    if "key_basis" in state:
        return TieredStore.restore_state(state, free_slots, like)
    if "k" in state:
        key, value, is_old = state["k"].to(like), state["v"].to(like), False
    else:
        key, value, is_old = _old_keys(state, lens).to(like), _old_values(state).to(like), True
    store = RaggedStore(lens, 0 if is_old else free_slots, key, value)
    store.fill(key, value)
    if not is_old:
        return store
    # Versions before 3 had scales for groups of values; in 8 bits nothing more of these is lost.
    numbers = torch.zeros(len(key), dtype=torch.int8, device=like.device)
    return TieredStore.from_ragged(store, TierSplit((Precision(8, 8),), lens[None], numbers), free_slots)


def _check_old_codes(state: dict[str, Tensor], lens: Tensor, width: int) -> None:
    entries = int(lens.sum())
    for side in "kv":
        layout = state[f"{side}_layout"]
        if layout.dtype != torch.long or layout.shape != (4,):
            raise ValueError(f"the layout of its {side} is no four whole numbers")
        bits, group, channels, _ = layout.tolist()
        if bits not in _OLD_BITS or not 1 < group <= _LARGEST_OLD_GROUP or channels != width:
            raise ValueError(f"the layout of its {side} is {bits, group, channels}")
        groups = (sum(-(-n // group) for n in lens.flatten().tolist()), width)
        shape = groups if side == "k" else (entries, -(-width // group))
        codes, step, least = (state[f"{side}_{name}"] for name in ("codes", "step", "least"))
        is_float = step.is_floating_point() and least.is_floating_point()
        if codes.dtype != torch.uint8 or codes.shape != (entries, -(-width * bits // 8)) or not is_float:
            raise ValueError(f"the codes of its {side} are {tuple(codes.shape)} {codes.dtype}")
        if step.shape != shape or least.shape != shape:
            raise ValueError(f"the steps of its {side} are {tuple(step.shape)}, not {shape}")
    pool_lens = state["k_lens"]
    if pool_lens.numel() != lens.numel() or pool_lens.flatten().tolist() != lens.flatten().tolist():
        raise ValueError("its quantised pools have other heads than its counts")


def _old_codes(state: dict[str, Tensor], side: str) -> tuple[Tensor, Tensor, Tensor, int]:
    """Codes [N, d], steps and least values in float32, and the size of a group."""
    bits, group, width, _ = state[f"{side}_layout"].tolist()
    codes = state[f"{side}_codes"]
    codes = codes if bits == 8 else torch.cat([codes & 15, codes >> 4], 1)[:, :width]
    return codes.float(), state[f"{side}_step"].float(), state[f"{side}_least"].float(), group


def _old_keys(state: dict[str, Tensor], lens: Tensor) -> Tensor:
    """k [N, d]; groups are of entries of one head."""
    codes, step, least, group = _old_codes(state, "k")
    counts = lens.flatten()
    within = torch.cat([torch.arange(n, device="cpu") for n in counts.tolist()]) if len(codes) else counts[:0]
    groups = -(-counts // group)
    first = (groups.cumsum(0) - groups).repeat_interleave(counts)
    at = (first + within // group).to(codes.device)
    return codes * step[at] + least[at]


def _old_values(state: dict[str, Tensor]) -> Tensor:
    """v [N, dv]; groups are of channels of one entry."""
    codes, step, least, group = _old_codes(state, "v")
    width = codes.shape[1]
    values = pad(codes, (0, -width % group)).unflatten(1, (-1, group)) * step[..., None] + least[..., None]
    return values.flatten(1)[:, :width]
