"""Benchmarks: what they measure, files of their own, and runs that resume on the same files and versions alone."""

import argparse
import json
import random
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from experiments import common, decode, fidelity, fit, heldout, instructions, long_answers, memory
from experiments.common import RESULTS, Subject, per_length
from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import DataError, LkvError
from lkv.hf.attention import patch_attention
from lkv.hf.loading import load_model
from lkv.policy.policy import Policy
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.policy.shipped import describe_overlap, shipped_policies
from lkv.utils import provenance
from lkv.utils.cpp_compiler import find_compiler
from lkv.utils.prompts import encode_question
from lkv.utils.provenance import collect_provenance
from tests.commands import main
from tests.conftest import save_model, tiny_llama
from tests.context.test_compression import Words


def test_lengths_have_one_number_or_one_each():
    assert per_length([10, 20], [3]) == {10: 3, 20: 3}
    assert per_length([10, 20], [3, 1]) == {10: 3, 20: 1}
    with pytest.raises(LkvError, match="2 numbers for 3 lengths; give one, or one for each"):
        per_length([1, 2, 3], [1, 2])


class Held:
    """Contexts as they are held out, without the data."""

    def __init__(self, *_):
        pass

    def case(self, task, number, tokens):
        rng = random.Random(f"{task}-{number}-{tokens}")
        return [rng.randint(3, 200) for _ in range(tokens)], [([rng.randint(3, 200) for _ in range(8)], 4)]


@pytest.mark.skipif(find_compiler() is None, reason="without a C++ compiler there is one backend")
def test_decoding_is_measured_by_each_backend():
    model = tiny_llama(dtype=torch.float32, head_dim=16)
    policy = Policy(patch_attention(model).spec, inputs=ScorerInputs("unrotated", "learned", 8)).requires_grad_(False)
    measured = decode.rows_at(64, model, policy, 0.25, 2, {})
    rows = [(row["what"], row["method"], row.get("backend")) for row in measured]
    each = [
        (what, *of) for what in ("attention", "token") for of in (("full", None), ("lkv", "cpp"), ("lkv, loop", "loop"))
    ]
    assert rows == [*each, ("token", "lkv, tiers", "cpp")]
    # The model computes in float32, and the budget of tiers is of a 16-bit cache's bytes; "lkv" has free slots beside.
    full = policy.spec.layers * policy.spec.kv_heads * 64 * 16 * 2 * 4
    assert measured[-1]["nbytes"] == pytest.approx(0.25 * full / 2, rel=0.05)
    assert {row["nbytes"] >= 0.25 * full for row in measured if row["method"] in ("lkv", "lkv, loop")} == {True}


def test_an_instruction_is_followed_or_not():
    checks = {name: each.is_followed for name, each in instructions.INSTRUCTIONS.items()}
    assert checks["greeting"]("Dear reader, it is", "Dear reader") and not checks["greeting"]("It is", "Dear reader")
    assert checks["list"]("1. It", "") and checks["JSON"]('{"gist": 1', "") and checks["key"]('{"gist": 1', "gist")
    assert checks["language"]("El texto trata de la venta", "Spanish") and not checks["language"]("A text", "Spanish")


def test_methods_are_compared_at_equal_bytes(tmp_path, monkeypatch, capsys):
    saved = save_model(tmp_path / "model", num_hidden_layers=2)
    torch.manual_seed(0)
    Policy(patch_attention(load_model(str(saved))[0]).spec, {"hub": ["owner/tiny"]}).save_pretrained(
        tmp_path / "policy"
    )
    monkeypatch.setattr(fidelity, "HeldOut", Held)
    arguments = ["--data", "nowhere", "--model", str(saved), "--policy", str(tmp_path / "policy")]
    arguments += shlex.split("--tokens 200 --contexts 1 --tasks code stories --methods lkv snapkv --memory 0.3 0.15")
    monkeypatch.setattr(sys, "argv", ["memory", *arguments, "--out", str(tmp_path / "memory.json")])
    memory.main()
    rows = json.loads((tmp_path / "memory.json").read_text())["rows"]
    # LKV at both budgets in five ways; the other method at the compared one in four.
    assert len([row for row in rows if row["method"].startswith("lkv")]) == 10 and len(rows) == 14
    assert all(0.7 * row["memory"] < row["held"] <= row["memory"] for row in rows)
    kept = {row["method"]: row["kept"] for row in rows if row["memory"] == 0.15}
    # The model computes in float32; unquantised entries count 16 bits a value all the same.
    assert 0.1 < kept["lkv (16 bits)"] <= 0.15 < kept["lkv (8 bits)"] < kept["lkv"] < kept["lkv (4 bits)"]
    assert {row["method"] for row in memory.best_precisions(rows)} == {"lkv", "snapkv"}
    assert (tmp_path / "small" / "memory.png").is_file()


