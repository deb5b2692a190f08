"""Comparisons: side by side equals one by one; KVzip against its definition; intervals; needles; result files."""

import json

import pytest
import torch

from benchmarks.heldout import make_needles
from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import DataError, PromptError
from lkv.evaluation.comparison import MethodComparison
from lkv.integrations.transformers.attention import patch_attention
from lkv.integrations.transformers.prefill import LayerKV, read_prompt
from lkv.methods.budgets import GlobalTopKBudget, Uniform
from lkv.methods.method import Method, resolve_method
from lkv.methods.selectors import LearnedScores, PrecomputedScores, SnapKV
from lkv.utils.journal import open_journal, read_journal, read_samples
from lkv.utils.prompts import encode_question
from lkv.utils.results import write_results
from lkv.utils.statistics import bootstrap
from tests.conftest import tiny_llama
from tests.context.test_compression import Words
from tests.second_pass import kvzip

TOKENS = 48


def prompt_of(model, seed=0):
    ids = torch.randint(3, 67, (TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()
    patch_attention(model)
    return ids, read_prompt(model, torch.tensor([ids]), queries=True)


def test_side_by_side_equals_one_by_one(model, policy):
    ids, prompt = prompt_of(model)
    methods = [
        Method("full", Uniform(1.0), LearnedScores(policy)),
        resolve_method("lkv", retention=0.3, policy=policy),
        Method("snap", Uniform(0.3), SnapKV(window=6)),
    ]
    run = MethodComparison(model, ids, prompt, methods)
    continuation = [5, 9, 33, 21, 8, 60]
    fidelity = run.measure_fidelity(continuation, 2)
    answers = run.generate([4, 7, 11], 6)
    log_probs = []
    for method, answer, realised in zip(methods, answers, run.realised_retentions(), strict=True):
        cache = RaggedCache(model, method=method)
        model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
        assert realised == pytest.approx(cache.realised_retention())
        logits = model(torch.tensor([continuation]), past_key_values=cache, use_cache=True).logits[0, 1:-1].detach()
        log_probs.append(torch.log_softmax(logits.float(), -1))
        cache.rewind()
        out = model.generate(torch.tensor([[*ids, 4, 7, 11]]), past_key_values=cache, do_sample=False, max_new_tokens=6)
        assert out[0, TOKENS + 3 :].tolist() == answer
    for own, measured in zip(log_probs, fidelity, strict=True):
        kl = torch.nn.functional.kl_div(own, log_probs[0], reduction="none", log_target=True).sum(-1).mean()
        assert measured.kl == pytest.approx(float(kl), abs=1e-6)
        assert measured.agreement == pytest.approx(float((own.argmax(-1) == log_probs[0].argmax(-1)).float().mean()))
    assert fidelity[0].hidden_error == 0 < fidelity[1].hidden_error
    assert fidelity[0].kl == 0 and fidelity[0].agreement == 1 and fidelity[1].kl > 0


def test_kvzip_repeats_a_long_text_part_by_part(model, monkeypatch):
    """Each part straight behind the prompt, not behind the parts before it; and never beyond the model's positions.

    As by KVzip's authors a part's scores are its share of what goes to the first four tokens, to it and to its replay.
    """
    torch.manual_seed(0)
    ids = torch.randint(3, 67, (25,)).tolist()
    prompt = read_prompt(model, torch.tensor([ids]))
    monkeypatch.setattr("lkv.methods.selectors.kvzip._CHUNK", 10)
    found = kvzip(model, Words(), ids, prompt, 0.25).selector
    stock = tiny_llama()
    stock.set_attn_implementation("eager")
    expected = torch.zeros(3, 2, 25, dtype=torch.float64)
    for start in (0, 10, 20):
        said = Words().decode(ids[start - 8 : start])
        request = f"Repeat the part of the previous context exactly, starting with: {said}"
        replay = encode_question(Words(), request if start else "Repeat the previous context exactly.")
        text = ids + replay + ids[start : start + 10]
        for layer, weights in enumerate(stock(torch.tensor([text]), output_attentions=True).attentions):
            given = weights[0, :, 25:].double()  # eager attention, of which the other tokens' share is taken out
            sinks, part = given[..., : min(4, start)], given[..., start : min(start + 10, 25)]
            part = part / (sinks.sum(-1) + part.sum(-1) + given[..., 25:].sum(-1))[..., None]
            expected[layer][:, start : start + 10] = part.unflatten(0, (2, 2)).amax((1, 2))
    for layer in range(3):
        torch.testing.assert_close(
            found.scores(layer, prompt[layer])[0].double(), expected[layer], atol=1e-5, rtol=1e-4
        )
    long = torch.randint(3, 67, (505,)).tolist()
    with pytest.raises(PromptError, match="KVzip repeats the text after it has read it and would reach"):
        kvzip(model, Words(), long, read_prompt(model, torch.tensor([long])), 0.25)


def test_kvzip_scores_are_the_attention_that_a_replay_gives(model):
    """Against the attention weights of the stock eager model over context + replay."""
    ids, prompt = prompt_of(model)
    method = kvzip(model, Words(), ids, prompt, 0.25)
    replay = Words()("\n\nQuestion: Repeat the previous context exactly.\nAnswer:")["input_ids"] + ids
    model.set_attn_implementation("eager")
    weights = model(torch.tensor([ids + replay]), output_attentions=True).attentions
    kept = 0
    for layer, attention in enumerate(weights):
        received = attention[0, :, TOKENS:, :TOKENS].view(2, 2, -1, TOKENS).amax((1, 2))
        scores = method.selector.scores(layer, prompt[layer])
        torch.testing.assert_close(scores[0].double(), received.detach(), atol=1e-5, rtol=1e-4)
        kept += sum(method.budget.counts(layer, scores)[0])
    assert kept == int(0.25 * 3 * 2 * TOKENS)


def test_global_budgets_are_one_contest():
    table = torch.rand(4, 2, 3, 25)
    counts = torch.tensor([GlobalTopKBudget.from_scores(table, 0.2).counts(layer, table[layer]) for layer in range(4)])
    for row in range(2):
        best = table[:, row].flatten().topk(60).indices // 25
        expected = torch.bincount(best, minlength=12).view(4, 3)
        assert torch.equal(counts[:, row], expected)
    assert torch.equal(PrecomputedScores(table).scores(2, LayerKV(table[0], table[0], 1.0)), table[2])


def test_bootstrap_interval_covers_the_mean():
    singles = [[0.0], [1.0]] * 50
    mean = bootstrap(singles)
    assert mean.value == 0.5 and mean.n == 100
    # The normal approximation: 1.96 * 0.5 / sqrt(100).
    assert mean.low == pytest.approx(0.5 - 0.098, abs=0.02) and mean.high == pytest.approx(0.5 + 0.098, abs=0.02)
    assert bootstrap(singles) == mean
    # Values that share a context count once: 100 groups of three copies have the interval of 100 values.
    copies = bootstrap([[x[0]] * 3 for x in singles])
    assert copies.n == 300 and copies.high - copies.low == pytest.approx(mean.high - mean.low)
    with pytest.raises(ValueError, match="no values"):
        bootstrap([])


def test_needles_lie_in_the_prose_once_and_are_asked_for():
    prose = ["Some sentence of real prose stands here. " * 2000]
    for seed in range(5):
        tokenizer = Words()
        item = make_needles(tokenizer, prose, 300, 4, seed)
        assert 250 < len(item.ids) < 330
        key = item.question.split(" for ")[1].split(" mentioned")[0]
        needle = tokenizer(f"One of the special magic numbers for {key} is: {item.answer}.")["input_ids"]
        places = [i for i in range(len(item.ids)) if item.ids[i : i + len(needle)] == needle]
        assert len(places) == 1
        assert make_needles(tokenizer, prose, 300, 4, seed) == item


def test_result_files_have_the_agreed_form(tmp_path):
    write_results(tmp_path / "deep/x.json", "x", [{"method": "lkv", "value": 0.1234567}], 3, "make x")
    document = json.loads((tmp_path / "deep/x.json").read_text())
    assert list(document) == ["name", "command", "seed", "date", "machine", "versions", "rows"]
    assert document["rows"] == [{"method": "lkv", "value": 0.12346}] and document["seed"] == 3
    assert document["versions"]["torch"].startswith("2.")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.json"]


def test_interrupted_benchmarks_resume(tmp_path):
    path = tmp_path / "x.jsonl"
    with pytest.raises(KeyboardInterrupt), open_journal(path, {"a": 1}) as done:  # noqa: PT012
        done.add("a", {"value": 1})
        raise KeyboardInterrupt
    with open_journal(path, {"a": 1}) as done:
        assert done == {"a": {"value": 1}}
        done.add("b", {"value": 2})
    assert not path.exists()


def test_samples_of_other_settings_are_not_mixed_and_torn_lines_are_dropped(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"seed": "1"}\n{"key": "a", "value": 1}\n{"key": "b", "va')
    with pytest.raises(DataError, match="other settings"), open_journal(path, {"seed": "2"}):
        pass
    with open_journal(path, {"seed": "1"}) as done:
        assert done == {"a": {"value": 1}}
        done.add("b", {"value": 2})
        assert [json.loads(line).get("key") for line in path.read_text().splitlines()] == [None, "a", "b"]


def test_a_last_sample_without_its_line_end_counts_where_it_is_whole(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"seed": 1}\n\n{"key": "a", "value": 1}\n{"key": "b", "value": 2}')
    assert read_journal(path, DataError, "mend") == (
        [(1, {"seed": 1}), (3, {"key": "a", "value": 1}), (4, {"key": "b", "value": 2})],
        False,
    )
    with open_journal(path, {"seed": 1}) as done:
        done.add("c", {"value": 3})
        assert read_samples(path) == (
            {"seed": 1},
            [{"key": k, "value": v} for k, v in zip("abc", (1, 2, 3), strict=True)],
        )
    path.write_text('{"seed": 1}\n{"key": "a"}\n{"seed": 1}\n')
    with pytest.raises(DataError, match=r"line 3 is neither a header nor a sample; delete the damaged line"):
        read_samples(path)
