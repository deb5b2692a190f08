"""How much of the cache to keep. Does not import torch."""

import re
from dataclasses import dataclass

from lkv.errors import RetentionError

_BYTE_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_MEMORY_HELP = "give a share of the full cache in (0, 1] such as 0.1 or '10%', or bytes such as '200MB'"


@dataclass(frozen=True)
class MemoryTarget:
    """How many bytes k and v may take: a share of the full cache in the model's dtype, or a number of bytes."""

    share: float | None = None
    nbytes: int | None = None

    @classmethod
    def parse(cls, value: float | int | str) -> "MemoryTarget":
        """Read 0.1, "10%", 200_000_000 or "200MB". Raises RetentionError for anything else."""
        number: float | None = None if isinstance(value, bool | str) or not isinstance(value, int | float) else value
        unit = None
        if isinstance(value, str) and (
            match := re.fullmatch(r"\s*([0-9.]+(?:e-[0-9]+)?)\s*(?:(%)|([kmg]i?)?(b?))\s*", value.lower())
        ):
            try:
                number = float(match[1]) / 100 if match[2] else float(match[1]) * _BYTE_UNITS[match[3] or ""]
            except ValueError:
                number = None
            unit = "%" if match[2] else (match[3] or "") + match[4]
        if number is None or not number > 0:
            raise RetentionError(f"memory is {value!r}; {_MEMORY_HELP}.")
        if number <= 1 and not (unit and unit != "%"):
            return cls(share=float(number))
        is_whole = isinstance(value, int) if unit is None else unit or number % 1 == 0
        if unit == "%" or not 1 <= number < 2**60 or not is_whole:
            raise RetentionError(
                f"memory is {value!r}, more than the full cache or no number of bytes; {_MEMORY_HELP}."
            )
        if number <= 100 and not unit:  # a percentage without its sign
            raise RetentionError(f"memory is {value!r}, which would be bytes; {_MEMORY_HELP}.")
        return cls(nbytes=int(number))

    def share_of(self, full: float) -> float:
        """The share of a full cache of `full` bytes."""
        return self.share if self.share is not None else (self.nbytes or 0) / full

    def __str__(self) -> str:
        return f"memory {self.share:.4g}" if self.share is not None else f"memory {self.nbytes} bytes"
