"""LKV's part of a worker's forward passes, the same for both of vLLM's model runners (`runners.py`)."""

import logging
from collections.abc import Iterable
from typing import Any

import torch

from lkv.context.context import Context
from lkv.errors import ContextFileError, LkvError
from lkv.integrations.vllm.batch import COMPRESS, CONTEXT, Batch, RequestWork, Row
from lkv.integrations.vllm.contexts import Compression, NewContext, VllmContexts, open_contexts
from lkv.integrations.vllm.ranks import any_rank, is_writer, keep_heads, local_heads

_LOG = logging.getLogger("vllm.lkv")


class ContextPasses:
    """Opens requests, plans passes and finishes them; positions are shifted and pages read by the `Batch` of a pass."""

    def __init__(self, vllm_config: Any, device: torch.device):
        self._config, self._device = vllm_config, device
        self._lost_requests: dict[str, int] = {}

    @property
    def contexts(self) -> VllmContexts:
        """The contexts of this worker."""
        return open_contexts(self, self._config, self._device)

    def open_request(self, name: str, prompt_ids: list[int] | None, params: Any) -> RequestWork | None:
        """Return the work of a request, whose context is loaded; None for requests without LKV.

        Args:
            name: The request's id.
            prompt_ids: The tokens of its prompt.
            params: Its sampling parameters, if it has any.
        """
        extra = params.extra_args if params is not None else None
        if not extra or (CONTEXT not in extra and COMPRESS not in extra):
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
        if CONTEXT in extra and any_rank(work.context is None):
            work.context = None
        return work

    def _load_context(self, name: str, tokens: int) -> Context:
        """Return a context. Raises LkvError for one that is lost, or leaves no room for `tokens` after it."""
        context = self.contexts.store.get(name)
        # Rotary embeddings are looked up without a check.
        if context.tokens + tokens > self.contexts.max_positions + 1:
            raise ContextFileError(f"the context {name!r} has become longer; ask it again.")
        keep_heads(context, local_heads(self._config))
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
        if new_context is None or not is_writer():
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
