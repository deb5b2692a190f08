"""Any order of everything that can be done with a cache, each step held against `dense`, which knows no cache."""

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.context import Context
from lkv.methods.base import TierBudget
from lkv.methods.budgets import FixedBudget
from lkv.methods.method import Method
from lkv.methods.selectors import Selector
from lkv.methods.targets import Precision
from tests.conftest import tiny_llama
from tests.context.test_compression import Words
from tests.dense import Dense, Row, beams
from tests.eviction_reference import HALF, TOLERANCE, EvictionReference, place_score, score

RETENTIONS = (0.3, 0.5, 1.0)
WINDOW = 9
# Bits of k and v of each tier, best first: as `bits` has them, and as a memory budget may.
TIERS = ([(8, 8)], [(-8, -8)], [(4, 4)], [(3, 3)], [(8, 4), (4, 3)], [(16, 16), (8, 8), (4, 4)])


class Own(Selector):
    """`score`, for the cache."""

    is_local = True

    def scores(self, layer, prompt):
        return score(prompt.key, prompt.value)


class ByPlace(Selector):
    """`place_score`, for the cache."""

    is_local = True

    def scores(self, layer, prompt):
        batch, heads, tokens, _ = prompt.key.shape
        positions = torch.arange(prompt.start, prompt.start + tokens)
        return place_score(layer, heads, positions).expand(batch, -1, -1)


class Uneven(FixedBudget):
    """Heads that keep different shares, one of them nothing of a short text."""

    def __init__(self, retention: float, part: float = 1.0):
        self.retention = retention * part

    def ratios(self, layer, heads, tokens):
        return [min(1.0, self.retention * share) for share in ((1.0, 0.1), (1.4, 0.7), (0.5, 1.2))[layer]][:heads]


