"""RaggedLayer: one layer of the cache. It reads the prompt, evicts from it, and holds what comes after."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lkv.cache.spans import QuantizedSpans, Spans
from lkv.config import ModelSpec
from lkv.devices import is_out_of_memory
from lkv.errors import CacheError, PromptError
from lkv.host.hooks import HookedLayer
from lkv.host.masks import has_padding, left_padding
from lkv.host.rotation import Rotation
from lkv.methods.budget import Amount, FixedBudget
from lkv.methods.build import Method
from lkv.methods.selection import Arrived, check_numbers, check_shape, not_numbers
from lkv.prefill import PromptLayer, precise

# Room for appended tokens: a quarter of what a head holds, between these.
_LEAST_SLACK = 16
_CPU_SLACK, _GPU_SLACK = 32, 256


@dataclass(frozen=True)
class Plan:
    """How a cache reads and evicts; see `RaggedCache` for the meaning of each."""

    method: Method
    amount: Amount | None
    slack: int | None = None
    prompt_tokens: int | None = None
    streaming: bool = False
    decode_eviction: bool = False
    bits: int | None = None
    rotation: Rotation | None = None

    @property
    def scored(self) -> bool:
        """Whether scores stay with the entries, because some are to be evicted later."""
        return self.streaming or self.decode_eviction


@dataclass
class Shared:
    """What the layers of one cache, numbered up to `last`, have in common: `buffers` as in `ragged_attention.extend`,
    and of scores that no device was asked about yet whether some are no numbers, `doubts`."""

    last: int
    buffers: dict[Any, Any] = field(default_factory=dict)
    doubts: list[Tensor] = field(default_factory=list)


class RaggedLayer(HookedLayer):
    """One layer's k and v in `Spans`. `kept` [B, H] counts the entries that eviction left, `real` [B] the tokens that
    they were chosen from (padding is none)."""

    is_croppable = True

    def __init__(self, index: int, plan: Plan, shared: Shared):
        super().__init__()
        self._index, self._plan, self._shared = index, plan, shared
        self.reset()

    def reset(self) -> None:
        """Forget everything, and free it."""
        self._shared.doubts.clear()
        self.spans: Spans | QuantizedSpans | None = None
        self.kept = torch.zeros(0, 0, dtype=torch.long, device="cpu")
        self.real: list[int] = []
        self.prompt_length = 0  # 0 until the prompt has ended
        self._settled = 0  # logical length when last evicted; the spans' tail counts from there
        self._padding: list[int] = []  # of each row, before its prompt
        self._arrived: tuple[Tensor, Tensor] | None = None
        self._whole: PromptLayer | None = None  # what was read of a prompt that comes in parts
        self.is_initialized = False

    def get_seq_length(self, *args: Any) -> int:
        """Logical length: positions seen, evicted ones included."""
        if self._whole is not None:
            return self._whole.key.shape[2]
        return self._settled + (self.spans.tail if self.spans is not None else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self._whole is not None:
            return self.get_seq_length() + query_length, 0
        return super().get_mask_sizes(query_length)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.dtype != self.dtype:
            raise CacheError(
                f"this cache holds {self.dtype}, but the model now computes in {key_states.dtype}; use one dtype for "
                "the prompt and what follows, or make a new cache."
            )
        if self._whole is not None:
            key_states = torch.cat([self._whole.key, key_states], 2)
            value_states = torch.cat([self._whole.value, value_states], 2)
        # What is stored belongs to no autograd graph: a cache that held one would hold every activation. Under autocast
        # the rotation leaves k in float32 beside v in half precision, which is what attention computes in.
        self._arrived = key_states.detach().to(value_states.dtype), value_states.detach()
        return self.tag(key_states), value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        assert self._arrived is not None
        key, value = self._arrived
        self._arrived = None
        if not self.prompt_length and not self._plan.streaming:
            return self._read(query, key, value, mask, scale, stock)
        if has_padding(mask):
            raise CacheError(
                "there is padding in what follows the compressed prompt, or in a prompt read in streaming mode; give "
                "rows of one length there, or one row at a time."
            )
        done, new, parts = 0, key.shape[2], []
        if not self.prompt_length:
            done = min(new, self._prompt_tokens - self._settled)
            parts.append(self._read_streaming(query[:, :, :done], key[:, :, :done], value[:, :, :done], scale))
        if done < new:
            parts.append(self._continue(query[:, :, done:], key[:, :, done:], value[:, :, done:], scale))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return out.transpose(1, 2)

    @property
    def unattended(self) -> bool:
        """Whether k and v were handed out, but nobody has computed attention over them yet."""
        return self._arrived is not None

    @property
    def _prompt_tokens(self) -> int:
        assert self._plan.prompt_tokens is not None
        return self._plan.prompt_tokens

    def _slack(self, held: int) -> int:
        """Room that each head gets, where a head holds `held` entries on average."""
        if self._plan.slack is not None:
            return self._plan.slack
        most = _CPU_SLACK if self.device.type == "cpu" else _GPU_SLACK
        return min(most, max(_LEAST_SLACK, held // 4))

    def _first_room(self, kept: Tensor) -> int:
        """Room after an eviction that left `kept` [B, H]: of another size in each layer, so that the layers are not all
        re-laid at one step."""
        slack = self._slack(_mean(kept))
        if self._plan.slack is not None:
            return slack
        return slack // 2 + self._index % (slack // 2)

    def _read(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        """Full attention over the prompt, or over a part of it; evict when it has ended (Sec. 3.4, inference)."""
        out = stock()
        total = key.shape[2]
        prompt = self._plan.prompt_tokens or total
        before = self._whole
        queries = None
        if self._plan.method.selector.reads_queries:
            queries = query.detach()
            queries = queries if before is None or before.queries is None else torch.cat([before.queries, queries], 2)
        if total < prompt:
            self._whole = PromptLayer(key, value, scale, queries, rotation=self._plan.rotation)
            return out
        padding = left_padding(mask)
        self._whole = None
        whole = PromptLayer(key, value, scale, queries, rotation=self._plan.rotation)
        self._evict(whole.part(slice(None), slice(prompt)), padding)
        if total == prompt:
            return out
        # The rows that follow the prompt in the same pass see what was kept of it, like all rows after them.
        late = total - prompt
        rows = self._continue(query[:, :, -late:], key[:, :, prompt:], value[:, :, prompt:], scale)
        return torch.cat([out[:, :-late], rows.transpose(1, 2)], 1)

    def fill(self, prompt: PromptLayer) -> None:
        """Evict from k and v computed before."""
        self.lazy_initialization(prompt.key, prompt.value)
        self._evict(prompt, None)

    def _evict(self, whole: PromptLayer, padding: list[int] | None) -> None:
        """Keep the best tokens of each head and drop the rest. `padding`: tokens to skip at each row's beginning."""
        batch, _, tokens, _ = whole.key.shape
        firsts = padding or [0] * batch
        # Rows without padding are scored together, others one by one, as if each had been read alone.
        groups = [slice(b, b + 1) for b in range(batch)] if any(firsts) else [slice(0, batch)]
        tables: list[Tensor] = []
        arrived: list[Tensor] = []
        counts: list[list[int]] = []
        for rows in groups:
            first = firsts[rows.start]
            self._check_length(tokens - first)
            part, selector = whole.part(rows, slice(first, None)), self._plan.method.selector
            found = check_shape(selector, selector.scores(self._index, part), part.key)
            self._shared.doubts.append(not_numbers(found))
            tables.append(_behind_padding(found, first))
            counts += self._plan.method.budget.counts(self._index, found)
            if self._plan.decode_eviction:
                arrived.append(pad(selector.on_arrival(self._index, part), (first, 0)))
        self._check_doubts()
        kept = torch.tensor(counts, device="cpu")
        spans = Spans(kept, self._first_room(kept), whole.key, whole.value, self._plan.decode_eviction)
        spans.fill(whole.key, whole.value, _joined(tables), _joined(arrived) if arrived else None)
        self.kept, self.real = kept, [tokens - first for first in firsts]
        self.prompt_length = self._settled = tokens
        self._padding = firsts
        self.spans = self._stored(spans)

    def _check_doubts(self) -> None:
        """Raise CacheError where scores are no numbers. A GPU is asked in the last layer, for all: each would wait."""
        if self.device.type == "cpu" or self._index == self._shared.last:
            doubts = self._shared.doubts.copy()
            self._shared.doubts.clear()
            check_numbers(self._plan.method.selector, doubts)

    def _stored(self, spans: Spans) -> Spans | QuantizedSpans:
        """The compressed prompt as it is to be held."""
        return spans if self._plan.bits is None else QuantizedSpans.of(spans, self._plan.bits)

    def _check_length(self, tokens: int) -> None:
        amount = self._plan.amount
        if amount is not None and tokens * amount.of(tokens) < 1:
            raise PromptError(
                f"the prompt has {tokens} tokens: at {amount} nothing of it would be kept. Give at least "
                f"{math.ceil(1 / amount.retention)} tokens, or a higher retention."
            )

    def _read_streaming(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend over what was kept and this part of the prompt, then keep the best of both."""
        self._check_length(self._prompt_tokens)
        batch, heads, new, _ = key.shape
        if self.spans is None:
            self.spans = Spans(torch.zeros(batch, heads, dtype=torch.long, device="cpu"), new, key, value, scored=True)
        out = self._continue(query, key, value, scale)
        ended = self._settled + new >= self._prompt_tokens
        limits = self._limits()
        settled = self._settle(limits, self._first_room(limits) if ended else 0, scale)
        if ended:
            self.prompt_length = self._settled
            if not self._plan.decode_eviction:
                settled.scores = settled.positions = None
            self.spans = self._stored(settled)
        return out

    def _limits(self) -> Tensor:
        """What each head may keep [B, H] of all that was seen, the spans' tails included."""
        assert self.spans is not None and isinstance(self._plan.method.budget, FixedBudget)
        budget, heads = self._plan.method.budget, self.spans.lens.shape[1]
        seen = [real + self.spans.tail for real in self.real or [0] * len(self.spans.lens)]
        return torch.tensor([budget.limits(self._index, heads, real) for real in seen], device="cpu")

    def _settle(self, limits: Tensor, room: int, scale: float) -> Spans:
        """Keep the best `limits` [B, H] entries of each head, by the scores that stayed with them, completed."""
        assert isinstance(self.spans, Spans)
        tail = self.spans.tail
        settled = self.spans.settle(limits, room, partial(self._completed, self.spans, scale))
        self.real = [real + tail for real in self.real or [0] * len(self.spans.lens)]
        self.spans, self.kept = settled, settled.lens
        self._settled += tail
        return settled

    def _completed(self, spans: Spans, scale: float, row: int, head: int, span: slice) -> Tensor:
        """The scores of the entries of one head's `span`, with what depends on where the text ends now."""
        assert spans.scores is not None and spans.positions is not None
        key, value = spans.k[None, None, span], spans.v[None, None, span]
        end = self._settled + spans.tail
        prompt = PromptLayer(key, value, scale, length=end, rotation=self._plan.rotation)
        entries = Arrived(prompt, spans.positions[span], spans.scores[span])
        return self._plan.method.selector.at_eviction(self._index, head, entries)

    def _arrival_scores(self, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """What of the scores [B, H, n] of new tokens is final now. Rows without padding go together, others alone."""
        seen, selector = self.get_seq_length(), self._plan.method.selector
        whole = PromptLayer(key, value, scale, rotation=self._plan.rotation)
        if not any(self._padding):
            return selector.on_arrival(self._index, replace(whole, start=seen))
        rows = [
            replace(whole.part(slice(row, row + 1), slice(None)), start=seen - padding)
            for row, padding in enumerate(self._padding)
        ]
        return torch.cat([selector.on_arrival(self._index, row) for row in rows])

    def _continue(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Append k, v [B, H, n, d] and attend over everything held: [B, Hq, n, d]."""
        assert self.spans is not None
        new = key.shape[2]
        scores = None
        if self.spans.scores is not None:
            scores = self._arrival_scores(key, value, scale)
            # A step of decoding does not wait for the device; the same selector was checked on the prompt.
            if new > 1:
                check_shape(self._plan.method.selector, scores, key)
                self._shared.doubts.append(not_numbers(scores))
                self._check_doubts()
        if new > self.spans.room:
            self._make_room(new, scale)
        pool = self.spans.dtype
        states = query.to(pool), key.to(pool), value.to(pool)
        out = self.spans.extend(*states, scale, scores, self.get_seq_length(), self._shared.buffers)
        return out.to(value.dtype)

    def _make_room(self, new: int, scale: float) -> None:
        assert self.spans is not None
        try:
            if self._plan.decode_eviction and self.prompt_length:
                limits = self._limits()
                self._settle(limits, self._slack(_mean(limits)) + new, scale)
            else:
                # A part of a prompt needs no slack: its spans are laid again right after it.
                slack = self._slack(_mean(self.spans.lens) + self.spans.tail) if self.prompt_length else 0
                self.spans = self.spans.relaid(new + slack)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise CacheError(
                f"there is no memory for {new} more tokens in layer {self._index} ({error}); free some, or give "
                "decode_eviction=True, a smaller slack or a lower retention. rewind() goes back to the prompt."
            ) from error

    def crop(self, tokens_to_remove: int) -> None:
        """Cut `-tokens_to_remove` (<= 0, as in transformers >= 5.17) tokens off the tail.

        Raises CacheError where the cut would reach into what was compressed.
        """
        cut = -tokens_to_remove
        tail = self.spans.tail if self.spans is not None else 0
        if not 0 <= cut <= tail:
            raise CacheError(
                f"{cut} tokens cannot be cut off: only the {tail} after the compressed prompt can; "
                "give a number between minus that and 0."
            )
        self._arrived = None
        if self.spans is not None:
            self.spans.cut(cut)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i a copy of the row `beam_idx[i]`; rows in their place already are not copied."""
        rows = beam_idx.cpu()
        held = len(self.kept) if self._whole is None else self._whole.key.shape[0]
        if torch.equal(rows, torch.arange(held, device="cpu")):
            return
        if self._whole is not None:
            self._whole = self._whole.part(beam_idx, slice(None))
        if self.spans is not None:
            self.spans = self.spans.select(rows, self.spans.room)
            self.kept, self.real = self.kept[rows], [self.real[row] for row in rows.tolist()]
            self._padding = [self._padding[row] for row in rows.tolist()] if self._padding else []

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = len(self.kept) if self._whole is None else self._whole.key.shape[0]
        self.reorder_cache(torch.arange(rows, device="cpu").repeat_interleave(repeats))

    def offload(self) -> None:
        raise CacheError("RaggedCache does not offload; lower the retention instead.")

    def fork(self, shared: Shared) -> "RaggedLayer":
        """A copy with pools of its own, in a cache whose layers have `shared`."""
        twin = copy.copy(self)
        twin._shared = shared
        twin.spans = None if self.spans is None else self.spans.relaid(self.spans.room)
        return twin

    def state(self) -> dict[str, Tensor]:
        """What eviction left: the spans' state, kept [B, H], real [B] and the prompt's length [1]."""
        if self.spans is None or not self.prompt_length or self._settled != self.prompt_length:
            raise CacheError("there is no compressed prompt to save, or its answers were evicted together with it.")
        counts = {"real": self.real, "length": [self.prompt_length]}
        tensors = {name: torch.tensor(numbers, device="cpu") for name, numbers in counts.items()}
        return {**self.spans.state(), "kept": self.kept, **tensors}

    def restore(self, state: dict[str, Tensor], like: Tensor) -> None:
        """Take up what `state` gave, on the device and in the dtype of `like`."""
        self.lazy_initialization(like, like)
        self.kept, self.real = state["kept"], state["real"].tolist()
        if "k" in state:
            key, value = state["k"].to(like), state["v"].to(like)
            spans = Spans(self.kept, self._first_room(self.kept), key, value)
            spans.unpack(key, value)
            self.spans = spans
        else:
            self.spans = QuantizedSpans.restore(state, self.kept, self._first_room(self.kept), like)
        self.prompt_length = self._settled = int(state["length"])

    def nbytes(self) -> int:
        """Bytes of k and v storage really held, those of a prompt still being read included, with the
        queries that its method reads."""
        query = () if self._whole is None or self._whole.queries is None else (self._whole.queries,)
        spans = 0 if self.spans is None else self.spans.nbytes()
        return self._unread_nbytes() + sum(x.untyped_storage().nbytes() for x in query) + spans

    def _unread_nbytes(self) -> int:
        """Bytes of k and v of a prompt that has not ended."""
        parts = (self._whole.key, self._whole.value) if self._whole is not None else ()
        return sum(x.untyped_storage().nbytes() for x in parts)

    def full_nbytes(self) -> int:
        """Bytes of k and v of all tokens, had none been evicted."""
        if self.spans is None:
            return self._unread_nbytes()
        pools = self.spans if isinstance(self.spans, Spans) else self.spans.fresh
        entry = (pools.k.shape[-1] + pools.v.shape[-1]) * pools.k.element_size()
        return self.kept.numel() * self.get_seq_length() * entry


def _joined(tables: list[Tensor]) -> Tensor:
    """The rows of `tables` [., H, T] in one."""
    return tables[0] if len(tables) == 1 else torch.cat(tables)


def _behind_padding(scores: Tensor, first: int) -> Tensor:
    """`scores` [B, H, n] of the tokens after `first` ones of padding, which are to be chosen after everything else."""
    if not first:
        return scores
    scores = precise(scores)
    return pad(scores.clamp(min=torch.finfo(scores.dtype).min), (first, 0), value=-math.inf)


def _mean(counts: Tensor) -> int:
    """Entries a head, rounded down."""
    return int(counts.sum()) // max(1, counts.numel())


def check_state(state: dict[str, Tensor], tokens: int, spec: ModelSpec) -> None:
    """Raise ValueError, KeyError or QuantizationError unless `state` is what one layer of one compressed text of
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
        QuantizedSpans.check_state(state, kept, spec.head_dim)
