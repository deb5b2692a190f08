"""What eviction and storage in few bits leave of rows that `dense` reads: it knows no cache either."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.dense import FP8, Dense, Row, Stored, basis_of, kept_of, stored_in_bits

# Of the largest logit. Storage in few bits multiplies the rounding of k and v where a value lies between two codes.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
HALF = (torch.float16, torch.bfloat16)


def score(key: Tensor, value: Tensor) -> Tensor:
    """Scores [..., T] that differ even between equal tokens."""
    return key.sum(-1) - 0.5 * value.square().sum(-1) + key[..., 0].sin()


def place_score(layer: int, heads: int, positions: Tensor) -> Tensor:
    """Scores [H, T] by the place alone, no two equal among 101: the same in every dtype."""
    head = torch.arange(heads)[:, None]
    return ((37 * positions + 11 * layer + 29 * head) % 101).double()


class EvictionReference:
    """Evicts from rows by `score` or `place_score`, and stores what is left in the bits of its tier.

    Args:
        dense: the model.
        dtype: of the cache.
        by_place: whether scores are those of `place_score`.
        budgets: what the tiers down to each one keep; the last one's is all that is kept.
        tiers: bits of k and v of each tier, best first; none where nothing is stored in few bits.
    """

    def __init__(self, dense: Dense, dtype: torch.dtype, by_place: bool, budgets: Sequence, tiers: list | None):
        self.dense, self.dtype, self.by_place, self.budgets, self.tiers = dense, dtype, by_place, budgets, tiers
        self.is_decided = True  # False once a choice hung on less than rounding: the rest tells nothing

    def evict(self, row: Row, layers: list[int]) -> None:
        """Hide all but the best floor(r t) of what each head of `layers` still holds, from the next token on."""
        tokens, heads = len(row.ids), self.dense.heads
        gone = row.gone(self.dense.layers, heads)
        found = None if self.by_place and not self.tiers else self.dense.read(row)[1]
        stored: dict[int, list[Stored]] = {}
        for layer in layers:
            number = self.dense.full_layers.index(layer)
            table = place_score(number, heads, torch.arange(tokens)) if self.by_place else score(*found[layer])
            ratios = [budget.ratios(number, heads, tokens) for budget in self.budgets]
            own: list[Stored] = []
            for head in range(heads):
                alive = set(range(tokens)) - gone[layer][head]
                best: list[set[int]] = []
                for each in ratios:
                    kept, margin = kept_of(table[head], alive, min(len(alive), int(each[head] * tokens + 1e-6)))
                    self.is_decided &= margin > 1e-3
                    best.append(kept)
                gone[layer][head] |= alive - kept
                if self.tiers:
                    before = row.latest(layer)
                    own.append(self._store(*(x[head] for x in found[layer]), best, before and before[head]))
            stored[layer] = own
        row.hidden.append((tokens, gone))
        if self.tiers:
            row.stored.append((tokens, stored))

    def _store(self, key: torch.Tensor, value: torch.Tensor, best: list[set[int]], before: Stored | None) -> Stored:
        """What one head stores of k and v [T, d] where the tiers down to each one have the positions `best`.

        Entries that stay in their tier stay as they were `before`.
        """
        places = sorted(best[-1])
        bits = [next(own for own, kept in zip(self.tiers, best, strict=True) if place in kept) for place in places]
        key, value = key.to(self.dtype), value.to(self.dtype)
        if before is not None:
            key[before.places], value[before.places] = before.key, before.value
        basis = before.basis if before is not None else basis_of(key[places], self.dtype)
        new_key, new_value, nearest = stored_in_bits(key[places], value[places], bits, basis)
        self.is_decided &= self.dtype in HALF or nearest > (1e-6 if self.dtype == torch.float64 else 1e-5)
        for number, (place, own) in enumerate(zip(places, bits, strict=True)):
            if before is not None and place in before.places and before.bits[before.places.index(place)] == own:
                new_key[number], new_value[number] = key[place], value[place]
        return Stored(places, bits, new_key, new_value, basis)

    @property
    def tolerance(self) -> float:
        """Of the largest logit."""
        if not self.tiers:
            return TOLERANCE[self.dtype]
        # A number that lies between two levels, or two numbers of 16 bits, may become either one; bfloat16 has an
        # eighth of float16's precision.
        least = min(bits for pair in self.tiers for bits in pair)
        if self.dtype in HALF:
            return {8: 0.1, FP8: 0.15, 4: 0.15, 3: 0.2}[least] * (4 if self.dtype == torch.bfloat16 else 1)
        return 0.02 if self.dtype == torch.float64 or least == 8 else 0.05