@torch.no_grad()
def test_long_answers_are_compared_with_the_full_cache_s_own(tmp_path, monkeypatch):
    """Read token by token here, in blocks there; the answer and its predictions are those of the stock model."""
    saved = save_model(tmp_path / "model", num_hidden_layers=2)
    torch.manual_seed(0)
    model, tokenizer = load_model(str(saved))
    policy = Policy(patch_attention(model).spec, {"hub": ["owner/tiny"]})
    policy.save_pretrained(tmp_path / "policy")
    monkeypatch.setattr(long_answers, "HeldOut", Held)
    arguments = ["--data", "nowhere", "--model", str(saved), "--policy", str(tmp_path / "policy"), "--tasks", "code"]
    arguments += ["--methods", "lkv", "snapkv (16 bits)", *shlex.split("--prompt 100 --answer 45 --memory 0.25")]
    monkeypatch.setattr(sys, "argv", ["long_answers", *arguments, "--out", str(tmp_path / "some.json")])
    long_answers.main()
    rows = json.loads((tmp_path / "some.json").read_text())["rows"]
    assert [(row["method"], row["part"]) for row in rows] == [
        (method, part) for method in ("lkv", "snapkv (16 bits)") for part in ("all", "first", "second", "last")
    ]
    prompt = Held().case("code", 0, 100)[0] + encode_question(tokenizer, long_answers.REQUESTS["code"])
    torch.manual_seed(0)
    ids = model.generate(
        torch.tensor([prompt]), max_new_tokens=45, min_new_tokens=45, do_sample=True, temperature=0.8, top_k=0,
        top_p=0.95,
    )  # fmt: skip
    expected = log_probabilities(model(ids).logits[0, len(prompt) - 1 : -1])
    per_token = 2 * 2 * 2 * 2 * 8  # bytes of k and v of 2 layers, 2 heads, 8 channels, in 16 bits
    nbytes = int(0.25 * per_token * ids.shape[1])
    cache = RaggedCache(model, memory=nbytes, policy=policy, decode_eviction=True)
    parts = [ids[:, : len(prompt)], *ids[:, len(prompt) : -1].split(1, 1)]
    found = [model(part, past_key_values=cache, use_cache=True).logits[0, -1:] for part in parts]
    found = log_probabilities(torch.cat(found))
    kl, equal = (expected.exp() * (expected - found)).sum(-1), expected.argmax(-1) == found.argmax(-1)
    for row, part in zip(rows, [slice(45), slice(15), slice(15, 30), slice(30, 45)], strict=False):
        assert row["kl"] == pytest.approx(float(kl[part].mean()), abs=2e-5) and row["kl"] > 1e-3
        assert row["agreement"] == pytest.approx(float(equal[part].float().mean()), abs=1e-5)
    assert 0.2 < rows[0]["held"] <= 0.25 < rows[4]["held"]  # the queries that SnapKV observes come on top


def test_the_best_precision_is_one_that_every_method_has():
    def row(method, kl, budget=0.05, length=1000):
        return {"method": method, "tokens": length, "memory": budget, "kl": kl}

    rows = [row("lkv", 3.0), row("lkv (4 bits)", 4.0), row("lkv (8 bits)", 1.0), row("snapkv (4 bits)", 5.0)]
    rows += [row("snapkv", 6.0), row("kvzip (16 bits)", 2.0), row("kvzip (4 bits)", 7.0), row("kvzip", 8.0)]
    # A budget and a length of their own: there LKV is compared with fewer.
    rows += [row("lkv (8 bits)", 0.5, 0.1), row("lkv", 0.6, 0.1)]
    rows += [row("lkv", 0.7, length=2000), row("lkv (4 bits)", 0.1, length=2000), row("snapkv", 0.8, length=2000)]
    found = {(own["method"], own["memory"], own["tokens"]): own["kl"] for own in memory.best_precisions(rows)}
    assert found == {
        ("lkv", 0.05, 1000): 3.0, ("snapkv", 0.05, 1000): 5.0, ("kvzip", 0.05, 1000): 7.0,
        ("lkv", 0.1, 1000): 0.5, ("lkv", 0.05, 2000): 0.7, ("snapkv", 0.05, 2000): 0.8,
    }  # fmt: skip
    assert memory.best_precisions([row("lkv", 1.0), row("snapkv (4 bits)", 2.0)]) == []


