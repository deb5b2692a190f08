"""lkv ask: a document in, answers out; what is saved is loaded again, and mistakes are one sentence."""

import re
import sys

import pytest
import torch
from transformers import GenerationConfig

from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.hf.loading import load_model
from lkv.hf.progress import report_progress
from tests.cli.asking import TEXT, answer, read
from tests.conftest import tiny_llama


def test_protected_words_are_kept(folder, asked, tmp_path):
    words = ["--protect", "lighthouse", "--protect", "dusk"]
    status, out, _ = asked(folder / "text.md", "When?", *words, "--retention", "0.5", "--save", tmp_path / "text.kv")
    model, tokenizer = load_model(str(folder / "model"))
    own = compress(model, tokenizer, TEXT, method="knorm", retention=0.5, protect=["lighthouse", "dusk"])
    assert status == 0 and own.ask("When?", 4) in out
    assert Context.load(tmp_path / "text.kv", model, tokenizer).metadata == own.metadata
    assert asked(folder / "text.md", "When?", "--protect", "moon")[0] == 2
    assert asked("--load", tmp_path / "text.kv", "When?", *words, method=None)[0] == 2


def test_bytes_are_told_beside_those_of_the_full_cache(folder, asked):
    _, _, said = asked(folder / "text.md", "When?", "--retention", "0.5")
    pattern = r"KV cache ([\d.]+) MB \(([\d.]+) MB in float32 without compression\)"
    size, full = map(float, re.search(pattern, said).groups())
    # 3 layers x 2 heads x 2 x 8 float32 values a token.
    assert full == pytest.approx(len(TEXT) * 3 * 2 * 2 * 8 * 4 / 1e6, abs=0.06)
    assert 0.5 * full - 0.06 <= size < 0.6 * full
    assert "; kept 50.0% of the KV entries (requested: 0.5); KV cache" in said


def test_the_weights_bytes_are_reported_beside_a_cache_of_less_than_a_tenth(folder, asked, tmp_path):
    seen = set()
    for memory in ("5%", "30%", "60%"):
        _, _, said = asked(folder / "text.md", "When?", "--memory", memory, "--save", tmp_path / "text.kv")
        model, context = read(folder, memory=memory)
        weights = sum(weight.numel() for weight in model.state_dict().values()) * 4
        seen.add(is_small := 10 * context.nbytes() < weights)
        assert said.count(f"; the model's weights take {weights / 1e6:.0f} MB]") == is_small
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--memory", "100%"), "100.0% of the KV entries, quantised (nearly everything: "),
        (("--memory", "1200B"), "a head: too few for most answers); KV cache"),
        (("--retention", "0.02"), f"(requested: 0.02) (about {len(TEXT) // 50} a head: too few for most answers); KV"),
        (("--memory", "30%"), " of the KV entries, quantised; KV cache"),
    ],
)
def test_a_budget_that_keeps_nearly_all_or_too_few_says_so(folder, asked, words, told):
    status, _, said = asked(folder / "text.md", "When?", *words)
    assert status == 0 and told in said


@pytest.mark.parametrize(
    ("words", "amount", "allowed"),
    [
        ((), {"memory": 0.1}, "10%"),
        (("--memory", "0.3"), {"memory": 0.3}, "0.3"),
        (("--memory", "30KB"), {"memory": 30_000}, "30KB"),
        (("--memory", "12.5%", "--streaming", "--chunk", "100"), None, "12.5%"),
        (("--retention", "0.5"), {"retention": 0.5}, None),
        (("--bits", "4"), {"retention": 0.15, "bits": 4}, None),
        (("--bits", "fp8"), {"retention": 0.15, "bits": "fp8"}, None),
        (("--bits", "3", "--retention", "0.4"), {"retention": 0.4, "bits": 3}, None),
    ],
    ids=str,
)
def test_memory_is_what_is_given_and_told(folder, asked, tmp_path, words, amount, allowed):
    saved = tmp_path / "text.kv"
    status, out, said = asked(folder / "text.md", "When?", *words, "--save", saved)
    assert status == 0 and ("memory budget" in said) == (allowed is not None) != ("requested" in said)
    context = Context.load(saved, *load_model(str(folder / "model")))
    used, full = context.cache.nbytes(), len(TEXT) * 3 * 2 * 2 * 8 * 2
    if amount is not None:
        assert out.strip() == answer(folder, "When?", **amount) and context.metadata["bits"] == amount.get("bits")
        assert context.metadata["retention"] == amount.get("retention")
    if allowed:
        limit = {"10%": 0.1 * full, "0.3": 0.3 * full, "30KB": 30_000, "12.5%": 0.125 * full}[allowed]
        assert f"% of the KV entries, quantised; KV cache {used / 1e6:.1f} MB (" in said
        assert f" without compression; memory budget: {allowed} of {full / 1e6:.1f} MB in 16 bits)" in said
        free = sum(layer.store.free_slots for layer in context.cache.ragged_layers) * 2 * 2 * 8 * 4
        assert used - free <= limit and context.metadata["memory"].startswith("memory ")


