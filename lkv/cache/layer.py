"""RaggedLayer: one layer of the cache. It reads the prompt, evicts from it, and appends later tokens."""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from lkv.cache.cache_config import CacheConfig, LayerContext, SharedState, mean_entries
from lkv.cache.eviction import NewEntries, entry_limits, evict_entries, evict_prompt
from lkv.cache.ragged_store import KVStore, RaggedStore, extend_padded
from lkv.cache.saved_state import check_layer, restore_store
from lkv.errors import CacheError
from lkv.hf.cache_layers import AttentionCacheLayer
from lkv.hf.masks import Mask
from lkv.hf.model_spec import ModelSpec
from lkv.hf.prompt_kv import LayerKV
from lkv.utils.devices import is_out_of_memory


class RaggedLayer(AttentionCacheLayer):
    """One full-attention layer of a `RaggedCache`.

    The k and v of the prompt are buffered until it ends (with streaming, each chunk is evicted from immediately). The
    entries that the method keeps then move to `store`, to which all later tokens are appended.

    Attributes:
        store: The entries; None before the first eviction.
        prompt_length: Tokens of the prompt, padding included; 0 until it has ended.
        base_length: The text's length at the last eviction; later tokens are the store's appended tokens.
        real_tokens: The number of tokens, without padding, that eviction chose from in each row, [B].
    """

    is_croppable = True

    def __init__(self, context: LayerContext):
        super().__init__()
        self._context = context
        self.reset()

    def set_config(self, config: CacheConfig) -> None:
        """Use `config` for reading and eviction from now on."""
        self._context = replace(self._context, config=config)

    def reset(self) -> None:
        """Drop all stored tokens and free their memory."""
        self._context.shared.forget_checks()
        self.pending_key = None
        self._buffer: LayerKV | None = None  # the chunks of a prompt that has not ended
        self._last_queries: Tensor | None = None  # if decoding evicts by them
        self.store: KVStore | None = None
        self.prompt_length = self.base_length = 0
        self.real_tokens: list[int] = []
        self._padding: list[int] = []  # left padding of each row
        self._was_batch = False  # True once B > 1: the remaining rows may be padded
        self.is_initialized = False

    @property
    def context(self) -> LayerContext:
        """The layer's context, such as its attention sinks."""
        return self._context

    @property
    def lens(self) -> Tensor:
        """The number of entries that eviction kept in each row and head, int64 [B, H] on the CPU."""
        return torch.zeros(0, 0, dtype=torch.long, device="cpu") if self.store is None else self.store.lens

    @property
    def is_traceable(self) -> bool:  # type: ignore[override]
        """Whether compiled models may run the layer through `lkv::extend`, which supports no gradients."""
        return self._buffer is None and not self._context.config.request.streaming and not torch.is_grad_enabled()

    @property
    def is_before_eviction(self) -> bool:  # type: ignore[override]
        """Whether the layer has not evicted yet."""
        return self.store is None

    @property
    def row_count(self) -> int:
        """The number of batch rows, 0 before the first pass."""
        return len(self.lens) if self._buffer is None else self._buffer.key.shape[0]

    def get_seq_length(self, *args: object) -> int:
        """Return the number of tokens read so far, evicted ones included."""
        if self.store is not None:
            return self.base_length + self.store.appended_tokens
        return 0 if self._buffer is None else self._buffer.key.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (length, offset) of the keys that the layer's mask covers."""
        if self._buffer is not None:
            return self.get_seq_length() + query_length, 0
        if self.store is not None and (self._was_batch or len(self.real_tokens) > 1):
            # For a batch the mask covers all appended tokens: rows may end at different tokens and be padded later.
            return self.store.appended_tokens + query_length, self.base_length
        return super().get_mask_sizes(query_length)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return k and v of the prompt's earlier chunks and of the new tokens; `attend` stores the new ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.dtype != self.dtype:
            raise CacheError(
                f"this cache stores {self.dtype}, but the model now computes in {key_states.dtype}; use one dtype for "
                "the prompt and what follows, or make a new cache."
            )
        if self._buffer is None:
            return key_states, value_states
        return torch.cat([self._buffer.key, key_states], 2), torch.cat([self._buffer.value, value_states], 2)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, model_attention: Callable[[], Tensor]
    ) -> Tensor:
        """Read a part of the prompt, or append later tokens, and compute their attention."""
        # Stored tensors are detached: an autograd graph would keep every activation alive. Under autocast RoPE returns
        # k in float32, while v, and so attention, is in half precision.
        key, value = (x.detach() if x.requires_grad else x for x in (key, value))
        key = key if key.dtype == value.dtype else key.to(value.dtype)
        padding, self.is_detached = self._context.shared.padding, self.get_seq_length() > 0
        if self.prompt_length:
            return self._extend(query, key, value, scale, padding.hidden_keys(mask, query.shape[2])).transpose(1, 2)
        if not self._context.config.request.streaming:
            return self._read_prompt(query, key, value, scale, mask, model_attention())
        if padding.hidden_keys(mask, query.shape[2]) is not None:
            raise CacheError(
                "streaming does not take padding in the prompt; give rows of equal length, or one row at a time."
            )
        return self._stream_prompt(query, key, value, scale).transpose(1, 2)

    def _read_prompt(self, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Mask, out: Tensor) -> Tensor:
        """Buffer a part of the prompt, or evict once the prompt has ended (Sec. 3.4, inference).

        `key`, `value`: k and v of the whole prompt so far. `out` [B, T, Hq, d]: full attention over them.
        """
        config, total, queries = self._context.config, key.shape[2], None
        if config.method.reads_queries:
            queries = query.detach()
            if self._buffer is not None and self._buffer.queries is not None:
                queries = torch.cat([self._buffer.queries, queries], 2)
        prompt = self._context.prompt_kv(key, value, scale, queries)
        prompt_length = config.request.prompt_tokens or total
        num_appended = max(0, total - prompt_length)
        self._on_part(query.shape[2] - num_appended)
        if total < prompt_length:
            if queries is not None and config.method.last_queries is not None:
                prompt = replace(prompt, queries=queries[:, :, -config.method.last_queries :].clone())
            self._buffer = prompt
            return out
        padding = self._context.shared.padding.left_padding(mask)
        self._evict_prompt(prompt.select(slice(None), slice(prompt_length)), padding)
        self._buffer = None
        if not num_appended:
            return out
        # Tokens that follow the prompt in the same pass see its kept entries, like all later tokens.
        self._context.shared.padding.hidden_keys(mask, num_appended)  # checks that they do not see later ones
        rows = self._extend(query[:, :, -num_appended:], key[:, :, prompt_length:], value[:, :, prompt_length:], scale)
        return torch.cat([out[:, :-num_appended], rows.transpose(1, 2)], 1)

    def _evict_prompt(self, prompt: LayerKV, padding: list[int] | None) -> None:
        """Evict from a whole prompt."""
        batch, _, tokens, _ = prompt.key.shape
        self.store = evict_prompt(self._context, prompt, padding)
        self._keep_queries(prompt.queries)
        self._padding = padding or [0] * batch
        self.real_tokens = [tokens - first for first in self._padding]
        self.prompt_length = self.base_length = tokens

    def _stream_prompt(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend over the kept entries and a chunk of the prompt, then keep the best of both: [B, Hq, T, d].

        Tokens of the chunk beyond the prompt are appended after the last eviction.
        """
        context, config = self._context, self._context.config
        batch, heads, new, _ = key.shape
        assert config.request.prompt_tokens is not None
        config.method.check_length(config.request.prompt_tokens)
        count = min(new, config.request.prompt_tokens - self.get_seq_length())
        if self.store is None:
            none = torch.zeros(batch, heads, dtype=torch.long, device="cpu")
            self.store = RaggedStore(none, count, key, value, has_scores=True)
            self.real_tokens, self._padding = [0] * batch, [0] * batch
        out = self._extend(query[:, :, :count], key[:, :, :count], value[:, :, :count], scale)
        limits, is_last = self._limits(), self.get_seq_length() >= config.request.prompt_tokens
        free_slots = config.initial_slots(context.index, limits[-1], key.device, self._lengths) if is_last else 0
        store = self._evict(limits, free_slots, scale)
        if is_last:
            self.prompt_length = self.base_length
            if not config.request.decode_eviction:
                store.drop_scores()
        if count == new:
            return out
        tail_output = self._extend(query[:, :, count:], key[:, :, count:], value[:, :, count:], scale)
        return torch.cat([out, tail_output], 2)

    def _extend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, padding: Tensor | None = None) -> Tensor:
        """Append k, v [B, H, T, d] and attend over everything stored: [B, Hq, T, d].

        `padding` [B, n] marks padding among the last n tokens. Padding that was appended before is removed; new padding
        is not appended.
        """
        assert self.store is not None
        dtype, new, self.is_detached = value.dtype, key.shape[2], True
        if padding is not None:
            padding = self._drop_padding(padding, new)
        is_over_budget = new > self.store.free_slots and self._make_space(new, scale, key.device)
        store = self.store
        if query.dtype != store.dtype or key.dtype != store.dtype:
            query, key, value = (x.to(store.dtype) for x in (query, key, value))
        appended, softmax_options, queries = store.appended_tokens, self._context.softmax_options, self._last_queries
        try:
            if padding is not None:
                out = extend_padded(store, query, key, value, scale, padding, softmax_options)
            else:
                out = store.extend(query, key, value, scale, self._context.shared.buffers, softmax_options)
            self._keep_queries(query)
            if is_over_budget:
                self._evict(self._limits(), self._context.config.budgeted_slots(self._lengths) or 0, scale)
        except BaseException:
            # Attention failed after the tokens were appended, and maybe counted: undo this for a retry.
            store.crop(store.appended_tokens - appended)
            self._last_queries = queries
            raise
        self._on_part(new, store, padding)
        return out.to(dtype)

    def _keep_queries(self, queries: Tensor | None) -> None:
        """Keep the last of `queries` [B, Hq, T, d], if decoding evicts by them."""
        config, parts = self._context.config, [x for x in (self._last_queries, queries) if x is not None]
        if config.request.decode_eviction and (count := config.method.last_queries):
            self._last_queries = torch.cat(parts, 2)[:, :, -count:].detach().clone()

    def _on_part(self, tokens: int, store: KVStore | None = None, padding: Tensor | None = None) -> None:
        """Do nothing; `ReadAgainLayer` records parts: `tokens` of a prompt, or the last of `store` with padding."""

    def _drop_padding(self, padding: Tensor, new: int) -> Tensor | None:
        """Drop the appended tokens marked in `padding`, see `_extend`; return the padding of the `new` tokens."""
        assert self.store is not None
        if self._context.shared.has_states:
            raise CacheError(
                "recurrent layers would read padding after the prompt as text; give rows of equal length, or one row "
                "at a time."
            )
        if self.store.scores is not None:
            raise CacheError(
                "decode_eviction does not take padding after the prompt; give rows of equal length, or one row at a "
                "time."
            )
        appended, padding = self.store.appended_tokens, padding.expand(len(self.real_tokens), -1)
        earlier, fresh = padding[:, max(0, padding.shape[1] - new - appended) : -new], padding[:, -new:]
        if bool(earlier.any()):
            self.store = self.store.drop_padding(pad(earlier, (appended - earlier.shape[1], 0)))
        return fresh if bool(fresh.any()) else None

    def _make_space(self, new: int, scale: float, device: torch.device) -> bool:
        """Reallocate the store for `new` tokens, after an eviction if decoding evicts.

        Returns True if a memory budget has fewer slots than that: then evict after their attention instead.
        """
        assert self.store is not None
        config, slots = self._context.config, self._context.config.budgeted_slots(self._lengths)
        is_over_budget = slots is not None and new > slots and self.prompt_length > 0
        try:
            if config.request.decode_eviction and self.prompt_length and not is_over_budget:
                limits = self._limits()
                entries = mean_entries(limits[-1])
                self._evict(limits, config.slack_for(entries, device) + new if slots is None else slots, scale)
            else:
                # A chunk of a prompt needs no slack, because the store is reallocated right after it.
                entries = mean_entries(self.store.lens) + self.store.appended_tokens
                has_slack = self.prompt_length and not is_over_budget
                self.store = self.store.reallocate(new + (config.slack_for(entries, device) if has_slack else 0))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise CacheError(
                f"there is no memory for {new} more tokens in layer {self._context.index} ({error}); free some, or "
                "give decode_eviction=True, a smaller slack or a lower retention. rewind() goes back to the prompt."
            ) from error
        return is_over_budget

    def reserve(self, tokens: int) -> None:
        """Ensure free slots for `tokens` more tokens."""
        assert self.store is not None
        if self.store.free_slots < tokens:
            self.store = self.store.reallocate(tokens)

    def release(self, free_slots: int) -> None:
        """Free the memory of free slots beyond `free_slots`."""
        assert self.store is not None
        if self.store.free_slots > free_slots:
            self.store = self.store.reallocate(free_slots)

    @property
    def _lengths(self) -> list[int]:
        """The real tokens of each row, appended ones included."""
        return [real + (0 if self.store is None else self.store.appended_tokens) for real in self.real_tokens]

    def _limits(self) -> Tensor:
        """Return the limits of `entry_limits` for all tokens read, appended ones included."""
        assert self.store is not None
        return entry_limits(self._context, self.store.lens.shape[1], self._lengths)

    def _evict(self, limits: Tensor, free_slots: int, scale: float) -> KVStore:
        """Keep the best `limits` [tiers, B, H] entries of each head, by their completed stored scores."""
        assert self.store is not None
        appended, end = self.store.appended_tokens, self.get_seq_length()
        new = NewEntries(appended, self.base_length, self._padding, scale, self._last_queries)
        self.store = store = evict_entries(self._context, self.store, new, limits, free_slots)
        self.real_tokens = [real + appended for real in self.real_tokens]
        self.base_length = end
        return store

    def fill(self, prompt: LayerKV) -> None:
        """Evict from a prompt that has been read already."""
        self.lazy_initialization(prompt.key, prompt.value)
        # Under autocast k and queries are in float32 and v is in half precision; see `attend`.
        dtype = prompt.value.dtype
        queries = None if prompt.queries is None else prompt.queries.to(dtype)
        self._evict_prompt(replace(prompt, key=prompt.key.to(dtype), queries=queries), None)

    def crop(self, tokens_to_remove: int) -> None:
        """Cut `-tokens_to_remove` (<= 0, as in transformers >= 5.17) appended tokens off the end.

        Raises CacheError if this would reach into the compressed prompt.
        """
        count, appended = -tokens_to_remove, 0 if self.store is None else self.store.appended_tokens
        if self._last_queries is not None:
            appended = 0  # the queries before those of removed tokens are gone, and evictions would lack them
        if not 0 <= count <= appended:
            raise CacheError(
                f"cannot crop {count} tokens: only the {appended} tokens after the compressed prompt can be removed; "
                f"pass a number from {-appended} to 0."
            )
        self.pending_key = None
        if self.store is not None:
            self.store.crop(count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i a copy of the row `beam_idx[i]`; rows that stay in place are not copied."""
        rows = beam_idx.cpu()
        if torch.equal(rows, torch.arange(self.row_count, device="cpu")):
            return
        if self._buffer is not None:
            self._buffer = self._buffer.select(beam_idx, slice(None))
        if self._last_queries is not None:
            self._last_queries = self._last_queries[beam_idx]
        if self.store is not None:
            self.store = self.store.select(rows, self.store.free_slots)
            self._was_batch |= len(self.real_tokens) > 1
            self.real_tokens = [self.real_tokens[row] for row in rows.tolist()]
            self._padding = [self._padding[row] for row in rows.tolist()]

    def fork(self, shared: SharedState) -> "RaggedLayer":
        """Return a copy with its own pools, for a cache whose layers share `shared`."""
        twin = copy.copy(self)
        twin._context = replace(self._context, shared=shared)
        if self.store is not None:
            twin.store = self.store.reallocate(self.store.free_slots)
        return twin

    def state(self) -> dict[str, Tensor]:
        """Return the compressed prompt as tensors: the store's, kept [B, H], real [B] and the length [1]."""
        if self.store is None or not self.prompt_length or self.base_length != self.prompt_length:
            raise CacheError("there is no compressed prompt to save, or tokens that followed it were evicted with it.")
        counts = {"real": self.real_tokens, "length": [self.prompt_length]}
        tensors = {name: torch.tensor(numbers, device="cpu") for name, numbers in counts.items()}
        return {**self.store.state(), "kept": self.lens, **tensors}

    def restore(
        self, state: dict[str, Tensor], tokens: int, spec: ModelSpec, like: Tensor, has_free_slots: bool = True
    ) -> None:
        """Load the tensors of `state`, with free slots for later tokens; otherwise as `OtherLayer.restore`."""
        check_layer(state, tokens, spec)
        self.lazy_initialization(like, like)
        lens, config = state["kept"], self._context.config
        free_slots = config.initial_slots(self._context.index, lens, like.device) if has_free_slots else 0
        self.store = restore_store(state, lens, free_slots, like)
        self.real_tokens = state["real"].tolist()
        self._padding = [0] * len(self.real_tokens)
        self.prompt_length = self.base_length = int(state["length"])

    def nbytes(self) -> int:
        """Return the bytes of k and v storage, and of the queries that the method reads."""
        return self._buffer_nbytes(with_queries=True) + (0 if self.store is None else self.store.nbytes())

    def full_nbytes(self) -> int:
        """Return the bytes of k and v of all tokens without eviction."""
        if self.store is None:
            return self._buffer_nbytes(with_queries=False)
        return self.lens.numel() * self.get_seq_length() * self.store.entry_nbytes()

    def _buffer_nbytes(self, with_queries: bool) -> int:
        buffer = self._buffer
        tensors = [] if buffer is None else [buffer.key, buffer.value, buffer.queries if with_queries else None]
        tensors += [self._last_queries] * with_queries
        return sum(x.untyped_storage().nbytes() for x in tensors if x is not None)
