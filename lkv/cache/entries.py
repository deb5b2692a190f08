"""What one layer holds: its spans, what they were chosen from, and what is done with them as the text goes on."""

import copy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from lkv.cache.config import Layer, Shared, mean
from lkv.cache.quantized_store import QuantizedStore
from lkv.cache.rows import extended_by_row
from lkv.cache.store import KVStore, RaggedStore
from lkv.config import ModelSpec
from lkv.errors import CacheError
from lkv.integrations.transformers.prefill import LayerKV
from lkv.methods.budgets import FixedBudget
from lkv.methods.selectors import ArrivedEntries, check_shape, not_numbers
from lkv.utils.devices import is_out_of_memory


class Entries:
    """The entries of one `layer`: `spans`, chosen from `real` [B] tokens a row (`padding` [B] before them is none).

    `settled` is the logical length when some were last evicted, from where the spans' tail counts; `prompt_length` is 0
    until the prompt has ended.
    """

    def __init__(
        self, layer: Layer, spans: KVStore, real: list[int], padding: list[int], settled: int, prompt_length: int
    ):
        self._layer, self.store = layer, spans
        self.real, self.padding, self.settled, self.prompt_length = real, padding, settled, prompt_length

    @classmethod
    def none(cls, layer: Layer, key: Tensor, value: Tensor) -> "Entries":
        """No entries yet, for a text that streams in: room for the first `key` and `value` [B, H, n, d]."""
        batch, heads, new, _ = key.shape
        spans = RaggedStore(torch.zeros(batch, heads, dtype=torch.long, device="cpu"), new, key, value, scored=True)
        return cls(layer, spans, [0] * batch, [0] * batch, 0, 0)

    @classmethod
    def compressed(cls, layer: Layer, spans: RaggedStore, tokens: int, padding: list[int]) -> "Entries":
        """What eviction left of a whole prompt of `tokens` tokens."""
        real = [tokens - first for first in padding]
        return cls(layer, _stored(layer, spans), real, padding, tokens, tokens)

    @classmethod
    def restore(cls, layer: Layer, state: dict[str, Tensor], like: Tensor) -> "Entries":
        """What `state` gave, on the device and in the dtype of `like`."""
        lens = state["kept"]
        room = layer.plan.first_room(layer.index, lens, like.device)
        spans: KVStore
        if "k" in state:
            key, value = state["k"].to(like), state["v"].to(like)
            spans = RaggedStore(lens, room, key, value)
            spans.unpack(key, value)
        else:
            spans = QuantizedStore.restore(state, lens, room, like)
        real, length = state["real"].tolist(), int(state["length"])
        return cls(layer, spans, real, [0] * len(real), length, length)

    @property
    def kept(self) -> Tensor:
        """How many entries eviction left [B, H]."""
        return self.store.lens

    @property
    def length(self) -> int:
        """Logical length: positions seen, evicted ones included."""
        return self.settled + self.store.tail

    def extend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, padding: Tensor | None = None) -> Tensor:
        """Append k, v [B, H, n, d] and attend over everything held: [B, Hq, n, d].

        `padding` [B, k]: which of the last k tokens, those of the tail and the new ones, are none (of fewer of the
        tail's: as before). They are let go, or not appended; what was padding once stays so.
        """
        new = key.shape[2]
        if padding is not None:
            padding = self._let_go(padding, new)
        scores = None
        if self.store.scores is not None:
            scores = self._arrival_scores(key, value, scale)
            # A step of decoding does not wait for the device; the same selector was checked on the prompt.
            if new > 1:
                self._check(scores, key)
        if new > self.store.room:
            self._make_room(new, scale, key.device)
        pool = self.store.dtype
        if query.dtype != pool or key.dtype != pool:
            query, key, value = query.to(pool), key.to(pool), value.to(pool)
        tail = self.store.tail
        try:
            if padding is not None:
                return extended_by_row(self.store, query, key, value, scale, padding)
            return self.store.extend(query, key, value, scale, scores, self.length, self._layer.shared.buffers)
        except BaseException:
            # Appended, and perhaps counted, before attention failed: the pass may be tried again.
            self.store.cut(self.store.tail - tail)
            raise

    def _let_go(self, padding: Tensor, new: int) -> Tensor | None:
        """Let go what of the tail is `padding` now, see `extend`; returns that of the `new` tokens, if there is any."""
        if self.store.scores is not None:
            raise CacheError(
                "there is padding in what follows a prompt under decode_eviction; give rows of one length there, or "
                "one row at a time."
            )
        tail, padding = self.store.tail, padding.expand(len(self.real), -1)
        before, fresh = padding[:, max(0, padding.shape[1] - new - tail) : -new], padding[:, -new:]
        if bool(before.any()):
            self.store = self.store.without(pad(before, (tail - before.shape[1], 0)))
        return fresh if bool(fresh.any()) else None

    def read_part(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend over what was kept and this part of a prompt, then keep the best of both."""
        layer, new = self._layer, key.shape[2]
        out = self.extend(query, key, value, scale)
        ended = self.settled + new >= layer.plan.announced
        limits = self._limits()
        spans = self._settle(limits, layer.plan.first_room(layer.index, limits, key.device) if ended else 0, scale)
        if ended:
            self.prompt_length = self.settled
            if not layer.plan.decode_eviction:
                spans.scores = spans.positions = None
            self.store = _stored(layer, spans)
        return out

    def _check(self, scores: Tensor, key: Tensor) -> None:
        selector, shared = self._layer.plan.method.selector, self._layer.shared
        check_shape(selector, scores, key)
        shared.doubts.append(not_numbers(scores))
        shared.check_doubts(self._layer.index, selector, key.device)

    def _limits(self) -> Tensor:
        """What each head may keep [B, H] of all that was seen, the spans' tails included."""
        budget, heads = self._layer.plan.method.budget, self.kept.shape[1]
        assert isinstance(budget, FixedBudget)
        seen = [real + self.store.tail for real in self.real]
        return torch.tensor([budget.limits(self._layer.index, heads, real) for real in seen], device="cpu")

    def _settle(self, limits: Tensor, room: int, scale: float) -> RaggedStore:
        """Keep the best `limits` [B, H] entries of each head, by the scores that stayed with them, completed."""
        assert isinstance(self.store, RaggedStore)
        tail = self.store.tail
        spans = self.store.settle(limits, room, partial(self._completed, self.store, scale))
        self.store, self.real = spans, [real + tail for real in self.real]
        self.settled += tail
        return spans

    def _completed(self, spans: RaggedStore, scale: float, row: int, head: int, span: slice) -> Tensor:
        """The scores of the entries of one head's `span`, with what depends on where the text ends now."""
        assert spans.scores is not None and spans.positions is not None
        plan, (key, value) = self._layer.plan, (spans.k[None, None, span], spans.v[None, None, span])
        # As if the row had been read alone, without its padding: keys are rotated so.
        padding = self.padding[row] if self.padding else 0
        prompt = LayerKV(key, value, scale, length=self.length - padding, rotation=self._layer.rotation)
        entries = ArrivedEntries(prompt, spans.positions[span] - padding, spans.scores[span])
        return plan.method.selector.score_at_eviction(self._layer.index, head, entries)

    def _arrival_scores(self, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """What of the scores [B, H, n] of new tokens is final now. Rows without padding go together, others alone."""
        index, plan = self._layer.index, self._layer.plan
        selector, whole = plan.method.selector, LayerKV(key, value, scale, rotation=self._layer.rotation)
        if not any(self.padding):
            return selector.score_on_arrival(index, replace(whole, start=self.length))
        rows = [
            replace(whole.select(slice(row, row + 1), slice(None)), start=self.length - padding)
            for row, padding in enumerate(self.padding)
        ]
        return torch.cat([selector.score_on_arrival(index, row) for row in rows])

    def _make_room(self, new: int, scale: float, device: torch.device) -> None:
        plan = self._layer.plan
        try:
            if plan.decode_eviction and self.prompt_length:
                limits = self._limits()
                self._settle(limits, plan.slack_for(mean(limits), device) + new, scale)
            else:
                # A part of a prompt needs no slack: its spans are laid again right after it.
                slack = plan.slack_for(mean(self.kept) + self.store.tail, device) if self.prompt_length else 0
                self.store = self.store.relaid(new + slack)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise CacheError(
                f"there is no memory for {new} more tokens in layer {self._layer.index} ({error}); free some, or give "
                "decode_eviction=True, a smaller slack or a lower retention. rewind() goes back to the prompt."
            ) from error

    def select(self, rows: Tensor) -> "Entries":
        """The batch rows `rows` [n] of these (on the CPU)."""
        real, padding = ([counts[row] for row in rows.tolist()] for counts in (self.real, self.padding))
        spans = self.store.select(rows, self.store.room)
        return Entries(self._layer, spans, real, padding, self.settled, self.prompt_length)

    def fork(self, shared: Shared) -> "Entries":
        """A copy with pools of its own, in a cache whose layers have `shared`."""
        twin = copy.copy(self)
        twin._layer, twin.store = replace(self._layer, shared=shared), self.store.relaid(self.store.room)
        return twin

    def state(self) -> dict[str, Tensor]:
        """What eviction left: the spans' state, kept [B, H], real [B] and the prompt's length [1]."""
        if not self.prompt_length or self.settled != self.prompt_length:
            raise CacheError("there is no compressed prompt to save, or its answers were evicted together with it.")
        counts = {"real": self.real, "length": [self.prompt_length]}
        tensors = {name: torch.tensor(numbers, device="cpu") for name, numbers in counts.items()}
        return {**self.store.state(), "kept": self.kept, **tensors}

    def full_nbytes(self) -> int:
        """Bytes of k and v of all tokens, had none been evicted."""
        return self.kept.numel() * self.length * self.store.entry_nbytes()


def _stored(layer: Layer, spans: RaggedStore) -> KVStore:
    """The compressed prompt as it is to be held."""
    return spans if layer.plan.bits is None else QuantizedStore.of(spans, layer.plan.bits)


def check_state(state: dict[str, Tensor], tokens: int, spec: ModelSpec) -> None:
    """Raise ValueError, KeyError or CacheError unless `state` is what one layer of one compressed text of
    `tokens` tokens gave; nothing is taken by its word before memory is asked for."""
    kept, real, length = state["kept"], state["real"], state["length"]
    if any(counts.dtype != torch.long for counts in (kept, real, length)):
        raise ValueError("its counts are no whole numbers")
    if kept.shape != (1, spec.kv_heads) or int(kept.min()) < 0 or int(kept.max()) > tokens:
        raise ValueError(f"its counts of kept entries are {tuple(kept.shape)}, or more than {tokens} tokens")
    if real.tolist() != [tokens] or length.tolist() != [tokens]:
        raise ValueError(f"its lengths are not the {tokens} of its text")
    wanted = (int(kept.sum()), spec.head_dim)
    if "k" in state:
        pools = {side: state[side] for side in "kv"}
        if any(tuple(pool.shape) != wanted or not pool.is_floating_point() for pool in pools.values()):
            raise ValueError(f"its k and v are not {wanted}")
    else:
        QuantizedStore.check_state(state, kept, spec.head_dim)
