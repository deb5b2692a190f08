"""Metrics equal the official ones: on stored pairs scored by the official scripts, and by properties."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lkv.errors import DataError, MissingPackageError
from lkv.evaluation.example import Example
from lkv.evaluation.metrics import METRICS, score

PAIRS = json.loads((Path(__file__).parents[1] / "fixtures/official_scores.json").read_text(encoding="utf-8"))["pairs"]


def example(metric: str, answers: list[str], classes: list[str] | tuple = (), first_line: bool = False) -> Example:
    parts = ("longbench", "task", 0, "context", "question", "", tuple(answers), 8, metric)
    return Example(*parts, classes=tuple(classes), first_line=first_line)


@pytest.mark.parametrize("metric", METRICS)
def test_equal_to_the_official_scripts(metric):
    pairs = [pair for pair in PAIRS if pair["metric"] == metric]
    for pair in pairs:
        item = example(metric, pair["answers"], pair["classes"], pair["first_line"])
        own = score(item, pair["answer"])
        # RULER's script rounds to two digits.
        own = round(own, 2) if metric.startswith("string") else own
        assert own == pytest.approx(pair["score"], abs=1e-9), pair
    scores = {pair["score"] for pair in pairs}
    assert min(scores) == 0.0 and max(scores) > 99.9 and len(PAIRS) >= 200


@given(st.lists(st.sampled_from(["red", "Red", "the", "fox", "a", "fox.", "ran"]), max_size=8), st.text(max_size=20))
def test_words_count_in_any_order_and_dress(words, other):
    item = example("qa_f1", [" ".join(words), other])
    dressed = "  ".join(f"The {word.upper()}!" for word in reversed(words))
    content = [word for word in words if word not in ("the", "a")]
    assert score(item, dressed) == (pytest.approx(100.0) if content else score(example("qa_f1", [other]), dressed))


@given(st.sampled_from(sorted(METRICS)), st.text(max_size=30), st.lists(st.text(max_size=10), min_size=1, max_size=4))
def test_scores_lie_between_0_and_100(metric, answer, answers):
    if metric == "retrieval":
        answers = [f"Paragraph {len(text)}" for text in answers]
    value = score(example(metric, answers, classes=answers), answer)
    assert 0.0 <= value <= 100.0


@given(st.lists(st.text("abc 1", min_size=1, max_size=6), min_size=1, max_size=5), st.text("ABC 1", max_size=20))
def test_all_is_the_mean_of_part(answers, text):
    each = [score(example("string_match_part", [answer]), text) for answer in answers]
    assert score(example("string_match_all", answers), text) == pytest.approx(sum(each) / len(each))
    assert score(example("string_match_part", answers), text) == max(each)


@given(st.text("ab\n", max_size=12))
def test_only_the_first_line_counts_where_asked(answer):
    first = answer.lstrip("\n").partition("\n")[0]
    item = example("qa_f1", ["ab ba"], first_line=True)
    assert score(item, answer) == score(example("qa_f1", ["ab ba"]), first)


def test_an_unknown_metric_a_wrong_answer_and_a_missing_package_are_named(monkeypatch):
    with pytest.raises(DataError, match="no metric 'bleu'; use one of qa_f1, rouge_l"):
        score(example("bleu", ["x"]), "x")
    with pytest.raises(DataError, match="'seven' names no paragraph; it must contain 'Paragraph' and a number"):
        score(example("retrieval", ["seven"]), "7")
    monkeypatch.setitem(sys.modules, "rouge", None)
    with pytest.raises(MissingPackageError, match=r"ROUGE-L needs .*rouge.*pip install .*\[evals\]"):
        score(example("rouge_l", ["x"]), "x")