def test_a_longbench_text_always_has_something_to_ask(monkeypatch):
    """Whole texts without a question, of which nothing is left to go on with, are passed over."""
    texts = [
        {"context": "a report. " * 50, "input": "", "answers": ["none"]},
        {"context": "a story. " * 50, "input": "Who?", "answers": ["The keeper."]},
    ]
    monkeypatch.setattr(heldout, "read_squad", lambda path: [])
    readers = SimpleNamespace(read_json_lines=lambda path: texts, read_records=lambda path: [])
    monkeypatch.setattr(heldout, "data_files", readers)
    build = heldout.builders(Path())["LongBench text"]
    for seed in range(10):
        text, asked = build(random.Random(seed), 5000)
        assert text == texts[1]["context"] and [c.question for c in asked] == ["Who?"]
        text, asked = build(random.Random(seed), 10)  # of which something is left
        assert asked[-1].question is None and asked[-1].target
    del texts[1]
    with pytest.raises(DataError, match="none has a question or is longer than 5,000 tokens"):
        heldout.builders(Path())["LongBench text"](random.Random(0), 5000)


def test_cards_say_what_was_measured(capsys):
    document = json.loads((RESULTS / "overlap.json").read_text())
    counted = {row["set"]: (row["n"], row["value"]) for row in document["rows"]}
    assert len(shipped_policies()) == 4
    for entry in shipped_policies():
        told = entry.card["decontamination"]
        assert told["files"] == document["evaluated"]
        sets, left = told["sets"], told.get("not_removed", {})
        assert told["removed"] and {*left} <= {*sets} and all(left.values())
        # Short texts were looked for when Qwen's was trained.
        assert bool(left) == entry.name.startswith("smollm2")
        if "mmlu" in sets:  # the test questions are counted, but not trained on
            assert sets["mmlu"]["compared"] < counted["mmlu"][0]
        for name in {*sets} & {*counted} - {"mmlu"}:
            assert (sets[name]["compared"], sets[name]["overlapping"] + left.get(name, 0)) == counted[name]
        # The description beside the weights is the one that they carry.
        policy = Policy.from_pretrained(entry.folder)
        assert policy.card == entry.card
        more = f", but not {sum(left.values())} more with" if left else ""
        assert f"and were left out{more}" in describe_overlap(entry.card)
        assert ("but not" in describe_overlap(entry.card)) == bool(left)
        [source] = {row.get("source") for row in entry.card["fidelity"]}
        if source is None:  # measured by `lkv fit` itself, on its held-out texts
            rows = {row["retention"]: row for row in entry.card["fit"]["comparison"] if row["method"] == "lkv"}
            assert all(row["kl"] == rows[row["retention"]]["kl"] for row in entry.card["fidelity"])
            continue
        measured = json.loads((RESULTS / Path(source).name).read_text())
        method = "lkv-paper" if entry.has_paper_scorer else "lkv"
        assert measured.get(method, measured)["policy"] == policy.digest()
        kl = {
            (row["tokens"], row["retention"]): round(row["kl"], 3)
            for row in measured["rows"]
            if row["task"] == "all" and row["method"] == method
        }
        assert all(row["kl"] == kl[row["tokens"][0], row["retention"]] for row in entry.card["fidelity"])
    assert main(["policies"]) == 0
    assert capsys.readouterr().out.count("  overlap   ") == 4


def test_needles_occur_once_in_the_prose():
    prose = ["Some sentence of real prose stands here. " * 2000]
    for seed in range(5):
        tokenizer = Words()
        item = heldout.make_needles(tokenizer, prose, 300, 4, seed)
        assert 250 < len(item.ids) < 330
        key = item.question.split(" for ")[1].split(" mentioned")[0]
        needle = tokenizer(f"One of the special magic numbers for {key} is: {item.answer}.")["input_ids"]
        places = [i for i in range(len(item.ids)) if item.ids[i : i + len(needle)] == needle]
        assert len(places) == 1
        assert heldout.make_needles(tokenizer, prose, 300, 4, seed) == item


