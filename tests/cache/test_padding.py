"""Rows of a batch whose tails differ in length: turns padded on either side, answers that end at different tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import DynamicCache

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import CacheError, PromptError
from lkv.hf.spec import inspect_model
from lkv.policy.policy import Policy
from lkv.policy.scorer_inputs import ScorerInputs
from tests.cache.helpers import METHOD, ids, padded
from tests.conftest import tiny_llama
from tests.masked import hidden_from_continuation


class Batch:
    """Rows of a compressed batch beside what each has really read: its prompt, and what followed without padding."""

    def __init__(self, model, prompts, **options):
        self.model, self.prompts = model, prompts
        # The outputs of padding are nobody's; all others must agree to this.
        self.close = 1e-9 if model.dtype == torch.float64 else 1e-3
        self.cache = RaggedCache(model, method=METHOD, **options)
        batch = padded(prompts)
        self.mask = batch["attention_mask"]
        self.texts = [prompt[0].tolist() for prompt in prompts]
        model(**batch, position_ids=self._positions(0), past_key_values=self.cache, use_cache=True)
        self.gone = [self._evicted(row) for row in range(len(prompts))]

    def _positions(self, held: int) -> torch.Tensor:
        return (self.mask.cumsum(-1) - 1).clamp(min=0)[:, held:]

    def _evicted(self, row: int) -> list[torch.Tensor]:
        """[1, H, T] a layer: which tokens of the row's prompt no entry of its spans has the k of."""
        full = DynamicCache()
        self.model(self.prompts[row], past_key_values=full, use_cache=True)
        gone = []
        for layer, whole in zip(self.cache.ragged_layers, full.layers, strict=True):
            hidden = torch.ones(whole.keys.shape[:3], dtype=torch.bool)
            for head, keys in enumerate(whole.keys[0]):
                start = int(layer.store.starts[row, head])
                held = layer.store.k[start : start + int(layer.store.lens[row, head])]
                hidden[0, head] = ~((keys[:, None] - held[None]).abs().amax(-1) < 0.1 * self.close).any(1)
            assert int((~hidden).sum()) == int(layer.store.lens[row].sum())
            gone.append(hidden)
        return gone

    def feed(self, tokens: torch.Tensor, real: torch.Tensor) -> None:
        """Feed `tokens` [B, n], of which `real` [B, n] are some, and compare each real one's logits with the row alone,
        read by the stock model with a mask over what was evicted."""
        held = self.mask.shape[1]
        self.mask = torch.cat([self.mask, real.long()], 1)
        out = self.model(
            tokens, attention_mask=self.mask, position_ids=self._positions(held), past_key_values=self.cache
        )
        assert bool(out.logits.isfinite().all())
        for row, wanted in enumerate(real):
            self.texts[row] += tokens[row, wanted].tolist()
            alone = self.alone(row)[-int(wanted.sum()) :]
            torch.testing.assert_close(out.logits[row, wanted], alone, atol=self.close, rtol=self.close)

    def alone(self, row: int) -> torch.Tensor:
        """Logits [T, V] of the row's text."""
        with hidden_from_continuation(self.model, self.gone[row], self.prompts[row].shape[1]):
            return self.model(torch.tensor([self.texts[row]])).logits[0]

    def entries(self) -> list[int]:
        """Appended to each row of each span."""
        return [len(text) - prompt.shape[1] for text, prompt in zip(self.texts, self.prompts, strict=True)]


