"""The texts of `lkv fit`: which are used, held out and refused."""

import inspect
import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from lkv.cli.main import main
from lkv.errors import DataError
from lkv.training import fit_run
from lkv.training.config import RECIPE
from lkv.training.data.documents import Passage, split_held_out
from lkv.training.data.mixture import BUILTIN_SOURCES, Mixture
from lkv.training.datasets import open_texts
from lkv.training.fit_plan import FitSamples
from lkv.training.fitting import fit
from tests.training.fit.helpers import TEXT, comparison_rows


def test_texts_that_are_too_few_are_refused(loaded, tmp_path, capsys):
    with pytest.raises(DataError, match="the texts hold 12 characters of text; give at least 2,000"):
        fit(*loaded, ["Hello there."])
    for texts in (TEXT, [TEXT, b"bytes"]):
        with pytest.raises(DataError, match="texts must be a list of strings, one for each document"):
            fit(*loaded, texts)
    assert open_texts(iter([TEXT])).digest == open_texts([TEXT]).digest
    (tmp_path / "empty").mkdir()
    assert main(["fit", "--data", str(tmp_path / "empty")]) == 2
    assert "holds 0 characters of text" in capsys.readouterr().err
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "cat.png").write_bytes(b"\x89PNG")
    (tmp_path / "pictures" / "table.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"pictures holds 0 characters.*skipped \(data of unknown form\): table.csv"):
        open_texts((), tmp_path / "pictures")
    (tmp_path / "pictures" / "NOTES.TXT").write_text(TEXT)
    assert open_texts((), tmp_path / "pictures").own_chars == len(TEXT)
    with pytest.raises(DataError, match="there is no data folder"):
        open_texts((), tmp_path / "nowhere")


def test_at_least_half_of_the_samples_are_of_own_texts(tmp_path):
    assert set(open_texts((), None).names) == {*BUILTIN_SOURCES, "facts"}
    assert set(open_texts([TEXT * 200], None).names) == {"prose", *BUILTIN_SOURCES, "facts"}
    assert open_texts([TEXT], None).digest != open_texts([TEXT + "."], None).digest
    for number in range(8):
        (tmp_path / f"tool{number}.c").write_text(f"int f{number}(int x) {{ return x + {number}; }}\n" * 40)
    mixture = open_texts((), tmp_path)
    assert set(mixture.names) == {"code", *BUILTIN_SOURCES, "facts"}
    assert open_texts([TEXT * 200], tmp_path).names[:2] == ["prose", "code"]
    long_text = open_texts([TEXT * 200], None)
    assert long_text.own_chars > 100_000
    drawn = Counter(long_text.sample(number, 1).source for number in range(600))
    assert abs(drawn["prose"] / 600 - 0.5) < 0.07


def test_a_short_text_is_not_half_of_the_samples():
    for text in (TEXT, TEXT * 10):
        mixture = open_texts([text], None)
        share = mixture.weights["prose"] / sum(mixture.weights.values())
        natural = 5 / (5 + 10 + 8 + 14 + 9 + 10 + 20)
        assert share == pytest.approx(max(natural, mixture.own_chars / 200_000)) and share < 0.5
        drawn = sum("mill by the river" in mixture.sample(number, 1).context for number in range(300)) / 300
        assert abs(drawn - share) < 0.1  # facts are not told in this text alone


def test_of_a_text_in_two_pieces_the_shorter_one_is_held_out():
    texts = open_texts([TEXT * 3 + "end"])
    assert texts.own_chars == len(TEXT) * 3 + 3
    held_out, learned = (
        sum(len(item.text) for item in side._items.get("prose", ())) for side in (texts.held_out(RECIPE.seed), texts)
    )
    assert (held_out, learned) == (len(TEXT) * 3 + 3 - 12_000, 12_000)
    assert open_texts((), None).weights == {
        "python": 10,
        "manual": 8,
        "tales": 14,
        "talks": 9,
        "articles": 10,
        "facts": 20,
    }


def test_a_text_of_a_few_words_is_not_held_out_alone():
    texts = ["import os", "longer " * 400, "long " * 500]  # none of them falls into the share that is held out
    passages = [Passage("", text) for text in texts]
    for order in (passages, passages[::-1]):
        assert [item.text for item in split_held_out(order, True)] == [texts[2]]
    assert [item.text for item in split_held_out([passages[0], Passage("", "import system")], True)] == ["import os"]


@pytest.mark.slow
@pytest.mark.usefixtures("ticking")
def test_a_policy_is_not_compared_on_a_few_words(loaded, monkeypatch):
    """Where longer texts are held out; every other one has eight tokens here."""
    init, seen, rows = FitSamples.__init__, [], comparison_rows({"lkv": (0.1, 0.5)})

    def cut(samples, texts, draw, *settings):
        def draw_short(data, number, **lengths):
            sample = draw(data, number, **lengths)
            return sample if number % 2 else replace(sample, context=sample.context[:8])

        init(samples, texts, draw_short, *settings)

    monkeypatch.setattr(FitSamples, "__init__", cut)
    monkeypatch.setattr(fit_run, "compare", lambda model, tokenizer, samples, *_: seen.extend(samples) or rows)
    fit(*loaded, minutes=0.1, name="tiny")
    assert seen and min(len(text.context) for text in seen) >= 50


@pytest.mark.slow
@pytest.mark.usefixtures("ticking")
def test_documents_that_overlap_with_evaluated_texts_are_left_out(loaded, tmp_path, capsys):
    model, tokenizer = loaded
    rng = random.Random(4)
    books = [" ".join(f"word{rng.randint(0, 999)}" for _ in range(3000)) for _ in range(4)]
    evaluated = tmp_path / "evaluated.jsonl"
    evaluated.write_text(json.dumps({"context": books[2] + inspect.getsource(random), "input": "", "answers": []}))
    policy = fit(model, tokenizer, books, minutes=0.06, name="tiny", against=[evaluated])
    assert policy.card["training"]["dtype"] == "float32"
    checked = policy.card["decontamination"]
    assert checked["removed"] and list(checked["files"]) == ["evaluated.jsonl"]
    assert checked["sets"]["texts"] == {"compared": 8, "shared": 2, "overlapping": 2}
    assert checked["sets"]["python"]["overlapping"] >= 1  # random.py
    assert "of 6 sets compared with 1 evaluation files" in capsys.readouterr().err
    with pytest.raises(DataError, match="there is no"):
        fit(model, tokenizer, books, minutes=0.05, name="tiny", against=[tmp_path / "nowhere"])


def test_samples_that_are_built_are_refused(loaded, tmp_path):
    (tmp_path / "build.json").write_text("{}")
    with pytest.raises(DataError, match=r"samples of experiments\.data, which `lkv train` reads; give the folder"):
        open_texts((), tmp_path)


def test_a_document_of_the_extra_is_read(tmp_path):
    (tmp_path / "page.html").write_text(f"<html><body><p>{TEXT}</p></body></html>")
    (tmp_path / "old.html").write_bytes(f"<html><body><p>caf\xe9 {TEXT}</p></body></html>".encode("latin-1"))
    (tmp_path / "empty.htm").write_text("<html><body><img src=x></body></html>")
    (tmp_path / "cut.pdf").write_bytes(b"%PDF-1.7 and nothing else")
    mixture = open_texts((), tmp_path)
    assert mixture.own_chars == pytest.approx(2 * len(TEXT), rel=0.05)
    skipped = "skipped (no text that can be read): cut.pdf, empty.htm"
    assert mixture.lines == ["used as text: old.html, page.html", skipped]
    with pytest.raises(DataError, match=r"cut.pdf is a damaged PDF .* its text, or remove it from the folder\.$"):
        Mixture(tmp_path, (100, 400))
