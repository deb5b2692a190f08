"""How much of the cache to keep: a retention, or the bytes of a memory budget. Does not import torch.

Shares of memory are of the cache in 16 bits a value, whatever the model's dtype is.

Within a memory budget the best entries are stored in more bits, the next in fewer, the rest are evicted. One ranking
is enough for this: LKV's selections are nested, so entries kept at a low retention are also kept at a higher one.
"""

import itertools
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from lkv.errors import DEFAULT_RETENTION, PolicyFileError, RetentionError, check_count, check_retention
from lkv.kernels import FP8, QUANTIZED_BITS

NORM_BITS = 16  # of an entry's k, and of its v
REFERENCE_ITEMSIZE = 2  # bytes of a value in the full cache that shares of memory refer to
BASIS_BITS = 32  # of a channel of a head's k: its mean and its scale
SCORE_BITS = 64  # of an entry's score and position, for later evictions
DECODE_SLOTS = 64  # free slots of a head, if decoding evicts to a memory budget
_BYTE_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_MEMORY_TEXT = re.compile(r"\s*([0-9.]+(?:e-[0-9]+)?)\s*(?:(%)|([kmg]i?)?(b?))\s*")
_MEMORY_HELP = "give a share of the 16-bit cache in (0, 1] such as 0.1 or '10%', or bytes such as '200MB'"


@dataclass(frozen=True)
class RetentionTarget:
    """The share of a text to keep.

    Attributes:
        retention: the share of its tokens, in (0, 1]; kvpress's `compression_ratio` is 1 - retention.
        tokens: instead of the share, the average number of tokens to keep per head.
        protected: the number of protected tokens, kept by every head. Budgets distribute the rest.
    """

    retention: float = DEFAULT_RETENTION
    tokens: int | None = None
    protected: int = 0

    def __post_init__(self) -> None:
        # Converted from any numeric type to float, so that it can be saved.
        object.__setattr__(self, "retention", check_retention(self.retention))
        if self.tokens is not None:
            problem = f"budget_tokens is {self.tokens!r}, but a head keeps a whole number of tokens >= 1."
            object.__setattr__(self, "tokens", check_count(self.tokens, RetentionError(problem)))

    def share(self, tokens: int) -> float:
        """Return the fraction of a text's `tokens` unprotected tokens to keep, in [0, 1]."""
        whole = tokens + self.protected
        share = self.retention if self.tokens is None else min(1.0, self.tokens / max(1, whole))
        return max(0.0, share * whole - self.protected) / max(1, tokens) if self.protected else share

    def total_share(self, tokens: int) -> float:
        """Return the fraction kept in all precisions together."""
        return self.share(tokens)

    def protected_entries(self, tokens: int) -> int:
        """Return the protected entries of a head, in addition to its share of `tokens` other tokens."""
        return self.protected

    def __str__(self) -> str:
        return f"retention {self.retention}" if self.tokens is None else f"budget_tokens {self.tokens}"


def as_target(target: float | RetentionTarget) -> RetentionTarget:
    """Convert a retention to a `RetentionTarget`. Raises RetentionError outside (0, 1]."""
    return target if isinstance(target, RetentionTarget) else RetentionTarget(check_retention(target))


@dataclass(frozen=True)
class MemoryTarget:
    """A memory budget of k and v: a share of the full cache in 16 bits a value, or a number of bytes."""

    share: float | None = None
    nbytes: int | None = None

    @classmethod
    def parse(cls, value: float | int | str) -> "MemoryTarget":
        """Read 0.1, "10%", 200_000_000 or "200MB". Raises RetentionError for anything else."""
        number: float | None = None
        unit = None
        if isinstance(value, Real) and not isinstance(value, bool):
            number = int(value) if isinstance(value, Integral) else float(value)
        elif isinstance(value, str) and (match := _MEMORY_TEXT.fullmatch(value.lower())):
            with suppress(ValueError):
                number = float(match[1]) / 100 if match[2] else float(match[1]) * _BYTE_UNITS[match[3] or ""]
            unit = "%" if match[2] else (match[3] or "") + match[4]
        if number is None or not number > 0:
            raise RetentionError(f"memory is {value!r}; {_MEMORY_HELP}.")
        if number <= 1 and not (unit and unit != "%"):
            return cls(share=float(number))
        is_whole = isinstance(value, Integral) if unit is None else unit or number % 1 == 0
        if unit == "%" or not 1 <= number < 2**60 or not is_whole:
            raise RetentionError(
                f"memory is {value!r}, more than the 16-bit cache or no number of bytes; {_MEMORY_HELP}."
            )
        if number <= 100 and not unit:  # a percentage without its sign
            raise RetentionError(f"memory is {value!r}, which would be bytes; {_MEMORY_HELP}.")
        return cls(nbytes=int(number))

    def share_of(self, shape: "KVShape", tokens: int) -> float:
        """Return the share of the 16-bit cache of a text of `tokens` tokens."""
        return self.share if self.share is not None else (self.nbytes or 0) / shape.reference_nbytes(tokens)

    def __str__(self) -> str:
        return f"memory {self.share:.4g}" if self.share is not None else f"memory {self.nbytes} bytes"


