"""A layer whose keys and values later layers read instead of their own (Gemma-3n, Gemma-4)."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from lkv.cache.cache_config import SharedState
from lkv.cache.layer import RaggedLayer
from lkv.cache.ragged_store import KVStore, attend_padded
from lkv.errors import CacheError
from lkv.hf.masks import Mask
from lkv.hf.prompt_kv import LayerKV, join_queries


class ReadAgainLayer(RaggedLayer):
    """A `RaggedLayer` whose entries later layers of the same pass read as it read them itself.

    A part of a prompt is read by the model's own attention, what follows it over a store, which later evictions in the
    same pass do not change. If the eviction reads queries, it waits for those of all these layers.
    """

    is_traceable = False

    @override
    def reset(self) -> None:
        super().reset()
        # The parts of the last pass: the number of tokens, the store that they are in, and their padding [B, T].
        self._parts: list[tuple[int, KVStore | None, Tensor | None]] = []
        self._reader_queries: dict[int, Tensor] = {}  # for the prompt, by the number of reads left
        self._waiting: tuple[LayerKV, list[int] | None] | None = None  # the prompt, until all layers have read it

    @override
    def fork(self, shared: SharedState) -> "ReadAgainLayer":
        twin = super().fork(shared)
        assert isinstance(twin, ReadAgainLayer)
        twin._parts, twin._reader_queries = [], dict(self._reader_queries)
        return twin

    @override
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, model_attention: Callable[[], Tensor]
    ) -> Tensor:
        self._parts = []
        return super().attend(query, key, value, mask, scale, model_attention)

    @override
    def attend_again(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, model_attention: Callable[[], Tensor]
    ) -> Tensor:
        if self._context.config.method.reads_queries and not self.prompt_length:
            self._add_queries(query.detach())
        out = self._read_parts(query, scale, model_attention)
        if not self.reads_left:
            self._parts = []
            if self._waiting is not None:
                prompt, padding = self._waiting
                queries = [prompt.query, *self._reader_queries.values()]
                self._waiting, self._reader_queries = None, {}
                tokens = min(query.shape[2] for query in queries)
                own, *others = (query[:, :, query.shape[2] - tokens :] for query in queries)
                super()._evict_prompt(join_queries(replace(prompt, queries=own), *others), padding)
        return out

    @override
    def _evict_prompt(self, prompt: LayerKV, padding: list[int] | None) -> None:
        if prompt.queries is not None and self.reads_left:
            self._waiting = prompt, padding
        else:
            super()._evict_prompt(prompt, padding)

    @override
    def _extend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, padding: Tensor | None = None) -> Tensor:
        if self._waiting is not None:
            raise CacheError(
                "this method reads the queries of later layers, which follow only now: end this pass where the prompt "
                "ends."
            )
        return super()._extend(query, key, value, scale, padding)

    @override
    def _keep_queries(self, queries: Tensor | None) -> None:
        config = self._context.config
        if config.request.decode_eviction and config.method.reads_queries:
            raise CacheError(
                f"decode_eviction with {config.method.name!r} reads queries, but several layers of this model read the "
                "same entries with queries of their own; use 'lkv'."
            )

    @override
    def _on_part(self, tokens: int, store: KVStore | None = None, padding: Tensor | None = None) -> None:
        self._parts.append((tokens, store, padding))

    def _read_parts(self, query: Tensor, scale: float, model_attention: Callable[[], Tensor]) -> Tensor:
        """Compute attention [B, n, Hq, dv] from the last n tokens of the pass."""
        outs: list[Tensor] = []
        end, softmax_options = query.shape[2], self._context.softmax_options
        for tokens, store, padding in reversed(self._parts):
            rows, end = query[:, :, max(0, end - tokens) : end], max(0, end - tokens)
            if store is None:
                outs.append(model_attention()[:, : rows.shape[2]])
            elif rows.shape[2]:
                own = rows.to(store.dtype)
                if padding is None:
                    out = store.attend(own, scale, softmax_options)
                else:
                    out = attend_padded(store, own, scale, padding[:, -rows.shape[2] :], softmax_options)
                outs.append(out.to(query.dtype).transpose(1, 2))
        return torch.cat(outs[::-1], 1)

    def _add_queries(self, query: Tensor) -> None:
        """Keep the queries [B, Hq, T, d] of a later layer for the eviction."""
        if query.shape[2] != sum(tokens for tokens, *_ in self._parts):
            raise CacheError(
                "this method reads the queries of all tokens, but the model computes its later layers for the last "
                "ones only: leave logits_to_keep out, or give another method."
            )
        before, last = self._reader_queries.get(self.reads_left), self._context.config.method.last_queries
        query = query if before is None else torch.cat([before, query], 2)
        self._reader_queries[self.reads_left] = query if last is None else query[:, :, -last:].clone()