def reals(lengths: list[int], side: str) -> torch.Tensor:
    """Which of the tokens of a turn are real where rows have `lengths` of them, padded on the left, right or both."""
    longest = max(lengths)
    real = torch.zeros(len(lengths), longest, dtype=torch.bool)
    for row, length in enumerate(lengths):
        start = {"left": longest - length, "right": 0, "both": (longest - length) // 2}[side]
        real[row, start : start + length] = True
    return real


@pytest.mark.slow
@settings(max_examples=12)
@given(
    st.lists(st.integers(4, 24), min_size=2, max_size=3),
    st.lists(st.lists(st.integers(1, 6), min_size=3, max_size=3), min_size=1, max_size=3),
    st.sampled_from(["left", "right", "both"]),
    st.integers(0, 7),
    st.integers(0, 9),
)
def test_each_row_goes_on_as_if_alone(lengths, turns, side, slack, seed):
    model = tiny_llama()
    with torch.no_grad():
        batch = Batch(model, [ids(1, length, seed + row) for row, length in enumerate(lengths)], slack=slack)
        for number, turn in enumerate(turns):
            real = reals(turn[: len(lengths)], side)
            batch.feed(ids(len(lengths), real.shape[1], seed + 50 + number), real)
            # Then steps of decoding, as between two turns of a chat.
            for step in range(2):
                batch.feed(ids(len(lengths), 1, seed + 90 + step), torch.ones(len(lengths), 1, dtype=torch.bool))
    for layer in batch.cache.ragged_layers:
        assert (layer.store.counts - layer.store.lens).tolist() == [[count] * 2 for count in batch.entries()]
        assert layer.get_seq_length() == batch.mask.shape[1]


@torch.no_grad()
def test_more_tokens_than_a_row_holds():
    """A head that keeps nothing, in a row with a single new token beside a row of many."""
    model = tiny_llama()
    batch = Batch(model, [ids(1, 9), ids(1, 5, 1)])
    batch.feed(ids(2, 300, 2), reals([300, 1], "left"))
    batch.feed(ids(2, 3, 4), reals([1, 3], "right"))


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_what_a_later_mask_hides_is_let_go(implementation):
    """An answer that ends early goes on as padding until the longest has ended; the next turn's mask hides that."""
    model = tiny_llama(dtype=torch.float64 if implementation == "sdpa" else torch.float32)
    model.set_attn_implementation(implementation)
    batch = Batch(model, [ids(1, 20), ids(1, 12, 1), ids(1, 15, 2)])
    batch.feed(ids(3, 6, 3), reals([6, 6, 6], "left"))
    for row, ended in ((0, 2), (2, 4)):
        batch.mask[row, -6 + ended :] = 0
        batch.texts[row] = batch.texts[row][: ended - 6]
    batch.feed(ids(3, 5, 4), reals([3, 5, 2], "left"))
    batch.feed(ids(3, 1, 5), reals([1, 1, 1], "left"))
    batch.feed(ids(3, 2, 6), reals([2, 1, 2], "left"))
    assert [len(text) for text in batch.texts] == [20 + 2 + 3 + 1 + 2, 12 + 6 + 5 + 1 + 1, 15 + 4 + 2 + 1 + 2]
    for layer in batch.cache.ragged_layers:
        assert (layer.store.counts - layer.store.lens).tolist() == [[count] * 2 for count in batch.entries()]


@torch.no_grad()
def test_rows_are_taken_cut_and_forked_with_their_tails():
    model = tiny_llama()
    prompts = [ids(1, 20), ids(1, 12, 1), ids(1, 15, 2)]
    batch = Batch(model, prompts, slack=3)
    batch.feed(ids(3, 6, 3), reals([2, 6, 4], "left"))
    # Cut into the padding of some rows: two tokens stay of the second row, none of the others.
    batch.cache.crop(-4)
    batch.mask, batch.texts[1] = batch.mask[:, :-4], batch.texts[1][:-4]
    batch.texts[0], batch.texts[2] = batch.texts[0][:20], batch.texts[2][:15]
    assert batch.entries() == [0, 2, 0]
    batch.feed(ids(3, 5, 4), reals([5, 1, 3], "right"))
    fork, mask, texts = batch.cache.fork(), batch.mask, [list(text) for text in batch.texts]
    batch.feed(ids(3, 4, 5), reals([1, 4, 2], "left"))
    batch.cache, batch.mask, batch.texts = fork, mask, texts
    order = torch.tensor([2, 0, 0])
    batch.cache.batch_select_indices(order)
    for name in ("prompts", "texts", "gone"):
        setattr(batch, name, [list(x) if name == "texts" else x for x in (getattr(batch, name)[i] for i in order)])
    batch.mask = batch.mask[order]
    batch.feed(ids(3, 4, 6), reals([4, 1, 2], "left"))
    batch.cache.rewind()
    batch.mask = batch.mask[:, :20]
    batch.texts = [prompt[0].tolist() for prompt in batch.prompts]
    batch.feed(ids(3, 3, 7), reals([1, 2, 3], "left"))


@torch.no_grad()
def test_a_row_alone_goes_on_without_the_padding_of_its_batch():
    model = tiny_llama()
    batch = Batch(model, [ids(1, 20), ids(1, 12, 1)])
    batch.feed(ids(2, 6, 3), reals([6, 6], "left"))
    batch.mask[0, -4:] = 0
    batch.texts[0] = batch.texts[0][:-4]
    batch.cache.batch_select_indices(torch.tensor([0]))
    for name in ("prompts", "texts", "gone"):
        setattr(batch, name, getattr(batch, name)[:1])
    batch.mask = batch.mask[:1]
    batch.feed(ids(1, 5, 4), reals([5], "left"))


@torch.no_grad()
def test_two_turns_of_generate_equal_each_row_alone():
    model = tiny_llama(eos_token_id=7)
    prompts, questions = [ids(1, 20), ids(1, 12, 1), ids(1, 15, 2)], [ids(1, n, 20 + n) for n in (5, 2, 3)]
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    cache = RaggedCache(model, method=METHOD)
    first = padded(prompts)
    out = model.generate(**first, past_key_values=cache, **asked)
    # The last token of an answer is never read; it begins the next turn.
    answers = out[:, first["input_ids"].shape[1] :]
    ended = (answers == 7).long().cumsum(1) - (answers == 7).long() > 0
    mask = torch.cat([first["attention_mask"], (~ended).long()], 1)
    second = padded(questions)
    again = model.generate(
        torch.cat([out, second["input_ids"]], 1), attention_mask=torch.cat([mask, second["attention_mask"]], 1),
        past_key_values=cache, **asked,
    )[:, out.shape[1] + second["input_ids"].shape[1] :]  # fmt: skip
    for row, (prompt, question) in enumerate(zip(prompts, questions, strict=True)):
        alone = RaggedCache(model, method=METHOD)
        text = model.generate(prompt, past_key_values=alone, **asked)
        whole = torch.cat([text, question], 1)
        single = model.generate(whole, attention_mask=torch.ones_like(whole), past_key_values=alone, **asked)
        single = single[0, text.shape[1] + question.shape[1] :]
        assert again[row, : len(single)].tolist() == single.tolist()


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, "fp8", 3])
def test_quantised_rows_equal_each_row_alone(bits):
    model = tiny_llama(dtype=torch.float32, head_dim=32, hidden_size=128)
    prompts, real = [ids(1, 40), ids(1, 25, 1)], reals([1, 4], "left")
    batch, tokens, last = padded(prompts), ids(2, 4, 2), ids(2, 1, 3)
    cache = RaggedCache(model, method=METHOD, bits=bits)
    mask = torch.cat([batch["attention_mask"], real.long(), torch.ones(2, 1, dtype=torch.long)], 1)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    model(**batch, position_ids=places[:, :40], past_key_values=cache, use_cache=True)
    model(tokens, attention_mask=mask[:, :44], position_ids=places[:, 40:44], past_key_values=cache)
    logits = model(last, attention_mask=mask, position_ids=places[:, 44:], past_key_values=cache).logits
    for row, prompt in enumerate(prompts):
        alone = RaggedCache(model, method=METHOD, bits=bits)
        model(prompt, past_key_values=alone, use_cache=True)
        model(tokens[row : row + 1, real[row]], past_key_values=alone)
        single = model(last[row : row + 1], past_key_values=alone).logits
        torch.testing.assert_close(logits[row], single[0], atol=2e-3, rtol=2e-3)


