"""RaggedLayer: one layer of the cache. It reads the prompt, lets it be evicted from, and hands on what comes after."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lkv.cache.config import CacheConfig, Layer, Shared
from lkv.cache.entries import Entries
from lkv.cache.eviction import evicted
from lkv.cache.store import KVStore
from lkv.cache.unread import PromptBuffer
from lkv.errors import CacheError
from lkv.integrations.transformers.cache_layers import AttentionCacheLayer
from lkv.integrations.transformers.prefill import LayerKV


class RaggedLayer(AttentionCacheLayer):
    """One layer of a `RaggedCache`: until the prompt has ended its k and v whole (or, streaming, what was kept of it so
    far), then `entries`."""

    is_croppable = True

    def __init__(self, index: int, plan: CacheConfig, shared: Shared):
        super().__init__()
        self._layer = Layer(index, plan, shared)
        self.reset()

    def reset(self) -> None:
        """Forget everything, and free it."""
        self._layer.shared.doubts.clear()
        self.entries: Entries | None = None
        self.pending_key = None
        self._unread = PromptBuffer()
        self.is_initialized = False

    @property
    def store(self) -> KVStore | None:
        """What is held, None before something was evicted."""
        return None if self.entries is None else self.entries.store

    @property
    def kept_counts(self) -> Tensor:
        """How many entries eviction left [B, H]."""
        return torch.zeros(0, 0, dtype=torch.long, device="cpu") if self.entries is None else self.entries.kept

    @property
    def real_tokens(self) -> list[int]:
        """Tokens that the entries of each row were chosen from (padding is none)."""
        return [] if self.entries is None else self.entries.real

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt, padding included; 0 until it has ended."""
        return 0 if self.entries is None else self.entries.prompt_length

    def get_seq_length(self, *args: Any) -> int:
        """Logical length: positions seen, evicted ones included."""
        return self._unread.tokens if self.entries is None else self.entries.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self._unread:
            return self._unread.tokens + query_length, 0
        if self.entries is not None and len(self.real_tokens) > 1:
            # Of a batch the tail is looked at again: rows may end at different tokens, and be padded until the next.
            return self.entries.store.tail + query_length, self.entries.settled
        return super().get_mask_sizes(query_length)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.dtype != self.dtype:
            raise CacheError(
                f"this cache holds {self.dtype}, but the model now computes in {key_states.dtype}; use one dtype for "
                "the prompt and what follows, or make a new cache."
            )
        return self._unread.with_new(key_states, value_states)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        # What is stored belongs to no autograd graph: a cache that held one would hold every activation. Under autocast
        # the rotation leaves k in float32 beside v in half precision, which is what attention computes in.
        key, value = (x.detach() if x.requires_grad else x for x in (key, value))
        key = key if key.dtype == value.dtype else key.to(value.dtype)
        if not self.prompt_length and not self._layer.plan.streaming:
            return self._read(query, key, value, mask, scale, stock)
        padding = self._layer.shared.padding.hidden_keys(mask)
        if self.prompt_length:
            return self._go_on(query, key, value, scale, padding).transpose(1, 2)
        if padding is not None:
            raise CacheError(
                "there is padding in a prompt read in streaming mode; give rows of one length there, or one row at a "
                "time."
            )
        return self._stream(query, key, value, scale).transpose(1, 2)

    def _go_on(self, query: Tensor, key: Tensor, value: Tensor, scale: float, padding: Tensor | None = None) -> Tensor:
        """Attend to everything held, k and v of the new tokens included: [B, Hq, n, d]; `padding` as in
        `Entries.extend`."""
        assert self.entries is not None
        return self.entries.extend(query, key, value, scale, padding).to(value.dtype)

    def _stream(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """A part of a prompt that is evicted from part by part, and what follows the prompt in the same pass."""
        plan, new = self._layer.plan, key.shape[2]
        plan.check_length(plan.announced)
        part = min(new, plan.announced - self.get_seq_length())
        begun = [x[:, :, :part] for x in (query, key, value)]
        if self.entries is None:
            self.entries = Entries.none(self._layer, begun[1], begun[2])
        out = self.entries.read_part(begun[0], begun[1], begun[2], scale).to(value.dtype)
        if part == new:
            return out
        return torch.cat([out, self._go_on(query[:, :, part:], key[:, :, part:], value[:, :, part:], scale)], 2)

    def _read(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        """Full attention over the prompt, or over a part of it; evict when it has ended (Sec. 3.4, inference)."""
        out, plan, total = stock(), self._layer.plan, key.shape[2]
        prompt = plan.prompt_tokens or total
        queries = self._unread.queries_with(query) if plan.method.reads_queries else None
        whole = LayerKV(key, value, scale, queries, rotation=self._layer.rotation)
        if total < prompt:
            self._unread = PromptBuffer(whole)
            return out
        self.entries = evicted(
            self._layer, whole.select(slice(None), slice(prompt)), self._layer.shared.padding.left_padding(mask)
        )
        self._unread = PromptBuffer()
        if total == prompt:
            return out
        # The rows that follow the prompt in the same pass see what was kept of it, like all rows after them.
        late = total - prompt
        rows = self._go_on(query[:, :, -late:], key[:, :, prompt:], value[:, :, prompt:], scale)
        return torch.cat([out[:, :-late], rows.transpose(1, 2)], 1)

    def fill(self, prompt: LayerKV) -> None:
        """Evict from k and v computed before."""
        self.lazy_initialization(prompt.key, prompt.value)
        self.entries = evicted(self._layer, prompt, None)

    def crop(self, tokens_to_remove: int) -> None:
        """Cut `-tokens_to_remove` (<= 0, as in transformers >= 5.17) tokens off the tail.

        Raises CacheError where the cut would reach into what was compressed.
        """
        cut, spans = -tokens_to_remove, self.store
        tail = 0 if spans is None else spans.tail
        if not 0 <= cut <= tail:
            raise CacheError(
                f"{cut} tokens cannot be cut off: only the {tail} after the compressed prompt can; "
                "give a number between minus that and 0."
            )
        self.pending_key = None
        if spans is not None:
            spans.cut(cut)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i a copy of the row `beam_idx[i]`; rows in their place already are not copied."""
        rows = beam_idx.cpu()
        if torch.equal(rows, torch.arange(self._unread.rows or len(self.kept_counts), device="cpu")):
            return
        self._unread = self._unread.select(beam_idx)
        if self.entries is not None:
            self.entries = self.entries.select(rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(
            torch.arange(self._unread.rows or len(self.kept_counts), device="cpu").repeat_interleave(repeats)
        )

    def offload(self) -> None:
        raise CacheError("RaggedCache does not offload; lower the retention instead.")

    def fork(self, shared: Shared) -> "RaggedLayer":
        """A copy with pools of its own, in a cache whose layers have `shared`."""
        twin = copy.copy(self)
        twin._layer = Layer(self._layer.index, self._layer.plan, shared)
        twin.entries = None if self.entries is None else self.entries.fork(shared)
        return twin

    def state(self) -> dict[str, Tensor]:
        """What eviction left, see `Entries.state`."""
        if self.entries is None:
            raise CacheError("there is no compressed prompt to save, or its answers were evicted together with it.")
        return self.entries.state()

    def restore(self, state: dict[str, Tensor], like: Tensor) -> None:
        """Take up what `state` gave, on the device and in the dtype of `like`."""
        self.lazy_initialization(like, like)
        self.entries = Entries.restore(self._layer, state, like)

    def nbytes(self) -> int:
        """Bytes of k and v storage really held, those of a prompt still being read included, with the
        queries that its method reads."""
        return self._unread.nbytes() + (0 if self.store is None else self.store.nbytes())

    def full_nbytes(self) -> int:
        """Bytes of k and v of all tokens, had none been evicted."""
        return self._unread.nbytes(queries=False) if self.entries is None else self.entries.full_nbytes()