def test_an_answer_that_ends_at_its_limit_says_so(folder, asked):
    model, context = read(folder)
    context.ask("When?", 4, eos_token_id=None)
    assert context.is_truncated and context.answer_tokens == 4
    for most in (4, 1):  # the first token ends it, be it also the last that it may have
        context.ask("When?", most, eos_token_id=list(range(model.config.vocab_size)))
        assert not context.is_truncated and context.answer_tokens == 1
    settings = GenerationConfig(eos_token_id=list(range(model.config.vocab_size)))
    context.ask("When?", 1, generation_config=settings)
    assert not context.is_truncated and context.answer_tokens == 1
    context.batch_ask(["When?", "Where?"], 3, eos_token_id=None)
    assert context.is_truncated
    _, _, said = asked(folder / "text.md", "When?", "Where?")
    assert said.count("[cut off after 4 tokens; --max-new-tokens allows more]") == 2


def test_a_text_that_is_too_long_is_refused_before_its_time_is_estimated(folder, asked, tmp_path):
    (tmp_path / "long.md").write_text("when " * 3000)
    status, _, said = asked(tmp_path / "long.md", "When?")
    assert status == 2 and "but the model reads at most" in said and "[reading" not in said


@pytest.mark.parametrize("amount", [(), ("--retention", "0.5"), ("--bits", "4")], ids=str)
def test_what_is_saved_answers_as_what_was_read_in_as_many_bytes(folder, asked, tmp_path, amount):
    saved, size = tmp_path / "text.kv", r"KV cache [\d.]+ MB \([\d.]+ MB in float32 without compression"
    _, out, said = asked(folder / "text.md", "When?", *amount, "--save", saved)
    assert f"saved to {saved}" in said and saved.is_file()
    (taken,) = re.findall(size, said)
    status, again, said = asked("--load", saved, "When?", method="")
    assert status == 0 and again == out and f"[loaded {len(TEXT)} tokens; {taken})" in said


def test_reading_shows_its_progress(folder, asked, monkeypatch):
    """A line with an estimate, and a bar where stderr is a terminal."""
    _, _, said = asked(folder / "text.md", "When?")
    (full,) = re.findall(r"KV cache [\d.]+ MB \(([\d.]+) MB", said)
    line = f"[reading {len(TEXT)} tokens: about 1 s; the full KV cache takes {full} MB]"
    assert said.splitlines().count(line) == 1 and "reading " not in asked("nothing")[2]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, _, said = asked(folder / "text.md", "When?")
    assert line in said and re.search(rf"reading .*% \|.*of {len(TEXT)} tokens", said)


def test_options_reach_the_cache(folder, asked):
    _, _, said = asked(folder / "text.md", "When?", "--dtype", "bfloat16", "--chunk", "100")
    assert re.search(r"of 0\.1 MB", said)
    (folder / "long.txt").write_text("words to estimate a pattern from " * 20)
    for method, *options in (
        ("knorm", "--streaming", "--chunk", "100", "--device", "cpu"),
        ("duo", "--retention", "0.95", "--pattern", folder / "long.txt"),
    ):
        status, out, _ = asked(folder / "text.md", "When?", *options, method=method)
        assert status == 0 and out