def test_padding_that_cannot_be_served_is_refused():
    model = tiny_llama()
    batch = padded([ids(1, 20), ids(1, 20, 1)])
    mask = torch.ones(2, 24, dtype=torch.long)
    cache = RaggedCache(model, method=METHOD)
    model(**batch, past_key_values=cache)
    mask[1, 20:] = 0
    with pytest.raises(PromptError, match="a row of the batch is nothing but padding"):
        model(ids(2, 4), attention_mask=mask, past_key_values=cache)
    cache.rewind()
    with pytest.raises(PromptError, match="a row of the batch is nothing but padding"):
        model(ids(2, 1), attention_mask=mask[:, :21], past_key_values=cache)
    mask[1, 22:] = 1
    for options, message in (
        ({"decode_eviction": True}, "decode_eviction does not take padding"),
        ({"streaming": True, "prompt_tokens": 24}, "streaming does not take padding"),
    ):
        cache = RaggedCache(model, method=METHOD, **options)
        model(**batch, past_key_values=cache)
        with pytest.raises(CacheError, match=message):
            model(ids(2, 4), attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("padding", [7, 40])
@pytest.mark.parametrize("method", ["lkv", "tova", "streaming-llm"])
def test_decode_eviction_of_a_padded_row_is_that_of_the_row_alone(padding, method):
    """LKV's scores place the queries to come at the row's own end; TOVA's are of all heads of the row."""
    model = tiny_llama()
    torch.manual_seed(5)
    policy = Policy(inspect_model(model), inputs=ScorerInputs(key="unrotated", attention="learned", knots=8))
    for weights, spread in (
        (policy.heads.embeddings, 5.0),
        (policy.tokens.query_mean, 3.0),
        (policy.tokens.start, 1.0),
    ):
        torch.nn.init.normal_(weights, std=spread)
    policy.requires_grad_(False)
    text, other = torch.randint(3, 60, (1, 60)), torch.randint(3, 60, (1, 60 + padding))
    rows = torch.cat([torch.cat([torch.zeros(1, padding, dtype=torch.long), text], 1), other])
    mask = torch.ones_like(rows)
    mask[0, :padding] = 0
    steps = torch.randint(3, 60, (40, 1, 1))

    def answers(ids, mask):
        learned = policy if method == "lkv" else None
        cache = RaggedCache(model, method=method, policy=learned, retention=0.3, decode_eviction=True, slack=4)
        at = (mask.cumsum(1) - 1).clamp(min=0)
        out = [model(ids, attention_mask=mask, position_ids=at, past_key_values=cache).logits[0, -1]]
        for number, step in enumerate(steps, 1):
            mask = torch.cat([mask, mask.new_ones(len(ids), 1)], 1)
            at_end, ids = at[:, -1:] + number, step.expand(len(mask), 1)
            out.append(model(ids, attention_mask=mask, position_ids=at_end, past_key_values=cache).logits[0, -1])
        return torch.stack(out)

    with torch.no_grad():
        assert_close(answers(rows, mask), answers(text, torch.ones_like(text)))
