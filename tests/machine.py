"""Any order of everything that can be done with a cache, each step held against `dense`, which knows no cache."""

import copy
import math
import tempfile
from pathlib import Path

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import Qwen3Config, Qwen3ForCausalLM

from lkv.cache.ragged import RaggedCache
from lkv.context import Context
from lkv.methods.budget import Uniform
from lkv.methods.build import Method
from lkv.methods.selection import Selector
from tests.conftest import tiny_llama
from tests.dense import Dense, Row, kept_of
from tests.test_compression import Words

RETENTIONS = (0.3, 0.5, 1.0)
TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3}


def score(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Scores [..., T] that differ even between equal tokens."""
    return key.sum(-1) - 0.5 * value.square().sum(-1) + key[..., 0].sin()


class Own(Selector):
    """`score`, for the cache."""

    local = True

    def scores(self, layer, prompt):
        return score(prompt.key, prompt.value)


def _qwen(dtype: torch.dtype):
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=67, max_position_embeddings=512, initializer_range=0.3, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(dtype).eval()


class CacheMachine(RuleBasedStateMachine):
    """One cache, its forks and its saved copies, beside the rows that they should hold."""

    def __init__(self):
        super().__init__()
        self.cache: RaggedCache | None = None
        self.forks: list[tuple[RaggedCache, list[Row], list[int]]] = []
        self.steps = 0
        self.decided = True  # False once an eviction hung on less than rounding: the rest tells nothing

    @initialize(
        family=st.sampled_from(["llama", "qwen3"]),
        dtype=st.sampled_from(list(TOLERANCE)),
        retention=st.sampled_from(RETENTIONS),
        rows=st.integers(1, 3),
        tokens=st.integers(6, 24),
        padding=st.lists(st.integers(0, 3), min_size=3, max_size=3),
        parts=st.lists(st.integers(1, 9), max_size=3),
        mode=st.sampled_from(["whole", "parts", "streaming", "padded", "decode"]),
        slack=st.sampled_from([0, 1, 4, None]),
        seed=st.integers(0, 2**16),
    )
    def read(self, family, dtype, retention, rows, tokens, padding, parts, mode, slack, seed):
        self.model = _qwen(dtype) if family == "qwen3" else tiny_llama(dtype=dtype)
        self.dense, self.dtype, self.retention, self.mode = Dense(self.model), dtype, retention, mode
        self.draw = torch.Generator().manual_seed(seed)
        self.slack = 32 if slack is None else slack
        announced = {"prompt_tokens": tokens} if mode in ("parts", "streaming") else {}
        self.cache = RaggedCache(
            self.model, method=Method("own", Uniform(retention), Own()), slack=slack, streaming=mode == "streaming",
            decode_eviction=mode == "decode", **announced,
        )  # fmt: skip
        lengths = [tokens - (pad if mode == "padded" else 0) for pad in padding[:rows]]
        self.rows = [Row(self._ids(length)) for length in lengths]
        self.padding = [tokens - length for length in lengths]
        if mode == "padded":
            ids = torch.tensor([[0] * pad + row.ids for pad, row in zip(self.padding, self.rows, strict=True)])
            mask = (torch.arange(tokens)[None] >= torch.tensor(self.padding)[:, None]).long()
            self.model(ids, attention_mask=mask, position_ids=_positions(mask), past_key_values=self.cache)
            self._evict_all()
        else:
            self._read_in_parts(tokens, parts if mode in ("parts", "streaming") else [])
        self.prompt = tokens

    def _read_in_parts(self, tokens: int, parts: list[int]) -> None:
        text, place = torch.tensor([row.ids for row in self.rows]), 0
        whole = self.rows
        for size in [*parts, tokens]:
            end = min(tokens, place + size)
            if end == place:
                break
            self.rows = [Row(row.ids[:end], before.hidden) for row, before in zip(whole, self.rows, strict=True)]
            self.model(text[:, place:end], past_key_values=self.cache, use_cache=True)
            place = end
            if self.mode == "streaming" or end == tokens:
                self._evict_all()

    def _evict_all(self) -> None:
        for row in self.rows:
            self._evict(row)
        self.room = self.slack if self.mode == "decode" else math.inf
        if self.mode == "decode" and self.cache.plan.slack is None:
            self.room = math.inf  # as much as no test uses up

    def _evict(self, row: Row) -> None:
        """Hide all but the best floor(r t) of what each head still holds, from the next token on."""
        tokens = len(row.ids)
        gone = [[set() for _ in range(2)] for _ in range(self.model.config.num_hidden_layers)]
        for _, table in row.hidden:
            for layer, sets in enumerate(table):
                for head, places in enumerate(sets):
                    gone[layer][head] |= places
        for layer, (key, value) in enumerate(self.dense.read(row)[1]):
            for head in range(2):
                alive = set(range(tokens)) - gone[layer][head]
                count = int(self.retention * tokens + 1e-6)
                kept, margin = kept_of(score(key[head], value[head]), alive, count)
                self.decided &= margin > 1e-3
                gone[layer][head] |= alive - kept
        row.hidden.append((tokens, gone))

    def _ids(self, count: int) -> list[int]:
        return torch.randint(3, 67, (count,), generator=self.draw).tolist()

    @precondition(lambda self: self.cache is not None and self.decided and len(self.rows[0].ids) < 60)
    @rule(tokens=st.integers(1, 5))
    def feed(self, tokens):
        """What follows the prompt, checked row by row."""
        if self.mode == "decode" and tokens > self.room:
            for row in self.rows:
                self._evict(row)
            self.room = self.slack + tokens
        self.room -= tokens
        new = [self._ids(tokens) for _ in self.rows]
        for row, ids in zip(self.rows, new, strict=True):
            row.ids += ids
        self._check(self.cache, self.rows, self.padding, new)

    @rule()
    def wait(self):
        """Nothing: some rule must always be possible."""

    def _check(self, cache, rows, padding, new) -> None:
        if not self.decided:
            return
        held = cache.get_seq_length()
        count = len(new[0])
        mask = (torch.arange(held + count)[None] >= torch.tensor(padding)[:, None]).long()
        found = self.model(
            torch.tensor(new), attention_mask=mask, position_ids=_positions(mask)[:, held:], past_key_values=cache
        ).logits
        for own, row in zip(found, rows, strict=True):
            expected = self.dense.read(row)[0][-count:]
            scale = max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(own / scale, expected / scale, atol=TOLERANCE[self.dtype], rtol=0)
        self.steps += count * len(rows)

    @precondition(lambda self: self.cache is not None and self.decided and self.mode != "decode")
    @rule(share=st.floats(0, 1))
    def crop(self, share):
        tail = self.cache.get_seq_length() - self.prompt
        cut = int(share * tail)
        self.cache.crop(-cut)
        for row in self.rows:
            row.ids = row.ids[: len(row.ids) - cut]

    @precondition(lambda self: self.cache is not None and self.decided and self.mode != "decode")
    @rule()
    def rewind(self):
        tail = self.cache.get_seq_length() - self.prompt
        self.cache.rewind()
        for row in self.rows:
            row.ids = row.ids[: len(row.ids) - tail]

    @precondition(lambda self: self.cache is not None and self.decided)
    @rule(order=st.lists(st.integers(0, 2), min_size=1, max_size=3), how=st.sampled_from(["select", "reorder"]))
    def choose_rows(self, order, how):
        size = len(self.rows) if how == "reorder" else len(order)
        order = [order[i % len(order)] % len(self.rows) for i in range(size)]
        (self.cache.reorder_cache if how == "reorder" else self.cache.batch_select_indices)(torch.tensor(order))
        self.rows = [self.rows[i].copy() for i in order]
        self.padding = [self.padding[i] for i in order]

    @precondition(lambda self: self.cache is not None and self.decided and len(self.rows) < 3)
    @rule(repeats=st.integers(1, 2))
    def repeat_rows(self, repeats):
        self.cache.batch_repeat_interleave(repeats)
        self.rows = [row.copy() for row in self.rows for _ in range(repeats)]
        self.padding = [pad for pad in self.padding for _ in range(repeats)]

    @precondition(lambda self: self.cache is not None and self.decided and len(self.forks) < 3)
    @rule(deep=st.booleans())
    def fork(self, deep):
        twin = copy.deepcopy(self.cache) if deep else self.cache.fork()
        self.forks.append((twin, [row.copy() for row in self.rows], list(self.padding)))

    @precondition(lambda self: self.forks and self.decided and self.mode != "decode")
    @rule()
    def use_a_fork(self):
        cache, rows, padding = self.forks.pop()
        new = [self._ids(2) for _ in rows]
        for row, ids in zip(rows, new, strict=True):
            row.ids += ids
        self._check(cache, rows, padding, new)

    @precondition(
        lambda self: self.cache is not None and self.decided and len(self.rows) == 1 and self.mode in ("whole", "parts")
    )
    @rule()
    def save_and_load(self):
        self.rewind()
        ids = self.rows[0].ids
        about = {"method": "knorm", "retention": self.retention, "budget_tokens": None, "bits": None, "policy": None}
        context = Context(self.model, Words(), list(ids), self.cache, {**about, "text_sha256": ""})
        with tempfile.TemporaryDirectory() as folder:
            context.save(Path(folder) / "context.kv")
            self.cache = Context.load(Path(folder) / "context.kv", self.model, Words()).cache

    @precondition(lambda self: self.cache is not None and self.decided and self.mode in ("whole", "parts", "padded"))
    @rule(beams=st.sampled_from([1, 2]), tokens=st.integers(1, 4))
    def generate(self, beams, tokens):
        """A greedy or beam-searched turn on a copy: its ids are the reference's own."""
        if len(self.rows) > 1 or self.padding[0] or len(self.rows[0].ids) > 50:
            return
        cache, row = self.cache.fork(), self.rows[0].copy()
        row.ids += self._ids(2)
        out = self.model.generate(
            torch.tensor([row.ids]), past_key_values=cache, max_new_tokens=tokens, do_sample=False, num_beams=1,
            eos_token_id=None, pad_token_id=0,
        )[0].tolist()  # fmt: skip
        for token in out[len(row.ids) :]:
            logits = self.dense.read(row)[0][-1]
            # Where two tokens are all but equal either may be chosen.
            assert float(logits.max() - logits[token]) <= 2 * TOLERANCE[self.dtype] * max(
                1.0, float(logits.abs().max())
            )
            row.ids.append(token)
        self.steps += tokens

    @invariant()
    def lengths_and_bytes(self):
        if self.cache is None or not self.decided:
            return
        assert self.cache.get_seq_length() == len(self.rows[0].ids) + self.padding[0]
        size = self.model.dtype.itemsize
        entries = sum(
            int((layer.spans.lens + layer.spans.tail + layer.spans.room).sum()) for layer in self.cache.ragged
        )
        scores = 8 * entries if self.cache.ragged[0].spans.scores is not None else 0
        assert self.cache.nbytes() == entries * 2 * 8 * size + scores


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)