def check_memory(value: str) -> str:
    """Return `value` if it is a memory budget such as 10% or 200MB; raise RetentionError otherwise."""
    MemoryTarget.parse(value)
    return value


@dataclass(frozen=True)
class Precision:
    """Bits of a value of k and of v; 16 means the model's dtype, `FP8` floating-point numbers of 8 bits."""

    key_bits: int
    value_bits: int

    @property
    def is_quantized(self) -> bool:
        """Whether entries are stored as codes."""
        return self.key_bits < 16

    @property
    def rank(self) -> tuple[int, int]:
        """The places of k's and of v's bits among all that there are, 0 for the best."""
        return _BITS.index(self.key_bits), _BITS.index(self.value_bits)

    def __str__(self) -> str:
        names = ["FP8" if bits == FP8 else f"{bits} bits" for bits in (self.key_bits, self.value_bits)]
        return names[0] if names[0] == names[1] else f"k {names[0]}, v {names[1]}".replace(" bits,", ",")


_BITS = (16, *QUANTIZED_BITS)
UNQUANTIZED = Precision(16, 16)
TierRow = tuple[tuple[Precision, float], ...]  # precisions, best first, and their shares of the bytes


@dataclass(frozen=True)
class TierTable:
    """The best split of bytes among precisions, by budget.

    Attributes:
        rows: (minimum bits a value over all k and v of a text, split), sorted by the minimum.
    """

    rows: tuple[tuple[float, TierRow], ...]

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """All precisions, best first, unquantised entries included."""
        named = {precision for _, row in self.rows for precision, _ in row} | {UNQUANTIZED}
        return tuple(sorted(named, key=lambda precision: precision.rank))

    def row(self, bits: float) -> TierRow:
        """Return the split for `bits` a value."""
        fitting = [row for least, row in self.rows if least <= bits]
        return fitting[-1] if fitting else self.rows[0][1]

    @classmethod
    def single(cls, precision: Precision) -> "TierTable":
        """Return a table with one precision for all entries."""
        return cls(((0.0, ((precision, 1.0),)),))

    def to_json(self) -> list[Any]:
        """Return the table as in policy cards: rows [bits a value, [[k bits, v bits, share of bytes], ...]]."""
        return [[least, [[each.key_bits, each.value_bits, share] for each, share in row]] for least, row in self.rows]

    @classmethod
    def from_json(cls, rows: Any) -> "TierTable":
        """Parse the result of `to_json`. Raises PolicyFileError if it is invalid."""
        try:
            table = cls(tuple((float(b), tuple((Precision(k, v), float(s)) for k, v, s in row)) for b, row in rows))
            starts = [least for least, _ in table.rows]
            fits = starts[0] == 0 and starts == sorted(starts) and all(_is_row(row) for _, row in table.rows)
        except (TypeError, ValueError, IndexError, OverflowError):
            fits = False
        if not fits:
            raise PolicyFileError(
                f"the policy's table of precisions is {str(rows)[:200]}, which this version does not know; update "
                "lkv-cache, or give a retention instead of memory."
            )
        return table


def _is_row(row: TierRow) -> bool:
    """Return whether a row has one or two distinct supported precisions, best first, with shares that sum to 1."""
    ranks = [each.rank for each, _ in row]  # raises ValueError for other bits
    return (
        all(type(bits) is int and bits < 16 for each, _ in row for bits in (each.key_bits, each.value_bits))
        and 0 < len(ranks) <= 2
        and ranks == sorted(set(ranks))
        and all(share > 0 for _, share in row)
        and abs(sum(share for _, share in row) - 1) < 1e-6
    )


# Measured on held-out training text with two models (`dev/LOG.md`): small budgets favour many entries in few bits.
DEFAULT_TABLE = TierTable(
    (
        (0.0, ((Precision(8, 4), 0.3), (Precision(4, 3), 0.7))),
        (2.2, ((Precision(8, 8), 0.3), (Precision(4, 4), 0.7))),
    )
)


@dataclass(frozen=True)
class KVShape:
    """The dimensions that determine the bytes of a full cache.

    Attributes:
        heads: KV heads of all layers with eviction, in this process.
        head_dim: Channels of k, and of v.
        itemsize: Bytes of a value in the model's dtype.
        extra_bits: Bits of each entry in addition to k and v.
        free_slots: Free slots of each head that count in a memory budget, at most an eighth of it.
    """

    heads: int
    head_dim: int
    itemsize: int
    extra_bits: int = 0
    free_slots: int = 0

    def entry_bits(self, precision: Precision = UNQUANTIZED) -> int:
        """Return the bits of one entry of one head."""
        if not precision.is_quantized:
            return 16 * self.itemsize * self.head_dim + self.extra_bits
        return (abs(precision.key_bits) + abs(precision.value_bits)) * self.head_dim + 2 * NORM_BITS + self.extra_bits

    def reference_nbytes(self, tokens: int) -> int:
        """Return the bytes of the full cache of a text in 16 bits a value, of which memory shares are parts."""
        return 2 * REFERENCE_ITEMSIZE * self.head_dim * self.heads * tokens

    @property
    def basis_bits(self) -> int:
        """Return the bits shared by all quantised entries of a head."""
        return BASIS_BITS * self.head_dim


