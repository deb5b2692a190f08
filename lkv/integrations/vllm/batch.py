"""LKV's part of a forward pass of vLLM's worker: tokens that follow a context, and texts to compress."""

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lkv.context.context import Context
from lkv.errors import ContextFileError, LkvError
from lkv.integrations.vllm.contexts import Compression, NewContext, VllmContexts, open_contexts
from lkv.kernels.ragged_attention import merge_attention

CONTEXT, COMPRESS = "lkv_context", "lkv_compress"  # keys of SamplingParams.extra_args
BATCH_KEY = "lkv"  # of the forward context's additional arguments
_WORK = "_lkv_work"
_LOG = logging.getLogger("vllm.lkv")


@dataclass
class RequestWork:
    """The state of one request in the worker; lives as long as vLLM's state of the request."""

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
        lost_tokens: New tokens of requests whose context cannot be loaded any more.
        total_heads: KV heads of all ranks of tensor parallelism.
    """

    total_heads: int
    rows: list[Row] = field(default_factory=list)
    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    groups: list[tuple[Context, Tensor, slice]] = field(default_factory=list)
    compressions: list[tuple[Row, RequestWork, Any]] = field(default_factory=list)
    lost_tokens: list[slice] = field(default_factory=list)
    work: dict[Any, Any] = field(default_factory=dict)  # of the backend, for all layers of the pass

    @classmethod
    def plan(cls, runner: Any) -> "Batch | None":
        """Plan LKV's part of the pass that `runner` has prepared; None if no request involves LKV."""
        batch, starts = runner.input_batch, runner.query_start_loc.np
        followers: dict[int, tuple[Context, list[Row]]] = {}
        compressions, lost_tokens = [], []
        for index, request in enumerate(batch.req_ids):
            state = runner.requests[request]
            work = _request_work(runner, state)
            if work is None:
                continue
            start, stop = int(starts[index]), int(starts[index + 1])
            row = Row(index, start, stop, int(batch.num_computed_tokens_cpu[index]) + stop - start)
            if work.context is not None:
                followers.setdefault(id(work.context), (work.context, []))[1].append(row)
            elif work.new_context is None:
                lost_tokens.append(slice(start, stop))
            elif row.length - row.tokens < state.num_prompt_tokens <= row.length:
                compressions.append((row, work, state))
        if not followers and not compressions and not lost_tokens:
            return None
        total_heads = runner.model_config.get_total_num_kv_heads()
        planned = cls(total_heads, compressions=compressions, lost_tokens=lost_tokens)
        for _, work, _ in compressions:
            work.compression = _start_compression(runner, work.new_context)
        planned.add_followers(followers, runner.device)
        return planned

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

    def finish(self, hidden: Tensor) -> None:
        """Store the complete contexts; `hidden` [N, .] is the output of the model.

        Requests whose context was lost return filler tokens, so that the error is visible.
        """
        for tokens in self.lost_tokens:
            hidden[tokens] = 0
        for _, work, state in self.compressions:
            compression, work.compression = work.compression, None
            if compression is not None:
                compression.store_in_background(list(state.prompt_token_ids))


def worker_contexts(runner: Any) -> VllmContexts:
    """Return the contexts of a worker."""
    return open_contexts(runner, runner.vllm_config, runner.device)


def _request_work(runner: Any, state: Any) -> RequestWork | None:
    """Return the work of a request, cached with vLLM's state of it; None for requests without LKV."""
    args = state.sampling_params.extra_args if state.sampling_params is not None else None
    if not args or (CONTEXT not in args and COMPRESS not in args):
        return None
    work = getattr(state, _WORK, None)
    if work is None:
        work = RequestWork()
        try:
            if CONTEXT in args:
                work.context = _load_context(runner, state, args[CONTEXT])
            else:
                work.new_context = NewContext.parse(args[COMPRESS])
        except LkvError as error:  # checked by the front end; since then its file was damaged or deleted
            _LOG.error("request %s gets no answer: %s", state.req_id, error)
        setattr(state, _WORK, work)
    return work


def _load_context(runner: Any, state: Any, name: str) -> Context:
    """Return the context of a request. Raises LkvError for one that is lost, or not the one that was checked."""
    contexts = worker_contexts(runner)
    context = contexts.store.get(name)
    # Rotary embeddings are looked up without a check.
    if context.tokens + state.num_prompt_tokens + state.sampling_params.max_tokens > contexts.max_positions + 1:
        raise ContextFileError(f"the context {name!r} has become longer; ask it again.")
    keep_heads(context, local_heads(runner))
    return context


def _start_compression(runner: Any, new_context: NewContext | None) -> Compression | None:
    """Return a compression, in the rank that writes files; the others only send it their heads."""
    from vllm.distributed import get_tensor_model_parallel_rank

    if new_context is None or get_tensor_model_parallel_rank() != 0:
        return None
    try:
        return Compression(worker_contexts(runner), new_context)
    except Exception:  # other requests are answered; the client learns that there is no context
        _LOG.exception("a text could not be compressed")
        return None


def local_heads(runner: Any) -> slice:
    """Return the KV heads that this rank of tensor parallelism computes."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    config = runner.model_config
    first = get_tensor_model_parallel_rank() * config.get_total_num_kv_heads() // get_tensor_model_parallel_world_size()
    return slice(first, first + config.get_num_kv_heads(runner.parallel_config))


def keep_heads(context: Context, heads: slice) -> None:
    """Drop the entries of all other KV heads, which other ranks have, unless they were dropped before."""
    cache: Any = context.cache
    for layer in cache.ragged_layers:
        if layer.store.lens.shape[1] > heads.stop - heads.start:
            layer.store = layer.store.select_heads(heads)


def gather_heads(x: Tensor, total: int) -> Tensor:
    """Return k or v [H, T, d] of all `total` KV heads, from the heads of each rank of tensor parallelism."""
    from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather

    size = get_tensor_model_parallel_world_size()
    if size == 1:
        return x
    gathered = tensor_model_parallel_all_gather(x.contiguous(), dim=0)
    return gathered[:: len(gathered) // total]  # fewer heads than ranks: some ranks have the same one
