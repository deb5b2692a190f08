"""KVzip's scores against its definition, and budgets that hold over all layers."""

import gc
import weakref

import pytest
import torch

from lkv.context.chat import Chat
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.errors import CacheError, PromptError
from lkv.hf.prompt_kv import LayerKV, read_prompt
from lkv.methods.budgets import GlobalTopKBudget
from lkv.methods.selectors import PrecomputedScores
from lkv.methods.selectors.kvzip import replay_scores
from lkv.utils.prompts import encode_question
from tests.conftest import tiny_llama
from tests.context.test_compression import TEXT, Words
from tests.families import CAPPED, build
from tests.hf.test_attention_sinks import FULL, gpt_oss
from tests.requests import resolve_method


def kvzip(model, tokenizer, ids, prompt, retention, name="kvzip", policy=None, pattern=None):
    """KVzip for one prompt, in one call."""
    options = {"retention": retention, "policy": policy, "pattern": pattern, "tokenizer": tokenizer}
    return resolve_method(name, model, **options).for_prompt(ids, prompt)


MODELS = {
    "Llama": tiny_llama,
    "sinks": lambda: gpt_oss(torch.float32),
    "cap": lambda: build("Gemma2", torch.float32, **CAPPED, layer_types=FULL),
}


@pytest.mark.parametrize(("name", "chunk"), [("Llama", 10), ("Llama", 2048), ("sinks", 10), ("cap", 10)])
def test_kvzip_repeats_a_text_in_chunks(name, monkeypatch, chunk):
    """Each part straight behind the prompt, not behind the parts before it; and never beyond the model's positions.

    As by KVzip's authors a part's scores are its share of what goes to the first four tokens, to it and to its replay.
    """
    model, stock = MODELS[name](), MODELS[name]()
    torch.manual_seed(0)
    ids = torch.randint(3, 67, (25,)).tolist()
    prompt = read_prompt(model, torch.tensor([ids]))
    monkeypatch.setattr("lkv.methods.selectors.kvzip._CHUNK", chunk)
    method = kvzip(model, Words(), ids, prompt, 0.25)
    stock.set_attn_implementation("eager")
    expected = torch.zeros(3, 2, 25, dtype=torch.float64)
    for start in range(0, 25, chunk):
        said = Words().decode(ids[start - 8 : start])
        request = f"Repeat the part of the previous context exactly, starting with: {said}"
        replay = encode_question(Words(), request if start else "Repeat the previous context exactly.")
        text = ids + replay + ids[start : start + chunk]
        for layer, weights in enumerate(stock(torch.tensor([text]), output_attentions=True).attentions):
            given = weights[0, :, 25:].double()  # eager attention, of which the other tokens' share is taken out
            sinks, part = given[..., : min(4, start)], given[..., start : min(start + chunk, 25)]
            other = given[..., :25].sum(-1) - sinks.sum(-1) - part.sum(-1)
            part = part / (1 - other)[..., None]
            expected[layer][:, start : start + chunk] = part.unflatten(0, (2, 2)).amax((1, 2))
    expected[..., :4] = 2.0  # always kept
    kept = 0
    for layer in range(3):
        scores = method.selector.scores(layer, prompt[layer])
        torch.testing.assert_close(scores[0].double(), expected[layer], atol=1e-5, rtol=1e-4)
        kept += sum(method.budget.counts(layer, scores)[0])
    assert kept == int(0.25 * 3 * 2 * 25)
    long = torch.randint(3, 67, (505,)).tolist()
    with pytest.raises(PromptError, match="KVzip repeats the text after it has read it and would reach"):
        kvzip(model, Words(), long, read_prompt(model, torch.tensor([long])), 0.25)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("name", "amount"),
    [("kvzip", {"retention": 0.4}), ("kvzip", {"memory": 0.2}), ("lkv-h+kvzip", {"retention": 0.4, "bits": 8})],
    ids=str,
)
def test_scores_are_freed_once_the_prompt_is_compressed(model, policy, monkeypatch, tmp_path, name, amount):
    tables = []

    def noted_scores(*args):
        table = replay_scores(*args)
        tables.append(weakref.ref(table))
        return table

    monkeypatch.setattr("lkv.methods.selectors.kvzip.replay_scores", noted_scores)
    context = compress(model, Words(), TEXT, method=name, policy=policy, **amount)
    gc.collect()
    assert [table() for table in tables] == [None]
    answer = context.ask("what is one ?", 6)
    context.save(tmp_path / "context.kv")
    chat, loaded = Chat(context), Context.load(tmp_path / "context.kv", model, Words())
    assert [each.ask("what is one ?", 6) for each in (context.fork(), chat, loaded)] == [answer] * 3
    assert chat.ask("and what now ?", 6)
    context.cache.reset()
    with pytest.raises(CacheError, match="KVzip reads the text a second time"):
        model(torch.tensor([context.ids]), past_key_values=context.cache)


def test_global_budget_is_a_top_k_over_all_layers():
    table = torch.rand(4, 2, 3, 25)
    counts = torch.tensor([GlobalTopKBudget.from_scores(table, 0.2).counts(layer, table[layer]) for layer in range(4)])
    for row in range(2):
        best = table[:, row].flatten().topk(60).indices // 25
        expected = torch.bincount(best, minlength=12).view(4, 3)
        assert torch.equal(counts[:, row], expected)
    assert torch.equal(PrecomputedScores(table).scores(2, LayerKV(table[0], table[0], 1.0)), table[2])
