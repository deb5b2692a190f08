"""Questions in a row and endless chats: histories, predictions and bounds against the stock model and a plain cache."""

import json
import random
import shlex
import sys

import pytest
import torch

from experiments import chat, questions, turns
from experiments.common import Subject
from experiments.heldout import Needles
from experiments.samples import read_kept_samples
from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress
from lkv.hf.attention import patch_attention
from lkv.hf.loading import load_model
from lkv.policy.policy import Policy
from lkv.utils.prompts import decode_tail, encode_next_question, encode_question
from tests.conftest import save_model


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    saved = save_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2, max_position_embeddings=8192)
    torch.manual_seed(0)
    model, tokenizer = load_model(str(saved))
    return Subject(model, tokenizer, Policy(patch_attention(model).spec, {"hub": ["owner/tiny"]}), "owner/tiny")


@torch.no_grad()
def test_questions_in_a_row_are_compared_with_the_full_cache(subject):
    model, tokenizer = subject.model, subject.tokenizer
    source = random.Random(0)
    facts = [("Where?", "a"), ("Which one is it?", "b"), ("And when?", "c")]
    item = Needles([source.randint(3, 200) for _ in range(80)], facts, *facts[0])
    rows = [("lkv", 0.3), ("lkv, anew", 0.3)]
    sample = turns.measure(subject, item, rows)
    ids = list(item.ids)
    for number, (question, _) in enumerate(facts):
        begin, encode = len(ids), encode_next_question if number else encode_question
        prompt = ids + encode(tokenizer, question, decode_tail(tokenizer, ids))
        out = model.generate(torch.tensor([prompt]), max_new_tokens=turns.LENGTH, do_sample=False)[0].tolist()
        ids, start = out[:-1], len(prompt)
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0, start - 1 :].double(), -1)
        for row, compressed in enumerate((80, begin)):  # tokens
            cache = RaggedCache(model, memory=0.3, policy=subject.policy)
            model(torch.tensor([ids[:compressed]]), past_key_values=cache)
            parts = [model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1] for token in ids[compressed:]]
            own = torch.log_softmax(torch.stack(parts)[start - 1 - compressed :].double(), -1)
            kl, agreement = sample["measured"][number][row]
            assert (
                kl == pytest.approx(float((expected.exp() * (expected - own)).sum(-1).mean()), abs=2e-5) and kl > 1e-4
            )
            assert agreement == pytest.approx(float((expected.argmax(-1) == own.argmax(-1)).float().mean()))
    assert sample["measured"][0][0] == pytest.approx(sample["measured"][0][1], abs=1e-5)  # no history yet
    halves = turns.summarise([sample])
    first, last = (row["kl"] for row in halves if row["method"] == "lkv, anew" and row["turns"] != "all")
    assert (first, last) == pytest.approx(
        (sample["measured"][0][1][0], sum(sample["measured"][turn][1][0] for turn in (1, 2)) / 2)
    )


@pytest.mark.slow
def test_an_endless_chat_stays_in_its_bytes(subject, tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "subject_of", lambda options, kind: subject)
    arguments = shlex.split("--methods lkv full --sentences 3 --turns 20 --memory 0.5 --chats 1 --out")
    monkeypatch.setattr(sys, "argv", ["chat", *arguments, str(tmp_path / "chat.json")])
    chat.main()
    rows = json.loads((tmp_path / "chat.json").read_text())["rows"]
    assert [(row["method"], row["facts in the"], row["n"]) for row in rows] == [
        (method, place, 4) for method in ("lkv", "full") for place in ("text", "first turns")
    ]
    bounded, full = rows[0], rows[2]
    assert bounded["full_nbytes"] == full["full_nbytes"] and bounded["tokens"] > 20 * 12
    assert full["held"] >= 2 * 2 * 2 * 8 * 4 * full["tokens"]  # k and v of 2 layers, 2 heads, 8 channels, in float32
    assert 0.45 * bounded["full_nbytes"] < bounded["held"] <= 0.5 * bounded["full_nbytes"]


def test_every_answer_stands_in_its_document():
    asked = json.loads((questions.FOLDER / "questions.json").read_text())
    assert sum(map(len, asked.values())) == 46
    for name, pairs in asked.items():
        text = (questions.FOLDER / name).read_text()
        assert [forms for _, forms in pairs if not questions.is_right(text, forms)] == []
        assert not any(questions.is_right(question, forms) for question, forms in pairs)


@pytest.mark.slow
def test_answers_are_those_of_the_contexts(subject, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("The mill stands in Selby. " * 12)
    (tmp_path / "questions.json").write_text(json.dumps({"a.txt": [["Where?", [""]], ["Who?", ["no such words"]]]}))
    monkeypatch.setattr(questions, "FOLDER", tmp_path)
    monkeypatch.setattr(questions, "subject_of", lambda options, kind: subject)
    arguments = shlex.split("--memory 0.3 --methods lkv --out")
    monkeypatch.setattr(sys, "argv", ["questions", *arguments, str(tmp_path / "some.json")])
    questions.main()
    rows = json.loads((tmp_path / "some.json").read_text())["rows"]
    assert [(row["method"], row["memory"], row["value"], row["right"], row["lost"]) for row in rows] == [
        ("full", 1.0, 0.5, 1, 0), ("lkv", 0.3, 0.5, 1, 0)
    ]  # fmt: skip
    samples = read_kept_samples(tmp_path / "some.json")["a.txt"]
    context = compress(
        subject.model, subject.tokenizer, "The mill stands in Selby. " * 12, memory=0.3, policy=subject.policy
    )
    assert samples["answers"][1] == [context.ask(question, questions.LENGTH) for question in ("Where?", "Who?")]
