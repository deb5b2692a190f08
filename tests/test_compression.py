"""Compress once, ask many: every question starts from the same cache."""

import pytest
import torch

from lkv.compression import compress
from lkv.errors import PromptError, RetentionError


class Words:
    """A tokenizer of one token a word, numbered as they come (vocabulary of the tiny models)."""

    chat_template = None
    eos_token_id, pad_token_id = 2, 0

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [3 + sum(map(ord, word)) % 64 for word in text.split()]}

    def decode(self, ids, **_):
        return " ".join(map(str, ids.tolist() if isinstance(ids, torch.Tensor) else ids))


TEXT = " ".join(f"word{number}" for number in range(60))


@pytest.mark.parametrize("method", ["lkv", "lkv-t", "full"])
def test_questions_do_not_see_each_other(model, policy, method):
    context = compress(model, Words(), TEXT, method=method, retention=0.4, policy=policy)
    first = context.ask("what is one ?", max_new_tokens=8)
    other = context.ask("and what now then ?", max_new_tokens=8)
    assert context.ask("what is one ?", max_new_tokens=8) == first != other
    assert context.cache.get_seq_length() == context.tokens == 60


def test_full_retention_answers_as_the_full_cache(model, policy):
    answers = {
        method: compress(model, Words(), TEXT, method=method, retention=1.0, policy=policy).ask("say it", 10)
        for method in ("lkv", "lkv-t", "full")
    }
    assert len(set(answers.values())) == 1


def test_compressed_bytes_are_a_fraction_of_the_full_cache(model, policy):
    full = compress(model, Words(), TEXT, method="full").nbytes()
    assert full == 60 * 3 * 2 * 2 * 8 * 8
    ours = compress(model, Words(), TEXT, retention=0.25, policy=policy)
    assert ours.cache.full_nbytes() == full
    assert ours.cache.realised_retention() <= 0.25


def test_prediction_is_teacher_forced(model, policy):
    context = compress(model, Words(), TEXT, method="full")
    logits, ids = context.predict("why ?", "so it is")
    whole = Words()(TEXT + " Question: why ? Answer: so it is")["input_ids"]
    expected = model(torch.tensor([whole])).logits[0, -4:-1]
    assert ids.tolist() == whole[-3:]
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)


def test_sampling_settings_reach_generate(model, policy):
    context = compress(model, Words(), TEXT, policy=policy)
    torch.manual_seed(0)
    sampled = {context.ask("go", 6, do_sample=True, temperature=5.0) for _ in range(4)}
    assert len(sampled) > 1


def test_bad_prompts_are_named(model, policy):
    with pytest.raises(PromptError, match="the text is empty"):
        compress(model, Words(), "  \n", policy=policy)
    with pytest.raises(
        PromptError, match=r"has 3 tokens: at retention 0\.15 nothing of it would be kept\. Give at least 7"
    ):
        compress(model, Words(), "one two three", policy=policy)
    with pytest.raises(PromptError, match="has 600 tokens, but the model reads at most 512"):
        compress(model, Words(), "word " * 600, policy=policy)
    with pytest.raises(RetentionError):
        compress(model, Words(), TEXT, retention=1.5, policy=policy)
    context = compress(model, Words(), TEXT, policy=policy)
    with pytest.raises(PromptError, match="the question is empty"):
        context.ask(" ")
    with pytest.raises(PromptError, match="the model reads at most 512"):
        context.ask("word " * 500)
    assert context.cache.get_seq_length() == 60