def test_the_retention_reached_is_reported(folder, asked):
    (folder / "heads.tsv").write_text("0.9\t0.1\n" * 3)
    tokens = len(TEXT)
    for retention, how, method, reached in [
        ("0.5", (), "knorm", 0.5),
        ("0.333", (), "knorm", int(0.333 * tokens) / tokens),
        ("0.95", ("--pattern", folder / "heads.tsv"), "duo", (4 * tokens + 2 * 384) / (6 * tokens)),
        ("1", (), "full", 1.0),
    ]:
        status, _, log = asked(folder / "text.md", "why?", "--retention", retention, *how, method=method)
        assert status == 0 and f"; kept {reached:.1%} of the KV entries (requested: {retention});" in log


@pytest.mark.parametrize(
    ("words", "method", "message"),
    [
        (("--load", "book.txt"), None, "book.txt"),
        (("text", "why?", "--device", "nowhere"), "knorm", "the model cannot be put on the device 'nowhere'"),
        (("text", "why?", "book.txt"), "knorm", "book.txt is a file, and not a question; give all files before the"),
        (("text", "absent.md", "why?"), "knorm", "absent.md does not exist; give a file, or a question of more"),
        (("text", "binary", "why?"), "knorm", "binary cannot be read as text"),
        (("empty", "why?"), "knorm", "no file in empty has text that can be read"),
        (("text", "--compare"), "knorm", "it needs a question; leave --compare out"),
        (("--load", "book.txt", "--compare"), None, "it needs a question; leave --compare out"),
        (("text", " "), "knorm", "the question is empty"),
        (("text", "\udcff"), "knorm", "the question is not valid Unicode text"),
        (("text", "why?", "--save", "text"), "knorm", "is a folder"),
        (("text", "why?"), "duo", "'duo' needs the retrieval heads of the model; give --pattern with"),
        (("text", "why?", "--retention", "0.3"), "full", "'full' keeps everything, not 0.3; leave retention out"),
        (("text", "why?", "--memory", "10%"), "full", "'full' keeps everything; leave memory out"),
        (("text", "why?", "--memory", "10%", "--retention", "0.1"), "knorm", "memory says how much to keep"),
        (
            ("text", "why?", "--memory", "10%", "--bits", "4"),
            "knorm",
            "give it without retention, budget_tokens and bits",
        ),
        (("text", "why?", "--bits", "5"), "knorm", "bits is 5, but it must be one of"),
        (("text", "why?", "--bits", "fp8/4"), "knorm", "bits is 'fp8/4', but it must be one of 8, 'fp8', 4, 3"),
        (("text", "why?", "--pattern", "nowhere.tsv"), "duo", "nowhere.tsv does not exist"),
        (("text", "why?", "--pattern", "x" * 300), "duo", "xxx does not exist; give --pattern"),
        (
            ("text", "why?", "--pattern", "nowhere.tsv"),
            "knorm",
            "does not use a pattern of retrieval heads; remove the pattern",
        ),
        (("text", "why?"), None, "there is no policy for this model (LlamaForCausalLM, 3 layers of 2 KV heads)"),
        (("binary", "why?"), "knorm", "cannot be read as text"),
    ],
)
def test_mistakes_are_one_sentence(folder, asked, words, method, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("text", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "empty" / "binary.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "book.txt").write_text("A book.")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    names = [folder / "text.md" if word == "text" and i == 0 else word for i, word in enumerate(words)]
    status, _, log = asked(*names, method=method)
    lines = [line for line in log.splitlines() if line.startswith("lkv: ")]
    assert status == 2 and len(lines) == 1 and message in lines[0] and "of the KV entries" not in log


def test_layers_tell_of_every_token_once():
    model, seen = tiny_llama(), []
    ids = torch.arange(3, 43)[None]
    with report_progress(model, seen.append):
        for part in ids.split(16, 1):
            model(part)
    assert len(seen) == 3 * 3 and sum(seen) == pytest.approx(40)
    model(ids)
    assert len(seen) == 9