@cache
def build(family: str, dtype: torch.dtype):
    """A tiny random model of `family`, never written to."""
    spread = 0.1 if dtype in HALF else 0.3
    if family == "llama":
        return tiny_llama(dtype=dtype, initializer_range=spread)
    shape = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 67, "max_position_embeddings": 512,
        "initializer_range": spread, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if family == "sliding":
        kinds = ["full_attention", "sliding_attention", "full_attention"]
        shape |= {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": kinds}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape)) if family == "qwen2" else Qwen3ForCausalLM(Qwen3Config(**shape))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).eval()


class CacheMachine(RuleBasedStateMachine):
    """One cache, its forks and its saved copies, beside the rows that they should hold."""

    def __init__(self):
        super().__init__()
        self.cache: RaggedCache | None = None
        self.forks: list[tuple[RaggedCache, list[Row], list[int]]] = []
        self.steps = 0  # rows of logits compared
        self.operations = 0  # that did something

    @initialize(
        family=st.sampled_from(["llama", "qwen2", "qwen3", "sliding"]),
        dtype=st.sampled_from(list(TOLERANCE)),
        by_place=st.booleans(),
        retention=st.sampled_from(RETENTIONS),
        rows=st.integers(1, 3),
        tokens=st.integers(6, 24),
        padding=st.lists(st.integers(0, 3), min_size=3, max_size=3),
        parts=st.lists(st.integers(1, 9), max_size=3),
        mode=st.sampled_from(["whole", "parts", "streaming", "padded", "decode", "ahead"]),
        slack=st.sampled_from([0, 1, 4, None]),
        tiers=st.sampled_from([None, None, *TIERS]),
        seed=st.integers(0, 2**16),
    )
    def read(self, family, dtype, by_place, retention, rows, tokens, padding, parts, mode, slack, tiers, seed):
        self.model = build(family, dtype)
        self.dense, self.dtype, self.mode = Dense(self.model), dtype, mode
        self.draw = torch.Generator().manual_seed(seed)
        self.tiers = tiers
        # Where k and v are rounded to 16 bits, so are scores made of them.
        by_place, count = by_place or dtype in HALF, len(tiers or [None])
        budgets = [Uneven(retention, (number + 1) / count) for number in range(count)]
        self.reference = EvictionReference(self.dense, dtype, by_place, budgets, tiers)
        method = Method("own", budgets[-1], ByPlace() if by_place else Own())
        self.bits = {-8: "fp8"}.get(tiers[0][0], tiers[0][0]) if tiers and count == 1 else None
        if count > 1:
            parts_of = zip(tiers, budgets, strict=True)
            method = replace(method, tiers=tuple(TierBudget(Precision(*bits), budget) for bits, budget in parts_of))
        self.prompt = tokens - 2 if mode == "ahead" else tokens
        announced = {"prompt_tokens": self.prompt} if mode in ("parts", "streaming", "ahead") else {}
        self.cache = RaggedCache(
            self.model, method=method, slack=slack, streaming=mode == "streaming", decode_eviction=mode == "decode",
            bits=self.bits, **announced,
        )  # fmt: skip
        self.is_croppable = mode != "decode" and family != "sliding"
        # Windows are kept as they were at the end of the prompt, if a pass ended there.
        self.is_rewindable = self.is_croppable or (family == "sliding" and mode not in ("decode", "ahead"))
        lengths = [tokens - (pad if mode == "padded" else 0) for pad in padding[:rows]]
        self.rows = [Row(self._ids(length)) for length in lengths]
        self.padding = [tokens - length for length in lengths]
        if mode == "padded":
            ids = torch.tensor([[0] * pad + row.ids for pad, row in zip(self.padding, self.rows, strict=True)])
            mask = self._mask(tokens)
            self.model(ids, attention_mask=mask, position_ids=_positions(mask), past_key_values=self.cache)
            self._evict_all()
        else:
            self._read_in_parts(tokens, parts if mode in ("parts", "streaming") else [])
        self.operations += 1

    def _read_in_parts(self, tokens: int, parts: list[int]) -> None:
        text, place = torch.tensor([row.ids for row in self.rows]), 0
        whole = self.rows
        for size in [*parts, tokens]:
            end = min(tokens, place + size)
            if end == place:
                break
            late = end - self.prompt if end == tokens else 0
            read = zip(whole, self.rows, strict=True)
            self.rows = [Row(row.ids[: end - late], old.hidden, old.stored) for row, old in read]
            self.model(text[:, place:end], past_key_values=self.cache, use_cache=True)
            place = end
            if self.mode == "streaming" or end == tokens:
                self._evict_all()
        for row, full in zip(self.rows, whole, strict=True):
            row.ids = full.ids

    def _evict_all(self) -> None:
        for row in self.rows:
            self.reference.evict(row, self.dense.full_layers)

    def _ids(self, count: int) -> list[int]:
        return torch.randint(3, 67, (count,), generator=self.draw).tolist()

    def _mask(self, length: int, padding: list[int] | None = None) -> torch.Tensor:
        return (torch.arange(length)[None] >= torch.tensor(padding or self.padding)[:, None]).long()

    @contextmanager
    def _watched(self, cache: RaggedCache) -> Iterator[list[tuple[int, list[int]]]]:
        """Of each forward pass in the block how many tokens it reads and the room that each evicted layer has."""
        passes: list[tuple[int, list[int]]] = []

        def note(_, args, kwargs):
            ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
            passes.append((ids.shape[1], [layer.store.free_slots for layer in cache.ragged_layers]))

        handle = self.model.model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield passes
        finally:
            handle.remove()

    def _replay(self, row: Row, ids: list[int], passes: list[tuple[int, list[int]]]) -> None:
        """Let `row` read `ids` as the cache did: in decode eviction a layer evicts where its room does not suffice."""
        place = 0
        for tokens, rooms in passes:
            short = [layer for layer, room in zip(self.dense.full_layers, rooms, strict=True) if room < tokens]
            if short and self.mode == "decode":
                self.reference.evict(row, short)
            row.ids = row.ids + ids[place : place + tokens]
            place += tokens
        assert place == len(ids)

    @precondition(lambda self: self._lives and self._length < 60)
    @rule(tokens=st.integers(1, 5))
    def feed(self, tokens):
        """What follows the prompt, checked row by row."""
        self._feed(self.cache, self.rows, self.padding, tokens)

    @rule()
    def wait(self):
        """Nothing: some rule must always be possible."""

    def _feed(self, cache, rows, padding, tokens) -> None:
        new = [self._ids(tokens) for _ in rows]
        held = cache.get_seq_length()
        mask = self._mask(held + tokens, padding)
        with self._watched(cache) as passes:
            found = self.model(
                torch.tensor(new), attention_mask=mask, position_ids=_positions(mask)[:, held:], past_key_values=cache
            ).logits
        for own, row, ids in zip(found, rows, new, strict=True):
            self._replay(row, ids, passes)
            self._compare(own, row)
        self.operations += 1

    def _compare(self, found: torch.Tensor, row: Row) -> None:
        """Logits [n, V] of the last n tokens of `row`."""
        if not self.reference.is_decided:
            return
        expected = self.dense.read(row)[0][-len(found) :]
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found.to(expected) / scale, expected / scale, atol=self.reference.tolerance, rtol=0)
        self.steps += len(found)

    @precondition(lambda self: self._lives and self.is_croppable)
    @rule(share=st.floats(0, 1))
    def crop(self, share):
        tail = self.cache.get_seq_length() - self.prompt
        cut = int(share * tail)
        self.cache.crop(-cut)
        for row in self.rows:
            row.ids = row.ids[: len(row.ids) - cut]
        self.operations += 1

    @precondition(lambda self: self._lives and self.is_rewindable)
    @rule()
    def rewind(self):
        tail = self.cache.get_seq_length() - self.prompt
        self.cache.rewind()
        for row in self.rows:
            row.ids = row.ids[: len(row.ids) - tail]
        self.operations += 1

    @precondition(lambda self: self._lives)
    @rule(order=st.lists(st.integers(0, 2), min_size=1, max_size=3), how=st.sampled_from(["select", "reorder"]))
    def choose_rows(self, order, how):
        size = len(self.rows) if how == "reorder" else len(order)
        order = [order[i % len(order)] % len(self.rows) for i in range(size)]
        (self.cache.reorder_cache if how == "reorder" else self.cache.batch_select_indices)(torch.tensor(order))
        self.rows = [self.rows[i].copy() for i in order]
        self.padding = [self.padding[i] for i in order]
        self.operations += 1

    @precondition(lambda self: self._lives and len(self.rows) < 3)
    @rule(repeats=st.integers(1, 2))
    def repeat_rows(self, repeats):
        self.cache.batch_repeat_interleave(repeats)
        self.rows = [row.copy() for row in self.rows for _ in range(repeats)]
        self.padding = [pad for pad in self.padding for _ in range(repeats)]
        self.operations += 1

    @precondition(lambda self: self._lives and len(self.forks) < 3)
    @rule(deep=st.booleans())
    def fork(self, deep):
        twin = copy.deepcopy(self.cache) if deep else self.cache.fork()
        self.forks.append((twin, [row.copy() for row in self.rows], list(self.padding)))
        self.operations += 1

    @precondition(lambda self: self._lives and self.forks)
    @rule()
    def use_a_fork(self):
        self._feed(*self.forks.pop(), 2)

    @precondition(lambda self: self._lives and self.forks)
    @rule()
    def go_on_with_a_fork(self):
        """The fork and the cache change places."""
        fork = self.forks.pop()
        self.forks.append((self.cache, self.rows, self.padding))
        self.cache, self.rows, self.padding = fork
        self.operations += 1

    @precondition(lambda self: self._lives and len(self.rows) == 1 and self.is_rewindable and self.mode != "padded")
    @rule()
    def save_and_load(self):
        self.rewind()
        ids = self.rows[0].ids
        about = {"method": "knorm", "memory": None, "retention": 0.5, "budget_tokens": None, "bits": self.bits}
        about |= {"policy": None, "protected_tokens": None, "text_sha256": "", "kind": "text"}
        context = Context(self.model, Words(), list(ids), self.cache, about)
        with tempfile.TemporaryDirectory() as folder:
            context.save(Path(folder) / "context.kv")
            self.cache = Context.load(Path(folder) / "context.kv", self.model, Words()).cache

    @precondition(lambda self: self._lives and self._length < 50)
    @rule(tokens=st.integers(1, 4), sampled=st.booleans(), on_a_copy=st.booleans())
    def generate(self, tokens, sampled, on_a_copy):
        """A turn of `model.generate`, greedy or sampled, over the whole batch."""
        cache = self.cache.fork() if on_a_copy else self.cache
        rows = [row.copy() for row in self.rows]
        out, passes = self._generated(cache, tokens, do_sample=sampled, temperature=1.5 if sampled else None)
        logits = torch.stack(out.logits, 1)
        for number, row in enumerate(rows):
            # The last token of an answer is never read.
            self._replay(row, out.sequences[number, self._length : -1].tolist(), passes)
            self._compare(logits[number], row)
        if not on_a_copy:
            self.rows = rows
        self.operations += 1

    def _generated(self, cache, tokens, **how):
        """What generate gives for two new ids a row, and the passes that it took."""
        padded = [[0] * pad + row.ids + self._ids(2) for pad, row in zip(self.padding, self.rows, strict=True)]
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=self.draw)))
        with self._watched(cache) as passes:
            out = self.model.generate(
                torch.tensor(padded), attention_mask=self._mask(len(padded[0])), past_key_values=cache,
                max_new_tokens=tokens, eos_token_id=None, pad_token_id=0, output_logits=True, output_scores=True,
                return_dict_in_generate=True, **how,
            )  # fmt: skip
        return out, passes

    @precondition(lambda self: self._lives and len(self.rows) == 1 and self._length < 50)
    @rule(width=st.integers(2, 3), tokens=st.integers(1, 3))
    def search_beams(self, width, tokens):
        """Beam search on a copy: the sequence found, and its probability under the reference."""
        cache, row = self.cache.fork(), self.rows[0].copy()
        cache.batch_repeat_interleave(width)
        out, passes = self._generated(
            cache, tokens, do_sample=False, num_beams=width, length_penalty=0.0, temperature=None
        )
        ids = out.sequences[0, self._length :].tolist()
        asked, answer = ids[:2], ids[2:]
        begun = row.copy()
        begun.ids += asked
        self._replay(row, ids[:-1], passes)
        if self.reference.is_decided:
            logits = self.dense.read(row)[0][-len(answer) :].double()
            expected = float(torch.log_softmax(logits, -1)[range(len(answer)), answer].sum())
            slip = 2 * len(answer) * self.reference.tolerance * max(1.0, float(logits.abs().max()))
            assert abs(float(out.sequences_scores[0]) - expected) <= slip
            if self.mode != "decode":
                best, margin = beams(self.dense, begun, width, tokens)
                assert best == answer or margin <= 2 * slip
        self.steps += len(answer)
        self.operations += 1

    @property
    def _lives(self) -> bool:
        return self.cache is not None and self.reference.is_decided

    @property
    def _length(self) -> int:
        """Positions of the text, padding included."""
        return len(self.rows[0].ids) + self.padding[0]

    @invariant()
    def lengths_and_bytes(self):
        if not self._lives:
            return
        assert self.cache.get_seq_length() == self._length
        size = self.dtype.itemsize
        for number, (layer, kept) in enumerate(zip(self.cache.ragged_layers, self._kept(), strict=True)):
            assert layer.store.lens.tolist() == kept
            room = layer.store.appended_tokens + layer.store.free_slots
            fresh = len(kept) * len(kept[0]) * room * 2 * 8 * size
            counts = [count for row in kept for count in row]
            scored = 8 if layer.store.scores is not None else 0
            fresh += len(counts) * room * scored
            if not self.tiers:
                assert layer.nbytes() == sum(counts) * (2 * 8 * size + scored) + fresh
                continue
            # The mean and the scale of each channel of k, the codes, and a norm for each entry's k and v.
            stored = [one for row in self.rows for one in row.latest(self.dense.full_layers[number])]
            entries = [bits for one in stored for bits in one.bits]
            assert len(entries) == sum(counts)
            codes = sum(sum(map(abs, bits)) + 4 if bits[0] < 16 else 2 * 8 * size for bits in entries)
            assert layer.nbytes() == 4 * 8 * len(counts) + codes + scored * len(entries) + fresh

    def _kept(self) -> list[list[list[int]]]:
        """Entries that are settled, [L][B][H], by the rows' own account."""
        found = []
        for layer, own in zip(self.dense.full_layers, self.cache.ragged_layers, strict=True):
            tail = own.store.appended_tokens
            gone = [row.gone(self.dense.layers, self.dense.heads)[layer] for row in self.rows]
            found.append([[len(row.ids) - tail - len(places) for places in sets]
                          for row, sets in zip(self.rows, gone, strict=True)])  # fmt: skip
        return found


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)
