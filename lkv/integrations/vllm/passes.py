"""LKV's part of a forward pass of vLLM's worker: tokens that follow a context, and texts to compress.

It is the same for both of vLLM's model runners (`worker.py`).
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lkv.context.context import Context
from lkv.errors import ContextFileError, LkvError
from lkv.integrations.vllm.contexts import COMPRESS, CONTEXT, Compression, NewContext, VllmContexts
from lkv.kernels.ragged_attention import merge_attention
from lkv.utils.devices import copy_to_device

if TYPE_CHECKING:
    import numpy as np
    from vllm import SamplingParams
    from vllm.config import VllmConfig

_BATCH = "_lkv_batch"  # attribute of attention metadata
_LOG = logging.getLogger("vllm.lkv")


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
    def of_request(cls, index: int, starts: "np.ndarray", computed: "np.ndarray") -> "Row":
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
        groups: Each context and the indices of its tokens in `tokens`: all queries of a context attend at once.
        compressions: Texts whose last token is read in this pass.
        total_heads: KV heads of all ranks of tensor parallelism.
    """

    total_heads: int
    rows: list[Row] = field(default_factory=list)
    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    groups: list[tuple[Context, slice]] = field(default_factory=list)
    compressions: list[tuple[Row, RequestWork]] = field(default_factory=list)
    work: dict[Any, Any] = field(default_factory=dict)  # of the backend, for all layers of the pass

    def add_followers(self, followers: dict[int, tuple[Context, list[Row]]], device: torch.device) -> None:
        """Add the rows that follow each context."""
        places: list[int] = []
        for context, rows in followers.values():
            first = len(places)
            for row in rows:
                self.rows.append(Row(row.index, row.start, row.stop, row.length, len(places)))
                places += range(row.start, row.stop)
            self.groups.append((context, slice(first, len(places))))
        self.tokens = copy_to_device(torch.tensor(places, dtype=torch.long, device="cpu"), device)

    def shift(self, positions: Tensor, sign: int = 1) -> None:
        """Move the positions of questions behind their contexts, in place; `sign` -1 moves them back."""
        for context, columns in self.groups:
            positions[self.tokens[columns]] += sign * context.tokens

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
        for context, columns in self.groups:
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


def attached_batch(metadata: object) -> Batch | None:
    """Return the part of LKV in the pass whose attention has this metadata."""
    return getattr(metadata, _BATCH, None)


class ContextPasses:
    """Opens requests, plans passes and finishes them; positions are shifted and pages read by the `Batch` of a pass."""

    def __init__(self, vllm_config: "VllmConfig", device: torch.device):
        self._config, self._device = vllm_config, device
        self._lost_requests: dict[str, int] = {}

    @cached_property
    def contexts(self) -> VllmContexts:
        """The contexts of this worker, opened by the first request about one."""
        return VllmContexts(self._config, self._device)

    def open_request(
        self, name: str, prompt_ids: list[int] | None, params: "SamplingParams | None"
    ) -> RequestWork | None:
        """Return the work of a request, whose context is loaded; None for requests without LKV.

        Args:
            name: The request's id.
            prompt_ids: The tokens of its prompt.
            params: Its sampling parameters, if it has any.
        """
        extra = {} if params is None else params.extra_args or {}
        if params is None or not {CONTEXT, COMPRESS} & extra.keys():
            return None
        work = RequestWork(prompt_ids or [])
        try:
            if CONTEXT in extra:
                work.context = self._load_context(extra[CONTEXT], len(work.prompt_ids) + params.max_tokens)
            else:
                work.new_context = NewContext.parse(extra[COMPRESS])
        except LkvError as error:  # checked by the front end; since then its file was damaged or deleted
            _LOG.error("request %s ends with an error: %s", name, error)
        except Exception:  # such as those of remote stores; other requests are answered
            _LOG.exception("request %s ends with an error", name)
        if CONTEXT in extra and _any_rank(work.context is None):
            work.context = None
        return work

    def _load_context(self, name: str, tokens: int) -> Context:
        """Return a context. Raises LkvError for one that is lost, or leaves no room for `tokens` after it."""
        context = self.contexts.store.get(name)
        # Rotary embeddings are looked up without a check.
        if context.tokens + tokens > self.contexts.max_positions + 1:
            raise ContextFileError(f"the context {name!r} has become longer; ask it again.")
        _keep_heads(context, _local_heads(self._config))
        return context

    def plan(self, requests: Iterable[tuple[str, RequestWork, Row]]) -> Batch | None:
        """Plan a pass over these requests (ids, work, new tokens); None if it is vLLM's alone."""
        followers: dict[int, tuple[Context, list[Row]]] = {}
        compressions = []
        for name, work, row in requests:
            if work.context is not None:
                followers.setdefault(id(work.context), (work.context, []))[1].append(row)
            elif work.new_context is None:
                self._lost_requests[name] = row.length - row.tokens
            elif row.length - row.tokens < len(work.prompt_ids) <= row.length:
                compressions.append((row, work))
        if not followers and not compressions:
            return None
        batch = Batch(self._config.model_config.get_total_num_kv_heads(), compressions=compressions)
        for _, work in compressions:
            work.compression = self._start_compression(work.new_context)
        batch.add_followers(followers, self._device)
        return batch

    def _start_compression(self, new_context: NewContext | None) -> Compression | None:
        if new_context is None or not _is_writer():
            return None
        try:
            return Compression(self.contexts, new_context)
        except Exception:  # other requests are answered; the client learns that there is no context
            _LOG.exception("a text could not be compressed")
            return None

    def finish(self, batch: Batch) -> None:
        """Store the contexts that are complete after a pass."""
        for _, work in batch.compressions:
            compression, work.compression = work.compression, None
            if compression is not None:
                compression.store_in_background(list(work.prompt_ids))

    def take_lost_requests(self) -> dict[str, int]:
        """Return the requests of the last pass whose context was lost, and how many of their tokens were right."""
        lost, self._lost_requests = self._lost_requests, {}
        return lost


def _is_writer() -> bool:
    """Return whether this rank compresses texts and writes files; the others only send it their heads."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank() == 0


def _any_rank(value: bool) -> bool:
    """Return whether `value` is true in any rank; all ranks must call this."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return value
    flag = torch.tensor([value], dtype=torch.int32, device="cpu")
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return bool(flag.item())


def _local_heads(vllm_config: "VllmConfig") -> slice:
    """Return the KV heads that this rank computes."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    config = vllm_config.model_config
    first = get_tensor_model_parallel_rank() * config.get_total_num_kv_heads() // get_tensor_model_parallel_world_size()
    return slice(first, first + config.get_num_kv_heads(vllm_config.parallel_config))


def _keep_heads(context: Context, heads: slice) -> None:
    """Drop the entries of all other KV heads, which other ranks have, unless they were dropped before."""
    cache: Any = context.cache
    for layer in cache.ragged_layers:
        if layer.store.lens.shape[1] > heads.stop - heads.start:
            layer.store = layer.store.select_heads(heads)


def gather_heads(x: Tensor, total: int) -> Tensor:
    """Return k or v [H, T, d] of all `total` KV heads, from the heads of each rank."""
    from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather

    size = get_tensor_model_parallel_world_size()
    if size == 1:
        return x
    gathered = tensor_model_parallel_all_gather(x.contiguous(), dim=0)
    return gathered[:: len(gathered) // total]  # fewer heads than ranks: some ranks have the same one
