"""LKV's part of a forward pass of vLLM's worker: tokens that follow a context, and texts to compress."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lkv.context.context import Context
from lkv.integrations.vllm.contexts import Compression, NewContext
from lkv.kernels.ragged_attention import merge_attention

CONTEXT, COMPRESS = "lkv_context", "lkv_compress"  # keys of SamplingParams.extra_args
_BATCH = "_lkv_batch"  # attribute of attention metadata


@dataclass
class RequestWork:
    """LKV's state of one request in a worker.

    Attributes:
        prompt_ids: The tokens of its prompt.
        context: The context that it asks about.
        new_context: Or the text that it compresses; a request with neither has lost its context.
        compression: The running compression, in the rank that writes files.
    """

    prompt_ids: list[int]
    context: Context | None = None
    new_context: NewContext | None = None
    compression: Compression | None = None


@dataclass(frozen=True)
class Row:
    """The new tokens `start` to `stop` of request number `index` in a pass, which has `length` tokens in pages.

    `column` is the first of them among all tokens that follow contexts.
    """

    index: int
    start: int
    stop: int
    length: int
    column: int = 0

    @classmethod
    def of_request(cls, index: int, starts: Any, computed: Any) -> "Row":
        """Return the row of request number `index`.

        `starts` [requests + 1] are the first new tokens of all requests, `computed` [requests] their tokens in pages.
        """
        start, stop = int(starts[index]), int(starts[index + 1])
        return cls(index, start, stop, int(computed[index]) + stop - start)

    @property
    def tokens(self) -> int:
        """New tokens."""
        return self.stop - self.start


@dataclass
class Batch:
    """The requests of one forward pass that involve LKV.

    Attributes:
        rows: Those that follow contexts, in the order of `tokens`.
        tokens: The places of their new tokens in the pass.
        groups: The tokens of each context and their indices in `tokens`: all queries of a context attend at once.
        compressions: Texts whose last token is read in this pass.
        total_heads: KV heads of all ranks of tensor parallelism.
    """

    total_heads: int
    rows: list[Row] = field(default_factory=list)
    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    groups: list[tuple[Context, Tensor, slice]] = field(default_factory=list)
    compressions: list[tuple[Row, RequestWork]] = field(default_factory=list)
    work: dict[Any, Any] = field(default_factory=dict)  # of the backend, for all layers of the pass

    def add_followers(self, followers: dict[int, tuple[Context, list[Row]]], device: torch.device) -> None:
        """Add the rows that follow each context."""
        column = 0
        places: list[Tensor] = []
        for context, rows in followers.values():
            tokens = torch.cat([torch.arange(row.start, row.stop) for row in rows]).to(device)
            self.groups.append((context, tokens, slice(column, column + len(tokens))))
            places.append(tokens)
            for row in rows:
                self.rows.append(Row(row.index, row.start, row.stop, row.length, column))
                column += row.tokens
        if places:
            self.tokens = torch.cat(places)

    def shift(self, positions: Tensor, sign: int = 1) -> None:
        """Move the positions of questions behind their contexts, in place; `sign` -1 moves them back."""
        for context, tokens, _ in self.groups:
            positions[tokens] += sign * context.tokens

    def add_contexts(self, layer: int, query: Tensor, output: Tensor, lse: Tensor, scale: float) -> None:
        """Complete the attention of tokens that follow contexts, in place.

        Args:
            layer: The layer's number.
            query: The queries [N, Hq, d] of all tokens of the pass.
            output: Their attention over pages [N, Hq, d], to which that over contexts is added.
            lse: The log-sum-exp [Hq, n] of attention over pages, for `self.tokens`.
            scale: The scale of attention scores.
        """
        rows, parts = query[self.tokens].transpose(0, 1)[None], []
        for context, _, columns in self.groups:
            cache: Any = context.cache
            # One call for all requests that ask a context: its entries are read once.
            part = rows[:, :, columns].contiguous()
            parts.append(cache.ragged_layers[layer].store.attend_compressed(part, scale))
        over_contexts, context_lse = (torch.cat(pieces, 2) for pieces in zip(*parts, strict=True))
        over_pages = output[self.tokens].transpose(0, 1)[None]
        merged, _ = merge_attention(over_pages, lse[None], over_contexts, context_lse)
        output[self.tokens] = merged[0].transpose(0, 1).to(output.dtype)


def attach_batch(batch: Batch | None, attn_metadata: dict[str, Any]) -> None:
    """Give a pass's attention metadata [by layer] LKV's part of the pass, if it has one."""
    for metadata in attn_metadata.values():
        setattr(metadata, _BATCH, batch)


def attached_batch(metadata: Any) -> Batch | None:
    """Return the part of LKV in the pass whose attention has this metadata."""
    return getattr(metadata, _BATCH, None)
