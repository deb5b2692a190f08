"""Positions after a prompt with images, in models with multimodal RoPE (M-RoPE).

The tokens of an image share positions there, so the position after a prompt is not its number of tokens. transformers
keeps the difference in the model (`rope_deltas`), for the text that the model read last. LKV keeps it in each cache,
because several caches continue in turn.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class ImageOffset:
    """How far the tokens after a prompt with images are from the positions that their numbers suggest.

    Attributes:
        offset: Position minus number of the token after the prompt, padding counted, [B, 1].
        tokens: The tokens of the prompt, padding included.
    """

    offset: Tensor
    tokens: int

    @classmethod
    def of_prompt(cls, positions: Tensor) -> "ImageOffset":
        """Return the offset after a prompt at `positions` [3, B, T]."""
        tokens = positions.shape[-1]
        return cls(positions.amax((0, 2))[:, None] + 1 - tokens, tokens)

    def select(self, rows: Tensor) -> "ImageOffset":
        """Return the offsets of the batch rows `rows` [n], in that order."""
        return replace(self, offset=self.offset[rows.to(self.offset.device)])


def following_positions(offset: ImageOffset | None, mask: Tensor | None, start: int, like: Tensor) -> Tensor:
    """Return the positions [B, n] of new tokens.

    Args:
        offset: The offset of their cache; None without images.
        mask: The attention mask [B, start + n]; None without padding.
        start: The number of tokens before them, padding included.
        like: Their ids, [B, n].
    """
    if mask is None:
        positions = torch.arange(start, start + like.shape[1], device=like.device)[None]
    else:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -like.shape[1] :]
    if offset is not None:
        positions = positions + offset.offset.to(like.device)
        if mask is not None:
            positions = positions + (offset.tokens - mask[:, : offset.tokens].long().sum(-1, keepdim=True))
    return positions.expand(like.shape[0], -1)