@dataclass(frozen=True, kw_only=True)
class TierTarget(RetentionTarget):
    """The share of a text's tokens in one tier and all better ones, within a memory budget.

    Attributes:
        memory: The budget.
        shape: The dimensions of the cache.
        table: The split of the budget among precisions.
        precision: The tier's precision.
    """

    memory: MemoryTarget
    shape: KVShape
    table: TierTable
    precision: Precision

    @classmethod
    def of_table(cls, memory: MemoryTarget, shape: KVShape, table: TierTable, protected: int = 0) -> list["TierTarget"]:
        """Return the targets of all precisions of `table`, best first; arguments as the attributes."""
        return [
            cls(memory=memory, shape=shape, table=table, precision=precision, protected=protected)
            for precision in table.precisions
        ]

    def share(self, tokens: int) -> float:
        """Return the fraction of a text's `tokens` unprotected tokens in these tiers, in [0, 1]."""
        return self.shares(tokens)[self.precision]

    def total_share(self, tokens: int) -> float:
        """Return the fraction of tokens in all tiers."""
        return self.shares(tokens)[self.table.precisions[-1]]

    def protected_entries(self, tokens: int) -> int:
        """As in `RetentionTarget`; all or none, because protected entries use the best precision."""
        best, _ = self._spend(tokens)
        precisions = self.table.precisions
        return self.protected if precisions.index(self.precision) >= precisions.index(best) else 0

    def shares(self, tokens: int) -> dict[Precision, float]:
        """Return the fraction of the unprotected text, cumulative over the precisions from the best on."""
        _, fractions = self._spend(tokens)
        precisions = self.table.precisions
        totals = itertools.accumulate(fractions.get(precision, 0.0) for precision in precisions)
        return {precision: min(1.0, total) for precision, total in zip(precisions, totals, strict=True)}

    def free_slots(self, tokens: int) -> int:
        """Return the free slots of each head that the budget of `tokens` tokens pays for."""
        return min(self.shape.free_slots, int(self._bits(tokens) / 8 / self.shape.entry_bits()))

    def least_nbytes(self) -> int:
        """Return the bytes with which heads keep one entry on average, whatever the length of the text."""
        entries_per_bit = sum(part / self.shape.entry_bits(precision) for precision, part in self.table.row(0.0))
        return math.ceil(self.shape.heads * (self.shape.basis_bits + 1 / entries_per_bit) / 8)

    def _bits(self, tokens: int) -> float:
        """Return the budget of `tokens` tokens in bits a head."""
        memory, shape = self.memory, self.shape
        nbytes = memory.nbytes or 0 if memory.share is None else memory.share * shape.reference_nbytes(tokens)
        return 8 * nbytes / max(1, shape.heads)

    def _spend(self, tokens: int) -> tuple[Precision, dict[Precision, float]]:
        """Return the best precision in use, and the fraction of the unprotected text in each precision."""
        shape, precisions = self.shape, self.table.precisions
        whole = max(1, tokens + self.protected)
        bits = self._bits(whole) - self.free_slots(whole) * shape.entry_bits()
        if bits >= whole * shape.entry_bits():
            return precisions[0], {precisions[0]: 1.0}
        bits = max(0.0, bits - shape.basis_bits)
        row = self.table.row(bits / whole / (2 * shape.head_dim))
        fractions = self._fractions(bits / whole, row)
        best = next((each for each in precisions if fractions.get(each, 0) > 0), precisions[0])
        if self.protected:
            # The rest of the text gets the remaining bits, in the precisions chosen for the whole text.
            rest = max(0.0, bits - self.protected * shape.entry_bits(best))
            fractions = self._fractions(rest / max(1, tokens), row)
        return best, fractions

    def _fractions(self, bits: float, row: TierRow) -> dict[Precision, float]:
        """Return the fraction of a text in each precision, for `bits` a token and head split by `row`."""
        fractions = {precision: part * bits / self.shape.entry_bits(precision) for precision, part in row}
        if sum(fractions.values()) <= 1:
            return fractions
        # The whole text is kept, in two neighbouring precisions.
        ladder = [UNQUANTIZED, *(precision for precision in fractions if precision.is_quantized)]
        for better, worse in itertools.pairwise(ladder):
            high, low = self.shape.entry_bits(better), self.shape.entry_bits(worse)
            if bits >= low:
                part = min(1.0, (bits - low) / (high - low))
                return {better: part, worse: 1 - part}
        return {ladder[-1]: 1.0}

    def __str__(self) -> str:
        return str(self.memory)
