"""Which ids a cache has read: what it is fed next must begin with them."""

import torch
from torch import Tensor

from lkv.errors import CacheError


class TokenHistory:
    """Ids [B, k] of the first k tokens that were read, where they are known, and those that are about to be fed."""

    def __init__(self) -> None:
        self.known: Tensor | None = None
        self._coming: Tensor | None = None
        self._in_parts = False  # whether all that was read came as parts of one prompt

    def goes_on(self, held: int, part: bool) -> bool:
        """Whether what comes after `held` tokens, which may be a `part` of a prompt, follows other parts of it."""
        begun, self._in_parts = self._in_parts and held > 0, part and (self._in_parts or not held)
        return part and begun

    def expect(self, ids: Tensor, held: int, whole: bool, begins: bool) -> None:
        """What is about to be fed after `held` tokens, compared with what was read where both are known; `whole`: all
        of it and not the new part alone; `begins`: as a turn begins.

        Raises CacheError for ids that do not begin with those read, or hold nothing new.
        """
        known = self.known
        if not whole:
            complete = known is not None and known.shape[1] == held and len(known) == len(ids)
            self._coming = torch.cat([known, ids.to(known.device)], 1) if known is not None and complete else None
            return
        if held and ids.shape[1] <= held:
            raise CacheError(
                f"this cache has read {held} tokens, but the ids given are {ids.shape[1]}: give all that it has read "
                "and new ones behind them, or make a new cache (or reset() this one) for another prompt."
            )
        if begins and known is not None and len(known) == len(ids):
            common = min(held, known.shape[1])
            if not torch.equal(known[:, :common], ids[:, :common].to(known.device)):
                raise CacheError(
                    "the ids given do not begin with those that this cache has read; for another prompt make a new "
                    "cache, or reset() this one."
                )
        self._coming = ids

    def read(self, held: int, tokens: int) -> None:
        """Note the ids of what is read now, from `held` tokens on to `tokens`, or forget those that it replaces."""
        coming, self._coming = self._coming, None
        if coming is not None and coming.shape[1] == tokens:
            self.known = coming
        elif self.known is not None:
            self.known = self.known[:, :held]

    def take(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` [n], in that order."""
        if self.known is not None:
            self.known = self.known[rows.to(self.known.device)]

    def repeat(self, repeats: int) -> None:
        """Make `repeats` copies of each row."""
        if self.known is not None:
            self.known = self.known.repeat_interleave(repeats, 0)
