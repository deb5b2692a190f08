"""lkv ask: documents in, answers out; what is saved is loaded again, and questions may be typed."""

import io
import re
import sys

import pytest
import torch
from transformers import GenerationConfig, LlamaModel

from lkv.cli.main import main
from lkv.context.chat import Chat
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.hf.loading import load_model
from lkv.hf.progress import report_progress
from tests.conftest import save_model, tiny_llama

TEXT = "The lamp of the lighthouse was lit at dusk. " * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model and a text."""
    path = tmp_path_factory.mktemp("ask")
    save_model(path / "model", max_position_embeddings=2048)
    (path / "text.md").write_text(TEXT)
    return path


@pytest.fixture
def asked(folder, capsys):
    """What `lkv ask` prints and says, and its exit status."""

    def ask(*words: object, method: str = "knorm"):
        given = ["--method", method] if method else []
        status = main(["ask", *map(str, words), "--model", str(folder / "model"), "--max-new-tokens", "4", *given])
        said = capsys.readouterr()
        return status, said.out, said.err

    return ask


def read(folder, **amount):
    """The model, and the text as the library itself reads it, in a tenth of the memory by default."""
    model, tokenizer = load_model(str(folder / "model"))
    return model, compress(model, tokenizer, TEXT, method="knorm", **(amount or {"memory": 0.1}))


def answer(folder, question: str, **amount) -> str:
    return read(folder, **amount)[1].ask(question, 4)


def test_protected_words_are_kept(folder, asked, tmp_path):
    words = ["--protect", "lighthouse", "--protect", "dusk"]
    status, out, _ = asked(folder / "text.md", "When?", *words, "--retention", "0.5", "--save", tmp_path / "text.kv")
    model, tokenizer = load_model(str(folder / "model"))
    own = compress(model, tokenizer, TEXT, method="knorm", retention=0.5, protect=["lighthouse", "dusk"])
    assert status == 0 and own.ask("When?", 4) in out
    assert Context.load(tmp_path / "text.kv", model, tokenizer).metadata == own.metadata
    assert asked(folder / "text.md", "When?", "--protect", "moon")[0] == 2
    assert asked("--load", tmp_path / "text.kv", "When?", *words, method=None)[0] == 2


def test_answers_of_the_full_cache_stand_beside(folder, asked):
    status, out, said = asked(folder / "text.md", "When?", "--retention", "0.15", "Where?", "--compare")
    model, tokenizer = load_model(str(folder / "model"))
    full = compress(model, tokenizer, TEXT, method="full")
    expected = [(answer(folder, question, retention=0.15), full.ask(question, 4)) for question in ("When?", "Where?")]
    assert status == 0 and expected[0][0] != expected[0][1]
    for question, (compressed, whole) in zip(("When?", "Where?"), expected, strict=True):
        assert f"> {question}\n{compressed}\nwith the full cache: {whole}\n" in out
    for words, method in (
        ([folder / "text.md", "--compare"], "knorm"),
        ([folder / "text.md", "When?", "--compare"], "full"),
    ):
        status, out, said = asked(*words, method=method)
        assert status == 2 and not out and "leave --compare out" in said


def test_the_full_cache_is_read_in_chunks_too(folder, asked, monkeypatch):
    lengths = []
    forward = LlamaModel.forward

    def noted_forward(self, input_ids=None, **options):
        lengths.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **options)

    monkeypatch.setattr(LlamaModel, "forward", noted_forward)
    assert asked(folder / "text.md", "When?", "--compare", "--chunk", "100")[0] == 0
    assert lengths.count(100) == 2 * (len(TEXT) // 100) and max(lengths) == 100


def test_several_questions_are_answered_from_one_reading(folder, asked):
    status, out, said = asked(folder / "text.md", "When?", "--retention", "0.15", "Where?", "--chunk", "10000", "Who?")
    assert status == 0 and len(re.findall(r"read \d+ tokens in", said)) == 1
    assert re.findall(r"^> (.*)$", out, re.MULTILINE) == ["When?", "Where?", "Who?"]
    assert all(answer(folder, question, retention=0.15) in out for question in ("When?", "Where?", "Who?"))
    with pytest.raises(SystemExit):
        asked(folder / "text.md", "When?", "--nothing", "x")


def test_bytes_are_told_beside_those_of_the_full_cache(folder, asked):
    _, _, said = asked(folder / "text.md", "When?", "--retention", "0.5")
    pattern = r"KV cache ([\d.]+) MB \(([\d.]+) MB in float32 without compression\)"
    size, full = map(float, re.search(pattern, said).groups())
    # 3 layers x 2 heads x 2 x 8 float32 values a token.
    assert full == pytest.approx(len(TEXT) * 3 * 2 * 2 * 8 * 4 / 1e6, abs=0.06)
    assert 0.5 * full - 0.06 <= size < 0.6 * full
    assert "; kept 50.0% of the KV entries (requested: 0.5); KV cache" in said


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
        assert f" without compression; memory budget: {allowed} of {full / 1e6:.1f} MB in 16 bits)]" in said
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


@pytest.fixture
def typed(monkeypatch):
    """Lines that are typed into a terminal, then its end."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    lines: list[str] = []

    def input_(prompt: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", input_)
    monkeypatch.setattr(sys, "stdin", Terminal())
    return lines


def test_a_chat_takes_turns_back_and_lists_its_commands(folder, asked, typed):
    typed += ["/undo", "When?", "Where?", " /undo ", "/help", "Who?"]
    status, out, said = asked(folder / "text.md")
    chat = Chat(read(folder)[1])
    answers = [chat.ask("When?", 4), chat.ask("Where?", 4)]
    chat.undo()
    assert status == 0 and out.rstrip("\n") == "\n".join([*answers, chat.ask("Who?", 4)])
    assert "there is no turn to take back" in said and "taken back: Where?" in said
    assert "/undo: take the last question and its answer back" in said


def test_a_text_that_is_too_long_is_refused_before_its_time_is_estimated(folder, asked, tmp_path):
    (tmp_path / "long.md").write_text("when " * 3000)
    status, _, said = asked(tmp_path / "long.md", "When?")
    assert status == 2 and "but the model reads at most" in said and "[reading" not in said


def test_a_question_that_does_not_fit_does_not_end_the_chat(folder, asked, typed):
    typed += ["When?", "when " * 2000, "Where?"]
    status, out, said = asked(folder / "text.md")
    chat = Chat(read(folder)[1])
    assert status == 0 and out.split("\n")[:-1] == "\n".join(chat.ask(q, 4) for q in ("When?", "Where?")).split("\n")
    assert said.count("lkv: text, question and 4 new tokens would reach") == 1
    assert said.count("[cut off after 4 tokens; --max-new-tokens allows more]") == 2


@pytest.mark.parametrize("amount", [(), ("--retention", "0.5"), ("--bits", "4")], ids=str)
def test_what_is_saved_answers_as_what_was_read_in_as_many_bytes(folder, asked, tmp_path, amount):
    saved, size = tmp_path / "text.kv", r"KV cache [\d.]+ MB \([\d.]+ MB in float32 without compression"
    _, out, said = asked(folder / "text.md", "When?", *amount, "--save", saved)
    assert f"saved to {saved}" in said and saved.is_file()
    (taken,) = re.findall(size, said)
    status, again, said = asked("--load", saved, "When?", method="")
    assert status == 0 and again == out and f"[loaded {len(TEXT)} tokens; {taken})]" in said


def test_the_text_itself_is_not_overwritten(folder, asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text(TEXT)
    status, _, said = asked("notes.txt", "When?", "--save", tmp_path / "notes.txt")
    assert status == 2 and "--save would overwrite notes.txt, the text itself; give another file" in said
    assert (tmp_path / "notes.txt").read_text() == TEXT
    weights = folder / "model" / "model.safetensors"
    before = weights.read_bytes()
    status, _, said = asked("notes.txt", "When?", "--save", weights)
    assert status == 2 and "model.safetensors is not a saved context and would be overwritten; give another" in said
    assert weights.read_bytes() == before
    # A context that is loaded may be saved over its own file.
    assert asked("notes.txt", "When?", "--save", "notes.kv")[0] == 0
    assert asked("--load", "notes.kv", "When?", "--save", "notes.kv", method="")[0] == 0


def test_reading_shows_its_progress(folder, asked, monkeypatch):
    """A line with an estimate, and a bar where stderr is a terminal."""
    _, _, said = asked(folder / "text.md", "When?")
    (full,) = re.findall(r"KV cache [\d.]+ MB \(([\d.]+) MB", said)
    line = f"[reading {len(TEXT)} tokens: about 1 s; the full KV cache takes {full} MB]"
    assert said.splitlines().count(line) == 1 and "reading " not in asked("nothing")[2]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, _, said = asked(folder / "text.md", "When?")
    assert line in said and re.search(rf"reading .*% \|.*of {len(TEXT)} tokens", said)


def test_a_text_comes_from_stdin_and_questions_are_typed(folder, asked, monkeypatch, tmp_path):
    class Input(io.StringIO):
        buffer = io.BytesIO(TEXT.encode())

    monkeypatch.setattr(sys, "stdin", Input())
    _, piped, _ = asked("-", "When?")
    monkeypatch.setattr(sys, "stdin", io.StringIO("When?\n\nWhere?\n"))
    status, out, _ = asked(folder / "text.md")
    assert status == 0 and piped.strip() == answer(folder, "When?")
    chat = Chat(read(folder)[1])
    turns = [chat.ask(question, 4) for question in ("When?", "Where?")]
    assert out.split() == " ".join(turns).split()
    monkeypatch.setattr(sys, "stdin", io.StringIO("When?\n"))
    status, out, said = asked(folder / "text.md", method="full")
    assert status == 0 and out.strip() and "no chat history" in said


def test_a_typed_question_that_is_no_utf_8_is_one_sentence(folder, asked, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"When?\nWh\xff?\n"), encoding="utf-8"))
    status, _, said = asked(folder / "text.md")
    assert status == 2 and "lkv: the question on stdin cannot be read as text ('utf-8' codec" in said


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
        (("text", "book.txt", "why?"), "knorm", "book.txt is a file, and not a question; join the files"),
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
    (tmp_path / "text").mkdir()
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
