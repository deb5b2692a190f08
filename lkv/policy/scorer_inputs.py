"""The inputs of LKV-T. Does not import torch."""

from dataclasses import dataclass

SCORER_KEYS = ("cached", "unrotated")
SCORER_ATTENTION = ("none", "learned")
MAX_KNOTS = 32


@dataclass(frozen=True)
class ScorerInputs:
    """The inputs of LKV-T; stored in the policy's file.

    Args:
        key: The form of k: "cached" (after RoPE, as in the paper) or "unrotated".
        attention: "learned" adds a component for the expected attention of future queries.
        knots: Number of knots of the position component (knot j lies at 2^j tokens), 0 for none.
    """

    key: str = "cached"
    attention: str = "none"
    knots: int = 0

    def __post_init__(self) -> None:
        for name, choices in (("key", SCORER_KEYS), ("attention", SCORER_ATTENTION)):
            if getattr(self, name) not in choices:
                value = str(getattr(self, name))[:80]
                raise ValueError(f"{name} is {value!r}, but this version reads {', '.join(choices)}")
        if not isinstance(self.knots, int) or not 0 <= self.knots <= MAX_KNOTS:
            raise ValueError(f"knots is {self.knots!r}, but must be a whole number from 0 to {MAX_KNOTS}")

    @property
    def is_paper(self) -> bool:
        """Whether they are the paper's: only cached k and v."""
        return self == ScorerInputs()


def num_knots(tokens: int) -> int:
    """Return how many knots the position component needs for texts of up to `tokens` tokens."""
    return (tokens - 1).bit_length() + 1
