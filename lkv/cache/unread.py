"""What was read of a prompt that comes in parts, until it has ended."""

import torch
from torch import Tensor

from lkv.integrations.transformers.prefill import LayerKV


class PromptBuffer:
    """One layer's k and v, and its queries where its method reads them, of the parts so far: `parts`, None between
    prompts."""

    def __init__(self, parts: LayerKV | None = None):
        self.parts = parts

    def __bool__(self) -> bool:
        return self.parts is not None

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return 0 if self.parts is None else self.parts.key.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens read so far."""
        return 0 if self.parts is None else self.parts.key.shape[2]

    def with_new(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of the parts and of the next one."""
        if self.parts is None:
            return key, value
        return torch.cat([self.parts.key, key], 2), torch.cat([self.parts.value, value], 2)

    def queries_with(self, query: Tensor) -> Tensor:
        """The queries of the parts and those of the next one."""
        query = query.detach()
        if self.parts is None or self.parts.queries is None:
            return query
        return torch.cat([self.parts.queries, query], 2)

    def select(self, rows: Tensor) -> "PromptBuffer":
        """The batch rows `rows` [n]."""
        return PromptBuffer(None if self.parts is None else self.parts.select(rows, slice(None)))

    def nbytes(self, queries: bool = True) -> int:
        """Bytes of k and v, with those of the queries or without."""
        if self.parts is None:
            return 0
        held = [self.parts.key, self.parts.value]
        if queries and self.parts.queries is not None:
            held.append(self.parts.queries)
        return sum(x.untyped_storage().nbytes() for x in held)
