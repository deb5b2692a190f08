"""The token ids that a cache has read, where `generate` announced them."""

import torch
from torch import Tensor

from lkv.errors import CacheError


class TokenHistory:
    """The ids of the tokens that a cache has read, where `generate` announced them."""

    def __init__(self) -> None:
        self.ids: Tensor | None = None  # [B, k] of the first k tokens
        self._announced: Tensor | None = None
        self._only_chunks = False  # whether all that was read came as chunks of one prompt

    def continues_chunks(self, length: int, is_chunk: bool) -> bool:
        """Whether a chunk comes after others of the same prompt, which have `length` tokens together."""
        had_chunks = self._only_chunks and length > 0
        self._only_chunks = is_chunk and (self._only_chunks or not length)
        return is_chunk and had_chunks

    def announce(self, ids: Tensor, length: int, is_full: bool, is_first_step: bool) -> None:
        """Take the ids that come after `length` tokens; for the arguments see `BaseCache.announce_inputs`.

        Raises CacheError for ids that do not begin with those read, or that contain nothing new.
        """
        read = self.ids
        if read is not None and len(read) != len(ids):
            read = None
        if not is_full:
            is_complete = read is not None and read.shape[1] == length
            self._announced = torch.cat([read, ids.to(read.device)], 1) if read is not None and is_complete else None
            return
        if length and ids.shape[1] <= length:
            raise CacheError(
                f"this cache has read {length} tokens, but the ids given are {ids.shape[1]}: give all that it has read "
                "followed by new ones, or make a new cache (or reset() this one) for another prompt."
            )
        if is_first_step and read is not None:
            common = min(length, read.shape[1])
            if not torch.equal(read[:, :common], ids[:, :common].to(read.device)):
                raise CacheError(
                    "the ids given do not begin with those that this cache has read; for another prompt make a new "
                    "cache, or reset() this one."
                )
        self._announced = ids

    def read(self, length: int, tokens: int) -> None:
        """Record the announced ids as read, from `length` tokens on up to `tokens`; ids they replace are forgotten."""
        announced, self._announced = self._announced, None
        if announced is not None and announced.shape[1] == tokens:
            self.ids = announced
        elif self.ids is not None:
            self.ids = self.ids[:, :length]

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` [n], in that order."""
        if self.ids is not None:
            self.ids = self.ids[rows.to(self.ids.device)]
