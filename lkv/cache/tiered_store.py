"""A layer's compressed entries in quantised tiers of decreasing precision, and its unquantised entries."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from lkv.cache.ragged_store import KVStore, RaggedStore, packed_starts, slot_indices
from lkv.cache.tier_writer import TierWriter, head_numbers
from lkv.cache.tiers import KeyBasis, Tier, TierSplit, check_width, code_width, rotation, to_dtype
from lkv.kernels import QUANTIZED_BITS
from lkv.kernels.ragged_attention import (
    MAX_QUANTIZED,
    Basis,
    QuantizedKV,
    RaggedKV,
    can_attend_quantized,
    ragged_attention,
)
from lkv.methods.targets import UNQUANTIZED, Precision
from lkv.utils import devices

_TENSORS = ("key_codes", "key_norms", "value_codes", "value_norms")


class TieredStore(KVStore):
    """Compressed entries in up to two quantised tiers, and a `RaggedStore` of unquantised and appended entries.

    All of them are stored in transformed coordinates: k as in `KeyBasis`, v rotated. Queries are transformed on
    arrival, outputs are transformed back. Compiled backends (Triton; C++ for few rows) read the codes directly;
    otherwise the entries are dequantised one layer at a time.
    """

    def __init__(self, basis: KeyBasis, tiers: tuple[Tier, ...], unquantized: RaggedStore):
        """Combine `tiers`, best first, with entries in the model's dtype, all in the coordinates of `basis`."""
        self.basis, self.tiers, self._rest = basis, tiers, unquantized
        rest, coded = unquantized, torch.zeros_like(unquantized.lens)
        counts: list[Tensor] = []
        for tier in tiers:
            counts += [tier.lens, tier.starts]
            coded = coded + tier.lens
        self.lens = coded + rest.lens
        with torch.inference_mode(False):  # see RaggedStore
            # Entry i of a head is in slot start + i of the pools, unless it is quantised.
            stacked = devices.stack_to_device(rest.k.device, rest.starts - coded, self.lens, *counts)
            self._device_starts, self._device_compressed = stacked[0], stacked[1]
            self._device_lens = stacked[1].clone()
            device_tables = stacked[2:].unflatten(0, (-1, 2)) if tiers else ()
            self._quantized = tuple(
                QuantizedKV(*tier.tensors, table, tier.precision.key_bits, tier.precision.value_bits)
                for tier, table in zip(tiers, device_tables, strict=True)
            )
            rotations = (rotation(pool.shape[-1], torch.float32, pool.device) for pool in (rest.k, rest.v))
            self._basis = Basis(*basis.tensor, *rotations)
        if rest.appended_tokens:
            self._count_on_device()

    @classmethod
    def from_ragged(
        cls,
        store: RaggedStore,
        tiers: TierSplit,
        free_slots: int,
        norm_checks: list[Tensor],
        basis: KeyBasis | None = None,
        is_centred: bool = True,
        fit_values: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> "TieredStore":
        """Move the compressed entries of `store`, none of them appended, to tiers.

        Args:
            store: The entries.
            tiers: Their tiers.
            free_slots: Free slots of each head for appended tokens.
            norm_checks: Gets a flag for `check_norms`, which the caller checks.
            basis: The coordinates of k; by default measured on the entries.
            is_centred: Whether a measured basis subtracts the mean of the entries.
            fit_values: Returns new values of all entries, from k [N, d] as restored from the tiers and v [N, dv].

        Raises:
            CacheError: If the head size is not a multiple of 8.
        """
        key, value = store.pack()
        check_width(key.shape[-1], value.shape[-1])
        split, has_scores = tiers.without_empty(), store.scores is not None
        lens = split.lens[0] if UNQUANTIZED in split.precisions else torch.zeros_like(store.lens)
        rest = RaggedStore(lens, free_slots, store.k, store.v, has_scores)
        writer = TierWriter(split, store.lens, rest)
        basis, key_codes = writer.write_keys(key, basis, is_centred)
        if fit_values is not None:
            value = fit_values(writer.restore_keys(key, basis, key_codes), value)
        value_codes = writer.write_values(value)
        if key_codes:
            norm_checks.append(writer.is_invalid())
        slots = slot_indices(store.starts, store.lens, key.device) if has_scores else None
        packed = [x[slots] for x in (store.scores, store.positions) if x is not None]
        quantized = []
        for number, entries in enumerate(split.entries()):
            extras = [x[entries] for x in packed]
            if number in key_codes:
                codes = *key_codes[number], *value_codes[number]
                quantized.append(Tier(split.precisions[number], split.lens[number], codes, *extras))
            elif extras:
                rest.fill(None, None, *extras)
        return cls(basis, tuple(quantized), rest)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions of the quantised tiers."""
        return tuple(tier.precision for tier in self.tiers)

    @property
    @override
    def scores(self) -> Tensor | None:
        return self._rest.scores

    @property
    @override
    def appended_tokens(self) -> int:
        return self._rest.appended_tokens

    @property
    @override
    def counts(self) -> Tensor:
        return self.lens + (self._rest.counts - self._rest.lens)

    @property
    @override
    def free_slots(self) -> int:
        return self._rest.free_slots

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self._rest.dtype

    @override
    def drop_scores(self) -> None:
        self._rest.drop_scores()
        self.tiers = tuple(replace(tier, scores=None, positions=None) for tier in self.tiers)

    @override
    def attend_compressed(self, query: Tensor, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        kv = self.stored_view()._replace(lens=self._device_compressed)
        if not can_attend_quantized(query, kv):
            return self.restore(with_appended=False).attend_compressed(query, scale, softcap)
        return ragged_attention(query, kv, scale, causal=False, lse=True, softcap=softcap)

    @override
    def attention_view(self) -> RaggedKV:
        return self.restore().attention_view()

    @override
    def restore(self, with_appended: bool = True) -> RaggedStore:
        """Return all entries unquantised, in the model's coordinates; in each head the first tier comes first.

        Appended entries count as compressed there.
        """
        rest = self._rest
        counts = rest.counts if with_appended else rest.lens
        device, wide = rest.k.device, torch.promote_types(rest.dtype, torch.float32)
        store = RaggedStore(self.lens - rest.lens + counts, 0, rest.k, rest.v, rest.scores is not None)
        key, value = (pool.new_empty(pool.shape, dtype=wide) for pool in (store.k, store.v))
        starts = store.starts
        for tier in self.tiers:
            slots = slot_indices(starts, tier.lens, device)
            key[slots], value[slots] = tier.dequantize(wide)
            if store.scores is not None and store.positions is not None:
                assert tier.scores is not None and tier.positions is not None
                store.scores[slots], store.positions[slots] = tier.scores, tier.positions
            starts = starts + tier.lens
        slots, source = slot_indices(starts, counts, device), slot_indices(rest.starts, counts, device)
        key[slots], value[slots] = rest.k[source].to(wide), rest.v[source].to(wide)
        if store.scores is not None and store.positions is not None:
            assert rest.scores is not None and rest.positions is not None
            store.scores[slots], store.positions[slots] = rest.scores[source], rest.positions[source]
        key = self.basis.leave(key, head_numbers(store.lens, device))
        value = value @ rotation(value.shape[-1], wide, device).mT
        store.k.copy_(to_dtype(key, rest.dtype))
        store.v.copy_(to_dtype(value, rest.dtype))
        return store

    def requantize(
        self, kept: RaggedStore, origin: Tensor, tiers: TierSplit, free_slots: int, norm_checks: list[Tensor]
    ) -> "TieredStore":
        """Return a new store of kept entries of this one.

        Args:
            kept: The kept entries, unquantised as in `restore`.
            origin: The index of each kept entry among all entries of `restore()`, [sum of lens].
            tiers: The new tiers of the kept entries. Entries that stay in their tier keep their codes.
            free_slots: As in `from_ragged`.
            norm_checks: Likewise.
        """
        new = TieredStore.from_ragged(kept, tiers, free_slots, norm_checks, self.basis)
        rest, device = self._rest, origin.device
        # For each entry of `restore()`: its tier index (unquantised entries last) and its index in the tier.
        numbers, places = (torch.empty(int(self.counts.sum()), dtype=torch.long, device=device) for _ in range(2))
        starts = packed_starts(self.counts)
        for number, tier in enumerate(self.tiers):
            slots = slot_indices(starts, tier.lens, device)
            numbers[slots], places[slots] = number, torch.arange(len(slots), device=device)
            starts = starts + tier.lens
        slots = slot_indices(starts, rest.counts, device)
        numbers[slots], places[slots] = len(self.tiers), slot_indices(rest.starts, rest.counts, device)
        old: dict[Precision, tuple[Tensor, ...]] = {tier.precision: tier.tensors for tier in self.tiers}
        fresh: dict[Precision, tuple[Tensor, ...]] = {tier.precision: tier.tensors for tier in new.tiers}
        old[UNQUANTIZED], fresh[UNQUANTIZED] = (rest.k, rest.v), (new._rest.k, new._rest.v)
        for precision, entries in zip(tiers.precisions, tiers.entries(), strict=True):
            if precision not in old or precision not in fresh:
                continue
            is_old = numbers[origin[entries]] == list(old).index(precision)
            place, targets = places[origin[entries]].where(is_old, 0), torch.arange(len(is_old), device=device)
            if precision == UNQUANTIZED:
                targets = slot_indices(new._rest.starts, new._rest.lens, device)
            for pool, earlier in zip(fresh[precision], old[precision], strict=True):
                if len(earlier):
                    stays = is_old.view(-1, *[1] * (pool.ndim - 1))
                    pool[targets] = torch.where(stays, earlier[place], pool[targets])
        return new

    @override
    def count_appended(self, tokens: int, padding: Tensor | None = None) -> None:
        self._rest.count_appended(tokens, padding)

    @override
    def crop(self, tokens: int) -> None:
        self._rest.crop(tokens)
        self._count_on_device()

    def _count_on_device(self) -> None:
        (appended,) = devices.stack_to_device(self._rest.k.device, self._rest.counts - self._rest.lens)
        torch.add(self._device_compressed, appended, out=self._device_lens)

    @override
    def drop_padding(self, padding: Tensor) -> "TieredStore":
        rest = self._rest.drop_padding(padding)
        return self if rest is self._rest else TieredStore(self.basis, self.tiers, rest)

    @override
    def select(self, rows: Tensor, free_slots: int) -> "TieredStore":
        tiers = tuple(tier.select(rows) for tier in self.tiers)
        return TieredStore(self.basis.select(rows), tiers, self._rest.select(rows, free_slots))

    @override
    def select_heads(self, heads: slice) -> "TieredStore":
        tiers = tuple(tier.select((slice(None), heads)) for tier in self.tiers)
        return TieredStore(self.basis.select_heads(heads), tiers, self._rest.select_heads(heads))

    @override
    def reallocate(self, free_slots: int) -> "TieredStore":
        # Steps count appended tokens in the lengths of this store only.
        self._rest.count_on_device()
        return TieredStore(self.basis, self.tiers, self._rest.reallocate(free_slots))

    @override
    def state(self) -> dict[str, Tensor]:
        key, value = self._rest.pack()
        tensors = {"k": key, "v": value, "kept_unquantized": self._rest.lens, "key_basis": self.basis.tensor}
        for number, tier in enumerate(self.tiers):
            bits = torch.tensor([tier.precision.key_bits, tier.precision.value_bits], device="cpu")
            tensors |= {f"tier{number}_bits": bits, f"tier{number}_kept": tier.lens}
            tensors |= {f"tier{number}_{name}": x for name, x in zip(_TENSORS, tier.tensors, strict=True)}
        return tensors

    @staticmethod
    def check_state(state: dict[str, Tensor], lens: Tensor, width: int) -> None:
        """Check that `state` has `lens` [B, H] entries with `width` channels, and nothing else.

        Raises KeyError, ValueError or CacheError otherwise.
        """
        check_width(width)
        names = {"kept_unquantized"}
        counts = _check_counts(state["kept_unquantized"], lens, "unquantised entries")
        shapes: dict[str, tuple[tuple[int, ...], bool]] = {}
        shape: tuple[int, ...]
        for name, shape in (("k", (int(counts.sum()), width)), ("v", (int(counts.sum()), width))):
            shapes[name] = shape, state[name].dtype.is_floating_point
        shapes["key_basis"] = (2, *lens.shape, width), state["key_basis"].dtype in (torch.bfloat16, torch.float16)
        for number in range(MAX_QUANTIZED):
            if f"tier{number}_bits" not in state:
                break
            stored = state[f"tier{number}_bits"]
            bits = stored.tolist() if stored.dtype == torch.long and stored.shape == (2,) else []
            if not bits or not set(bits) <= set(QUANTIZED_BITS):
                raise ValueError(f"the bits of its tier {number} are not among {QUANTIZED_BITS}, for k and for v")
            tier_lens = _check_counts(state[f"tier{number}_kept"], lens, f"tier {number}")
            entries, counts = int(tier_lens.sum()), counts + tier_lens
            names |= {f"tier{number}_bits", f"tier{number}_kept"}
            for name, bit in zip(("key", "value"), bits, strict=True):
                codes, norms = (state[f"tier{number}_{name}_{part}"].dtype for part in ("codes", "norms"))
                shapes[f"tier{number}_{name}_codes"] = (entries, code_width(bit, width)), codes == torch.uint8
                shapes[f"tier{number}_{name}_norms"] = (entries,), norms == torch.bfloat16
        if not torch.equal(counts, lens):
            raise ValueError("its tiers have other numbers of entries than its heads")
        if unknown := sorted(state.keys() - names - shapes.keys()):
            raise ValueError(f"its tensors {str(unknown)[:200]} belong to none of its tiers")
        for name, (shape, has_dtype) in shapes.items():
            if state[name].shape != shape or not has_dtype:
                raise ValueError(f"its {name} is {tuple(state[name].shape)} {state[name].dtype}, not {shape}")

    @classmethod
    def restore_state(cls, state: dict[str, Tensor], free_slots: int, like: Tensor) -> "TieredStore":
        """Restore a store from its `state`, on the device and for a cache in the dtype of `like`."""
        key, value = state["k"].to(like), state["v"].to(like)
        rest = RaggedStore(state["kept_unquantized"], free_slots, key, value)
        rest.fill(key, value)
        tiers: list[Tier] = []
        while f"tier{len(tiers)}_bits" in state:
            name = f"tier{len(tiers)}_"
            key_codes, key_norms, value_codes, value_norms = (state[name + part].to(like.device) for part in _TENSORS)
            precision = Precision(*state[name + "bits"].tolist())
            tiers.append(Tier(precision, state[name + "kept"], (key_codes, key_norms, value_codes, value_norms)))
        return cls(KeyBasis(state["key_basis"].to(like.device)), tuple(tiers), rest)

    @override
    def nbytes(self) -> int:
        basis = self.basis.tensor.untyped_storage().nbytes()
        return basis + sum(tier.nbytes() for tier in self.tiers) + self._rest.nbytes()

    @override
    def entry_nbytes(self) -> int:
        return self._rest.entry_nbytes()

    @override
    def stored_view(self) -> RaggedKV:
        rest = self._rest
        return RaggedKV(rest.k, rest.v, self._device_starts, self._device_lens, self._quantized, self._basis)


def _check_counts(counts: Tensor, lens: Tensor, what: str) -> Tensor:
    """Return `counts` of `what`; raises ValueError unless each is between 0 and the head's number in `lens`."""
    if counts.dtype != torch.long or counts.shape != lens.shape or bool(((counts < 0) | (counts > lens)).any()):
        raise ValueError(f"its counts of {what} are not whole numbers, one a head, or more than the head has")
    return counts
