"""The tokens that follow what is settled: as many for all rows of a batch, but for padding."""

import torch
from torch import Tensor
from torch.nn.functional import pad


class Tail:
    """`tokens` after what is settled, appended to every row that they are no padding of.

    `padding` [B, k] (bool, on the CPU) marks those of the first k tokens that are; None where no row has any.
    """

    def __init__(self, tokens: int = 0, padding: Tensor | None = None):
        self.tokens, self.padding = tokens, padding

    @property
    def appended(self) -> Tensor | int:
        """Entries of each row [B, 1] (on the CPU), or one number where all rows have as many."""
        return self.tokens if self.padding is None else self.tokens - self.padding.sum(1, keepdim=True)

    def grow(self, tokens: int, padding: Tensor | None = None) -> None:
        """`tokens` more, of which some are `padding` [B, tokens]."""
        if padding is not None:
            self.padding = torch.cat([self.marks(len(padding)), padding], 1)
        self.tokens += tokens

    def cut(self, tokens: int) -> None:
        """Forget the last `tokens` of them."""
        self.tokens -= tokens
        if self.padding is not None:
            self.padding = self.padding[:, : self.tokens]

    def select(self, rows: Tensor) -> "Tail":
        """Of the batch rows `rows` [n]."""
        return Tail(self.tokens, None if self.padding is None else self.padding[rows])

    def marks(self, rows: int) -> Tensor:
        """Which of all tokens are padding, for each of `rows` rows: [B, tokens]."""
        if self.padding is None:
            return torch.zeros(rows, self.tokens, dtype=torch.bool, device="cpu")
        return pad(self.padding, (0, self.tokens - self.padding.shape[1]))
