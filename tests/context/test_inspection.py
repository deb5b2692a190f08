"""lkv inspect of a text: the page shows what the cache really keeps."""

import base64
import json
import os
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress
from lkv.context.inspection import inspect_text, token_texts
from lkv.errors import LkvError
from lkv.hf.loading import load_model
from lkv.policy.policy import Policy
from lkv.utils.prompts import encode_context
from tests.commands import main
from tests.conftest import save_model, uneven_policy

TEXT = "The keeper counted <b>42</b> steps; naïve & proud — 灯台. </script> " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("look")
    save_model(path / "model")
    (path / "log.txt").write_text(TEXT, encoding="utf-8")
    model, _ = load_model(str(path / "model"))
    uneven_policy(model, 3).save_pretrained(path / "policy")
    return path


def data_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


@pytest.mark.parametrize("method", ["lkv", "knorm", "ada+keydiff", "snapkv", "criticalkv"])
def test_a_head_keeps_on_the_page_what_it_keeps_in_the_cache(folder, method):
    model, tokenizer = load_model(str(folder / "model"))
    policy = Policy.from_pretrained(folder / "policy") if method == "lkv" else None
    found = inspect_text(model, tokenizer, TEXT, method, policy, shares=(0.1, 0.3, 0.7, 1.0), by_memory=False)
    cache = RaggedCache(model, policy=policy, retention=0.3, method=method)
    ids = torch.tensor([encode_context(tokenizer, TEXT)])
    model(ids, past_key_values=cache, use_cache=True)
    assert cache.kept_counts() == found.counts[1, 0].reshape(found.layers, found.heads).tolist()
    whole = RaggedCache(model, method="knorm", retention=1.0)
    model(ids, past_key_values=whole, use_cache=True)
    for layer in range(found.layers):
        for head in range(found.heads):
            keys = [held_keys(cached, layer, head) for cached in (cache, whole)]
            place = layer * found.heads + head
            tokens = np.flatnonzero(found.ranks[:, place] < found.counts[1, 0, place])
            torch.testing.assert_close(keys[0].sort(0).values, keys[1][tokens].sort(0).values)


def test_tiers_on_the_page_are_those_of_the_cache(folder):
    """Within a memory budget: entries of each head in each tier, and bytes."""
    model, tokenizer = load_model(str(folder / "model"))
    policy = Policy.from_pretrained(folder / "policy")
    found = inspect_text(model, tokenizer, TEXT, "lkv", policy, shares=(0.1, 0.3, 1.0))
    for share, counts in zip(found.shares[:2], found.counts, strict=False):
        cache = compress(model, tokenizer, TEXT, policy=policy, memory=share).cache
        lens = np.diff(counts, axis=0, prepend=0)
        for layer, state in enumerate(layer.store.tiers for layer in cache.ragged_layers):
            heads = slice(layer * found.heads, (layer + 1) * found.heads)
            held = {tier.precision: tier.lens[0].tolist() for tier in state}
            shown = {each: lens[place, heads].tolist() for place, each in enumerate(found.precisions)}
            assert held == {each: numbers for each, numbers in shown.items() if each in held}
            assert all(sum(numbers) == 0 for each, numbers in shown.items() if each not in held)
        basis = found.shape.heads * found.shape.basis_bits / 8
        nbytes = sum(row.sum() * found.entry_bytes(each) for row, each in zip(lens, found.precisions, strict=True))
        assert nbytes + basis == cache.nbytes()
    assert (found.counts[2][-1] == len(found.pieces)).all()


def held_keys(cache: RaggedCache, layer: int, head: int) -> torch.Tensor:
    """The keys [n, d] that a head holds of the prompt, in the order of their tokens."""
    state = cache.ragged_layers[layer].state()
    start = int(state["kept"][0, :head].sum())
    return state["k"].reshape(-1, state["k"].shape[-1])[start : start + int(state["kept"][0, head])]


@given(st.text(min_size=1, max_size=60))
def test_pieces_put_together_are_the_text(tokenizer, text):
    if text.encode("utf-8", "ignore").decode() != text:  # half a surrogate pair is not text
        return
    ids = encode_context(tokenizer, text)
    pieces = token_texts(tokenizer, text, ids)
    assert len(pieces) == len(ids) and "".join(pieces).endswith(text)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_model(str(folder / "model"))[1]


