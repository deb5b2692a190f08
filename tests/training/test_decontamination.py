"""Training items that share words with evaluated texts."""

import gzip
import json
import random

import pytest

from lkv.errors import DataError
from lkv.training.data.decontamination import NgramOverlap, OverlapCounts
from lkv.training.data.documents import Passage, ShortQuestion
from tests.experiments.made_sets import prose


def test_a_text_overlaps_by_its_share_of_known_n_grams(tmp_path):
    rng = random.Random(5)
    shared, apart = prose(rng, 60), prose(rng, 60)
    file = tmp_path / "eval.jsonl.gz"
    row = {"context": f"Before. {shared.upper()} After.", "input": "Who was it that saw the old keeper?"}
    file.write_bytes(gzip.compress(json.dumps(row).encode() + b"\n"))
    overlap = NgramOverlap([file])
    assert overlap.share(shared) == 1.0 and overlap.share(apart) == 0.0 and overlap.share("too short") == 0.0
    quote = " ".join(apart.split()[:40] + shared.split()[:20])
    grams = [tuple(quote.lower().rstrip(".").split()[i : i + 13]) for i in range(60 - 12)]
    known = {tuple(shared.lower().rstrip(".").split()[i : i + 13]) for i in range(60 - 12)}
    assert 0 < overlap.share(quote) < 0.2
    assert overlap.share(quote) == pytest.approx(sum(g in known for g in grams) / len(grams))
    items = [Passage("", text) for text in (apart, shared, quote)]
    items.append(Passage("", apart[::-1], (("who was it that saw the old keeper", "x"),)))
    assert overlap.clean("squad", items) == items[:1] and overlap.counts == {"squad": OverlapCounts(4, 3, 3)}


def test_a_short_text_inside_an_evaluated_one_overlaps(tmp_path):
    """As LongBench's TREC has its questions: one in `input` beside a label, hundreds in one `context`."""
    shots = ["Who built the old stone tower ?", "What did the keeper of the lamp say to the last sailor ?"]
    row = {"input": "Question: How many ships left the harbour ?\nType:"}
    row["context"] = "\n".join(f"Question: {question}\nType: x" for question in shots)
    (tmp_path / "trec.jsonl").write_text(json.dumps(row) + "\n")
    overlap = NgramOverlap([tmp_path / "trec.jsonl"])
    for question in (*shots, "How many ships left the harbour?"):
        assert overlap.share(question) == 1.0
    for question in ("Who built the old tower ?", "Who built the old stone bridge ?", f"{shots[0]} Nobody"):
        assert overlap.share(question) == 0.0
    question = "What did the keeper of the lamp say to the first sailor ?"
    assert overlap.share(question) == 0.0 and 0 < NgramOverlap([tmp_path / "trec.jsonl"], 6).share(question) < 1
    items = [ShortQuestion(question, "x") for question in (*shots, "Who built the new stone tower ?")]
    assert overlap.clean("trec", items) == items[2:] and overlap.counts == {"trec": OverlapCounts(3, 2, 2)}


@pytest.mark.parametrize(("name", "encoding"), [("old.txt", "cp1252"), ("wide.txt", "utf-16"), ("old.csv", "cp1252")])
def test_an_evaluated_text_in_another_encoding_overlaps(tmp_path, name, encoding):
    text = "Die Brücke über den Fluß ist für Fußgänger gesperrt, die Fähre fährt während der Bauzeit täglich weiter."
    (tmp_path / name).write_text(f'text\n"{text}"\n', encoding=encoding)
    assert NgramOverlap([tmp_path / name]).share(text) == 1.0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "there is no file"),
        ("half.jsonl", b'{"context": "a"}\n{"con', "line 2: not a JSON object"),
        ("x.zip", b"PK nothing", "cannot be read"),
        ("x.json", b"[[[", "is not JSON"),
        ("empty.txt", b"  \n", "has no text to compare with"),
        ("x.parquet", b"PAR1 no more", "is not a readable Parquet file"),
    ],
)
def test_an_evaluation_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        NgramOverlap([tmp_path / name])