def test_the_ratio_of_two_fits_is_that_of_their_means():
    def sample(own, other, continuations):
        return {"rows": [("lkv@a", 0.1), ("kvzip", 0.1)], "measured": [[[own, 1.0], [other, 1.0]]] * continuations}

    samples = [(1000, sample(1.0, 2.0, 2)), (1000, sample(3.0, 2.0, 1)), (2000, sample(5.0, 4.0, 1))]
    first, second = fit.ratios(samples, ["lkv@a"], ["kvzip", "absent"])
    assert (first["against"], first["tokens"], first["retention"], first["n"]) == ("kvzip", 1000, 0.1, 3)
    assert (first["value"], first["low"], first["high"]) == pytest.approx((5 / 6, 1 / 2, 3 / 2))
    assert (second["value"], second["low"], second["high"]) == (1.25, 1.25, 1.25)
    # A sample without the baseline, whose rows are at other places, does not count.
    rows = [("lkv@b", 0.1), ("lkv@a", 0.1)]
    skipped = (1000, {"rows": rows, "measured": [[[7.0, 1.0], [8.0, 1.0]]]})
    assert fit.ratios([*samples, skipped], ["lkv@a"], ["kvzip"]) == [first, second]
    assert fit.ratios([skipped, *samples], ["lkv@a"], ["kvzip"]) == [first, second]
    (other,) = fit.ratios([skipped, *samples], ["lkv@a"], ["lkv@b"])
    assert (other["value"], other["n"]) == (8 / 7, 1)


@pytest.mark.parametrize("changed", ["data", "versions", "details"])
def test_an_interrupted_benchmark_resumes_on_the_same_files_and_versions_alone(tmp_path, monkeypatch, changed):
    data, measured = tmp_path / "data", []
    data.mkdir()
    (data / "texts.txt").write_text("one")
    options = argparse.Namespace(out=tmp_path / "some.json", data=data, seed=0)

    def run(details=None):
        common.run_cases(
            "experiments.some", options, "some", {"a": (1,), "b": (2,)}, measure, lambda samples: [*samples.values()],
            SimpleNamespace(digest=lambda: "p"), details={"fits": "x"} | (details or {}),
        )  # fmt: skip

    def measure(case):
        measured.append(case)
        if measured == [1, 2]:
            raise KeyboardInterrupt
        if len(measured) == 3:  # packages that go during a run
            monkeypatch.setattr(provenance, "_version", lambda package: "absent")
        return {"value": case}

    versions = collect_provenance()["versions"]
    with pytest.raises(KeyboardInterrupt):
        run()
    other = {}
    with monkeypatch.context() as patch:
        if changed == "data":
            (data / "texts.txt").write_text("another")
        elif changed == "versions":
            patch.setattr(common, "collect_provenance", lambda: {"versions": {"torch": "0"}})
        else:
            other = {"fits": "y"}
        with pytest.raises(DataError, match="samples of other settings"):
            run(other)
    (data / "texts.txt").write_text("one")
    run()
    document = json.loads(options.out.read_text())
    assert measured == [1, 2, 2] and document["rows"] == [{"value": 1}, {"value": 2}]
    assert (document["policy"], document["fits"], document["versions"]) == ("p", "x", versions)


def test_a_fit_is_taken_again_only_with_the_settings_that_it_was_made_with(tmp_path, monkeypatch):
    made, spec = [], patch_attention(tiny_llama()).spec

    def stub(model, tokenizer, minutes, out, name, **data):
        made.append((minutes, sorted(data)))
        Policy(spec).save_pretrained(out)
        return Policy.from_pretrained(out)

    monkeypatch.setattr(fit.fitting, "fit", stub)
    for name in ("data", "train", "more"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "texts.txt").write_text(name)
    subject = Subject(None, None, None, "owner/Tiny")

    def fitted(kind, **changed):
        options = {"threads": 1, "dtype": "bfloat16", "train": tmp_path / "train", "data": tmp_path / "data"}
        options |= {"work": tmp_path / "work"} | changed
        return fit.fitted(subject, kind, SimpleNamespace(**options))

    first = fitted("clean:5")
    assert fitted("clean:5").digest() == first.digest() and made == [(5.0, ["against", "data"])]
    (tmp_path / "more" / "texts.txt").write_text("longer than it was")
    others = {"threads": 2}, {"dtype": "float32"}, {"train": tmp_path / "more"}, {"data": tmp_path / "more"}
    for changed in others:
        fitted("clean:5", **changed)
    monkeypatch.setattr(fit, "RECIPE", replace(fit.RECIPE, lr=1.0))
    fitted("clean:5")
    assert len(made) == 1 + len(others) + 1
    with pytest.raises(DataError, match="name it with --train"):
        fitted("clean:1", train=None)
    # Without texts of its own a fit does not depend on --train; the mixture is compared with nothing.
    for name, changed in (("none:1", {"train": None}), ("mixture:1", {"data": tmp_path / "more"})):
        before = len(made)
        assert fitted(name) and fitted(name, **changed) and len(made) == before + 1


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1)