def test_the_page_holds_text_numbers_and_answers_and_needs_nothing_else(folder, tmp_path, capsys):
    out = tmp_path / "page.html"
    words = ["inspect", str(folder / "log.txt"), "--model", str(folder / "model"), "--out", str(out)]
    more = ["--policy", str(folder / "policy"), "--question", "How many?", "--against", "knorm", "--retention", "0.3"]
    assert main([*words, *more, "--max-new-tokens", "3"]) == 0
    page = out.read_text(encoding="utf-8")
    said = capsys.readouterr()
    assert "the page is in" in said.out
    steps = [
        r"reading \d+ tokens, to see .*: about 1 s; the full KV cache takes [\d.]+ MB",
        r"1 question, 3 methods: each reads the text again, about 1 s, .*",
        r"\d+ tokens in \d+ x \d+ heads",
    ]
    shown = [line[1:-1] for line in said.err.splitlines() if line.startswith("[")]
    assert len(shown) == 3 and all(map(re.fullmatch, steps, shown)), shown
    assert not re.search(r"(?:src|href)=|@import|url\(|https?://", page)
    data = data_of(page)
    assert (
        "".join(data["pieces"]).endswith(TEXT)
        and data["shares"][data["start"]] == 0.3
        and data["budget"] == "retention"
    )
    ranks = np.frombuffer(base64.b64decode(data["ranks"]), "<u2").reshape(len(data["pieces"]), -1)
    assert ranks.shape[1] == data["layers"] * data["heads"] == 6
    assert (np.sort(ranks, 0) == np.arange(len(ranks))[:, None]).all()
    answers = data["answers"]["How many?"]
    assert [answer["label"] for answer in answers] == ["Full cache", "LKV", "Knorm"]
    model, tokenizer = load_model(str(folder / "model"))
    for answer, method in zip(answers[::2], ("full", "knorm"), strict=True):
        context = compress(model, tokenizer, TEXT, method=method, retention=None if method == "full" else 0.3)
        # Before it is asked: what an answer appends is none of the text's.
        assert answer["nbytes"] == context.nbytes() and answer["realised"] == context.realised_retention()
        assert answer["text"] == context.ask("How many?", 3)


def test_a_name_that_is_no_utf_8_is_shown(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / os.fsdecode(b"log\xff.txt")
    text.write_text(TEXT, encoding="utf-8")
    assert main(["inspect", str(text), "--model", str(folder / "model"), "--method", "knorm"]) == 0
    assert "log\ufffd.txt" in text.with_suffix(".html").read_text(encoding="utf-8")


def test_only_a_page_is_overwritten(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["inspect", str(folder / "log.txt"), "--model", str(folder / "model"), "--method", "knorm"]
    report = tmp_path / "log.html"
    report.write_text("<html><title>My report</title></html>")
    for out in ([], ["--out", "log.html"]):
        assert main([*words, *out]) == 2
        assert "log.html is not a page of lkv inspect and would be overwritten; give another" in capsys.readouterr().err
    assert "My report" in report.read_text()
    report.unlink()
    assert main(words) == 0
    page = report.read_text(encoding="utf-8")
    assert main([*words, "--retention", "0.3"]) == 0 and report.read_text(encoding="utf-8") != page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "full"], "'full' keeps everything"),
        (["--method", "kvzip"], "'kvzip' needs a second pass"),
        (["--method", "duo"], "'duo' needs a pattern of retrieval heads"),
        (["--question", "why?", "--against", "duo"], "'duo' needs a pattern of retrieval heads"),
        (["--json"], "--json and --figure show a policy, but a text was given"),
    ],
)
def test_what_a_page_cannot_show_is_told_before_a_model_is_loaded(tmp_path, capsys, words, said):
    (tmp_path / "log.txt").write_text("one two")
    assert main(["inspect", str(tmp_path / "log.txt"), "--model", str(tmp_path / "none"), *words]) == 2
    assert said in capsys.readouterr().err


def test_what_cannot_be_looked_at_is_one_sentence(folder, capsys, monkeypatch, tmp_path):
    model, tokenizer = load_model(str(folder / "model"))
    with pytest.raises(LkvError, match="'kvzip' needs all layers"):
        inspect_text(model, tokenizer, TEXT, "kvzip")
    with pytest.raises(LkvError, match="shorten it"):
        inspect_text(model, tokenizer, TEXT * 9, "knorm")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.html").write_text("<html><p>words</p></html>")
    assert main(["inspect", "log.html", "--model", str(folder / "model")]) == 2
    assert "the page would overwrite log.html itself" in capsys.readouterr().err
    assert main(["inspect", "nowhere.txt", "--question", "why?"]) == 2
    assert "without a text ('nowhere.txt' is not a text file) does not read --question" in capsys.readouterr().err
