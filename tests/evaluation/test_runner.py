"""The runner against single methods and the stock model."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from experiments.report.figures import method_styles
from experiments.report.results_frame import read_results
from experiments.report.score_tables import TableRequest, build_table
from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import DataError, LkvError, PolicyMismatchError, PromptError, RetentionError
from lkv.evaluation.comparison import MethodComparison
from lkv.evaluation.runner import _share_of
from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import read_prompt
from lkv.methods.registry import parse_method
from lkv.methods.selectors import LearnedScores
from lkv.methods.selectors import kvzip as second_pass
from lkv.methods.targets import Precision, TierTable
from lkv.policy.policy import Policy
from tests.conftest import tiny_llama
from tests.fake_suite import Letters, make_examples, make_prompt, run, score, without_seconds
from tests.families import build
from tests.methods.test_kvzip import kvzip

METHODS = ("lkv", "lkv-t", "ada+lkv-t", "snapkv", "expected", "kvzip", "lkv-h+kvzip", "random")
RETENTIONS = (0.4, 0.2)
PATTERN = [[0.9, 0.1], [0.2, 0.8], [0.5, 0.4]]


@pytest.mark.slow
def test_every_row_answers_as_its_method_alone(model, policy, tmp_path):
    examples = make_examples(1)
    header, lines = run(model, policy, tmp_path / "x.jsonl", examples, METHODS, RETENTIONS)
    assert header["methods"] == list(METHODS) and header["retentions"] == [0.4, 0.2]
    assert header["policy"] == policy.digest() and header["dtype"] == "float64" and header["suite"] == "ruler"
    different = set()
    for line, example in zip(lines, examples, strict=True):
        assert line["key"] == f"{example.task}-128-0" and not line["skipped"]
        given = make_prompt(example, Letters(), "kvpress", 512)
        whole = torch.tensor([given.context + given.question])
        patch_attention(model)
        prompt = read_prompt(model, whole[:, : len(given.context)], queries=True)
        rows = {(row["method"], row["retention"]): row for row in line["rows"]}
        assert list(rows) == [("full", 1.0), *((name, r) for r in RETENTIONS for name in METHODS)]
        for (name, retention), row in rows.items():
            entry = 2 * 8 * 8
            if name == "full":
                cache = DynamicCache()
                held = 3 * 2 * line["prompt_tokens"]
            else:
                if parse_method(name).needs_second_pass:
                    method = kvzip(model, Letters(), given.context, prompt, retention, name, policy)
                    cache = RaggedCache(model, method=method)
                else:
                    own = policy if parse_method(name).needs_policy else None
                    cache = RaggedCache(model, policy=own, retention=retention, method=name)
                cache.fill(prompt)
                held = sum(map(sum, cache.kept_counts()))
            out = model.generate(whole, past_key_values=cache, do_sample=False, max_new_tokens=6)
            answer = Letters().decode(out[0, whole.shape[1] :], skip_special_tokens=True)
            assert row["answer"] == answer and row["score"] == score(example, answer)
            assert row["nbytes"] == held * entry and row["full_nbytes"] == 3 * 2 * line["prompt_tokens"] * entry
            assert row["realised"] == pytest.approx(row["nbytes"] / row["full_nbytes"], abs=1e-6)
            different.add(answer)
        assert rows["full", 1.0]["kl"] == 0 and rows["full", 1.0]["hidden_error"] == 0
    assert len(different) > 10


def test_bytes_are_spent_as_the_policy_of_a_method_says(model, policy, tmp_path):
    examples, out = make_examples(1, ["alpha"], tokens=300), tmp_path / "x.jsonl"
    policy.card["tiers"] = TierTable.single(Precision(8, 8)).to_json()
    header, (line,) = run(model, policy, out, examples, ["lkv", "snapkv"], [0.03], by_memory=True)
    assert header["budget"] == "memory" and header["tiers"] == {"": policy.card["tiers"]}
    patch_attention(model)
    example_prompt = make_prompt(examples[0], Letters(), "kvpress", 512)
    prompt = read_prompt(model, torch.tensor([example_prompt.context]), queries=True)
    rows = {row["method"]: row for row in line["rows"]}
    for name, learned in (("lkv", policy), ("snapkv", None)):
        cache = RaggedCache(model, policy=learned, memory=0.03, method=name)
        cache.fill(prompt)
        assert rows[name]["realised"] == pytest.approx(cache.realised_retention(), abs=1e-6)
        assert 0.005 < rows[name]["nbytes"] / rows[name]["full_nbytes"] < 0.008
    # The default has fewer bits, so more entries.
    assert rows["lkv"]["realised"] < 0.8 * rows["snapkv"]["realised"]
    del policy.card["tiers"]
    with pytest.raises(DataError, match=r"settings \(tiers "):
        run(model, policy, out, examples, ["lkv"], [0.03], by_memory=True)


def test_a_method_that_takes_no_memory_is_refused_before_the_first_sample(model, policy, tmp_path):
    with pytest.raises(LkvError, match="pyramidkv-kvpress"):
        run(model, policy, tmp_path / "x.jsonl", make_examples(1), ["lkv", "pyramidkv-kvpress"], [0.3], by_memory=True)
    assert not (tmp_path / "x.jsonl").exists()


@torch.no_grad()
def test_sliding_windows_count_in_no_budget(tmp_path):
    model = build("Gemma3")
    examples = make_examples(1, ["alpha"], tokens=200)
    (line,) = run(model, None, tmp_path / "x.jsonl", examples, ["knorm"], [0.1], by_memory=True)[1]
    (row,) = (row for row in line["rows"] if row["method"] == "knorm")
    assert 0.0125 < row["nbytes"] / row["full_nbytes"] < 0.0275


def test_fidelity_is_measured_by_teacher_forcing_the_true_answer(model, policy, tmp_path):
    (example,) = make_examples(1, ["alpha"])
    _, (line,) = run(model, policy, tmp_path / "x.jsonl", [example], ["lkv"])
    given = make_prompt(example, Letters(), "kvpress", 512)
    target = Letters()(" " + example.answers[0])["input_ids"][: example.max_new_tokens]
    rest = torch.tensor([given.question + target])
    found = []
    for cache in (DynamicCache(), RaggedCache(model, policy=policy, retention=0.3)):
        model(torch.tensor([given.context]), past_key_values=cache, use_cache=True)
        out = model(rest, past_key_values=cache, use_cache=True, output_hidden_states=True)
        rows = slice(len(given.question) - 1, -1)
        found.append((torch.log_softmax(out.logits[0, rows].detach(), -1), out.hidden_states[-1][0, rows].detach()))
    (full, full_hidden), (own, own_hidden) = found
    kl = torch.nn.functional.kl_div(own, full, reduction="none", log_target=True).sum(-1).mean()
    error = ((own_hidden - full_hidden).norm(dim=-1) / full_hidden.norm(dim=-1)).mean()
    row = line["rows"][1]
    assert row["kl"] == pytest.approx(float(kl), abs=1e-5) and row["kl"] > 0.01
    assert row["hidden_error"] == pytest.approx(float(error), abs=1e-5) and row["hidden_error"] > 0.01
    assert row["agreement"] == pytest.approx(float((own.argmax(-1) == full.argmax(-1)).double().mean()), abs=1e-6)
    # Where all answers are asked for, the continuation gives them all; elsewhere they are other wordings of one.
    found = []
    for metric, answers in (("string_match_all", ("ab", "cd")), ("qa_f1", ("ab, cd", "ef"))):
        (example,) = make_examples(1, ["alpha"], metric=metric, answers=answers)
        _, (line,) = run(model, policy, tmp_path / f"{metric}.jsonl", [example], score=lambda *_: 0)
        found.append([row["kl"] for row in line["rows"]])
    assert found[0] == found[1] and found[0][1] > 0.01
    # Without a right answer there is nothing to be faithful to.
    _, (line,) = run(model, policy, tmp_path / "y.jsonl", make_examples(1, ["alpha"], answers=()), score=lambda *_: 0)
    assert line["rows"][1]["kl"] is None and line["rows"][1]["agreement"] is None


def test_shared_scores_are_computed_once(model, policy, tmp_path, monkeypatch):
    calls, replays, scores, replay = [], [], LearnedScores.scores, second_pass.replay_scores
    monkeypatch.setattr(LearnedScores, "scores", lambda self, at, *rest: calls.append(at) or scores(self, at, *rest))
    monkeypatch.setattr(second_pass, "replay_scores", lambda *given: replays.append(1) or replay(*given))
    run(model, policy, tmp_path / "x.jsonl", make_examples(1, ["alpha"]), METHODS, RETENTIONS)
    # Once to see whether the prompt can be scored, then once a layer for three methods at two retentions.
    assert calls == [0, 0, 1, 2] and replays == [1]


@pytest.mark.slow
def test_smaller_batches_which_memory_may_require_give_the_same_rows(model, policy, tmp_path, monkeypatch):
    examples, tried = make_examples(1), []

    class Small(MethodComparison):
        def __init__(self, model, ids, prompt, methods):
            tried.append(len(methods))
            if len(methods) > 3:
                raise torch.OutOfMemoryError("no more memory")
            super().__init__(model, ids, prompt, methods)

    _, whole = run(model, policy, tmp_path / "x.jsonl", examples, METHODS)
    _, parts = run(model, policy, tmp_path / "max_rows.jsonl", examples[:1], METHODS, max_rows=2)
    assert without_seconds(parts) == without_seconds(whole[:1])
    monkeypatch.setattr("lkv.evaluation.runner.MethodComparison", Small)
    _, parts = run(model, policy, tmp_path / "y.jsonl", examples, METHODS)
    assert without_seconds(parts) == without_seconds(whole)
    assert tried == [9, 5, 3, 3, 3] * len(examples)
    monkeypatch.setattr(Small, "__init__", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none at all")))
    with pytest.raises(torch.OutOfMemoryError):
        run(model, policy, tmp_path / "z.jsonl", examples, METHODS)


def test_methods_that_cannot_serve_a_prompt_are_skipped_with_the_reason(policy, tmp_path):
    model = tiny_llama(max_position_embeddings=128)
    examples, names = make_examples(1, ["alpha"], tokens=60), ["snapkv", "lkv", "duo", "kvzip"]
    _, (line,) = run(model, policy, tmp_path / "x.jsonl", examples, names, pattern=PATTERN)
    assert [row["method"] for row in line["rows"]] == ["full", "lkv", "duo"]
    reasons = {(skipped["method"], skipped["retention"]): skipped["reason"] for skipped in line["skipped"]}
    assert reasons.keys() == {("snapkv", 0.3), ("kvzip", 0.3)}
    assert "needs more than that" in reasons["snapkv", 0.3] and "shorten the text" in reasons["kvzip", 0.3]
    # DuoAttention's windows are longer than this prompt: it keeps all of it, and reports that.
    assert line["rows"][2]["retention"] == 0.3 and line["rows"][2]["realised"] == 1.0


def test_an_example_without_a_prompt_is_written_with_the_reason(model, policy, tmp_path):
    def picky(example, *rest, **settings):
        if example.task == "beta":
            raise PromptError("its question leaves no room.")
        return make_prompt(example, *rest, **settings)

    out = tmp_path / "x.jsonl"
    _, lines = run(model, policy, out, make_examples(2), make_prompt=picky)
    assert [bool(line["rows"]) for line in lines] == [True, False, True, False]
    assert lines[1]["unusable"] == "its question leaves no room."
    assert run(model, policy, out, make_examples(2), make_prompt=picky)[1] == lines
    results = read_results([out])
    assert results.frame.key.nunique() == 2 and "2 more could not be made into a prompt" in " ".join(results.notes)


@given(st.integers(0, 200), st.integers(1, 9))
def test_shares_are_even_disjoint_and_complete(count, size):
    keys = [str(number) for number in range(count)]
    shares = [_share_of(keys, rank, size) for rank in range(size)]
    assert sorted(key for share in shares for key in share) == sorted(keys)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    # Sixteen tasks in turn over two processes: dealing every second one would give each process half of the tasks.
    if size == 2 and count >= 160:
        assert all({int(key) % 16 for key in share} == set(range(16)) for share in shares)


def test_wrong_configs_are_refused_before_anything_runs(model, policy, tmp_path):
    one = make_examples(1)
    for arguments, error, message in (
        ((one, ["duo"], [0.3]), LkvError, "needs 'pattern', which is missing"),
        ((one, ["lkw"], [0.3]), LkvError, "did you mean 'lkv'"),
        ((one, ["lkv"], [1.5]), RetentionError, "must lie in"),
        (([],), DataError, "no samples"),
        ((one + one,), DataError, "two samples 'alpha-128-0'"),
        ((one + make_examples(1, ["gamma"], suite="longbench"),), DataError, "belong to longbench, ruler"),
    ):
        with pytest.raises(error, match=message):
            run(model, policy, tmp_path / "x.jsonl", *arguments)
    with pytest.raises(PolicyMismatchError, match="this policy was trained for a model with"):
        run(tiny_llama(seed=5), policy, tmp_path / "x.jsonl", one)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_several_policies_in_one_table(model, policy, tmp_path):
    torch.manual_seed(9)
    other = Policy(policy.spec).requires_grad_(False)
    torch.nn.init.normal_(other.heads.embeddings, std=20.0)
    examples, out = make_examples(2), tmp_path / "x.jsonl"
    named = {"one": policy, "two": other}
    names = ["lkv@one", "lkv@two", "lkv-h+knorm@two", "knorm"]
    header, lines = run(model, None, out, examples, names, policies=named)
    assert header["policies"] == {"one": policy.digest(), "two": other.digest()} and header["policy"] is None
    for tag, own in named.items():
        _, alone = run(model, own, tmp_path / f"{tag}.jsonl", examples, ["lkv"])
        for line, wanted in zip(lines, alone, strict=True):
            (row,) = (row for row in line["rows"] if row["method"] == f"lkv@{tag}")
            assert row | {"method": "lkv"} == wanted["rows"][1]
    table = build_table("main", read_results([out]), TableRequest())
    assert [row.label for row, _ in table.rows()[-2:]] == ["LKV (one)", "LKV (two)"]
    assert any(note.startswith(f"Policy two: {other.digest()[:12]}") for note in table.notes)
    looks = method_styles(["lkv@one", "lkv@two"])
    assert looks["lkv@one"].marker != looks["lkv@two"].marker
    with pytest.raises(LkvError, match=r"there is no policy named three; give it as --policy NAME=PATH"):
        run(model, None, tmp_path / "y.jsonl", examples, ["lkv@three"], policies=named)
    with pytest.raises(DataError, match=r"settings \(policies"):
        run(model, None, out, examples, names, policies={"one": other, "two": other})
