"""lkv ask with several files, folders, standard input and several questions, with the full cache beside, and typed."""

import io
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaModel, TextIteratorStreamer

from lkv.context.chat import Chat
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.context.document_reader import read_documents
from lkv.hf.loading import load_model
from tests.cli.asking import TEXT, answer, read


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


def test_a_chat_takes_turns_back_and_lists_its_commands(folder, asked, typed):
    typed += ["/undo", "When?", "Where?", " /undo ", "/help", "Who?"]
    status, out, said = asked(folder / "text.md")
    chat = Chat(read(folder)[1])
    answers = [chat.ask("When?", 4), chat.ask("Where?", 4)]
    chat.undo()
    assert status == 0 and out.rstrip("\n") == "\n".join([*answers, chat.ask("Who?", 4)])
    assert "there is no turn to take back" in said and "taken back: Where?" in said
    assert "/undo: take the last question and its answer back" in said


def test_a_question_that_does_not_fit_does_not_end_the_chat(folder, asked, typed):
    typed += ["When?", "when " * 2000, "Where?"]
    status, out, said = asked(folder / "text.md")
    chat = Chat(read(folder)[1])
    assert status == 0 and out.split("\n")[:-1] == "\n".join(chat.ask(q, 4) for q in ("When?", "Where?")).split("\n")
    assert said.count("lkv: text, question and 4 new tokens would reach") == 1
    assert said.count("[cut off after 4 tokens; --max-new-tokens allows more]") == 2


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


def test_a_text_comes_from_stdin_and_questions_are_typed(folder, asked, monkeypatch, tmp_path):
    class Input(io.StringIO):
        buffer = io.BytesIO(TEXT.encode())

    monkeypatch.setattr(sys, "stdin", Input())
    _, piped, _ = asked("-", "When?")
    Input.buffer.seek(0)
    _, both, _ = asked(folder / "text.md", "-", "When?")
    text = f"# {folder / 'text.md'}\n\n{TEXT.strip()}\n\n# -\n\n{TEXT.strip()}"
    own = compress(*load_model(str(folder / "model")), text, method="knorm")
    assert both.strip() == own.ask("When?", 4)
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


@pytest.fixture
def documents(tmp_path, monkeypatch):
    """A folder of documents, in the working directory, and the text that it is read as."""
    monkeypatch.chdir(tmp_path)
    for name in ("docs/below", "docs/.git", "docs/zero"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "docs" / "z.txt").write_text("The last file.\n\n")
    (tmp_path / "docs" / "below" / "b.html").write_text("<html><body><p>A page</p></body></html>")
    (tmp_path / "docs" / "a.md").write_text(TEXT)
    for name in (".git/config", ".hidden"):
        (tmp_path / "docs" / name).write_text("hidden")
    (tmp_path / "docs" / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")
    (tmp_path / "docs" / "empty.txt").write_text(" ")
    (tmp_path / "docs" / "linked.txt").symlink_to(tmp_path / "docs" / "nowhere")
    (tmp_path / "docs" / "shared").symlink_to(tmp_path / "docs" / "below")
    os.mkfifo(tmp_path / "docs" / "pipe")
    return f"# docs/a.md\n\n{TEXT.strip()}\n\n# docs/below/b.html\n\nA page\n\n# docs/z.txt\n\nThe last file."


@pytest.mark.parametrize("words", [["docs"], ["docs/a.md", "docs/below/b.html", "docs/z.txt"]], ids=str)
def test_folders_and_files_are_one_text_with_names_as_headings(folder, asked, tmp_path, documents, words):
    status, out, said = asked(*words, "When?", "Where?", "--save", "all.kv")
    model, tokenizer = load_model(str(folder / "model"))
    own = compress(model, tokenizer, documents, method="knorm")
    assert status == 0 and Context.load("all.kv", model, tokenizer).metadata == own.metadata
    assert out == "".join(f"\n> {question}\n{own.ask(question, 4)}\n" for question in ("When?", "Where?"))
    unread = ", ".join(f"docs/{name}" for name in "linked.txt pipe shared empty.txt picture.png".split())
    skipped = f"skipped, as they are links to folders or have no text that can be read: {unread}\n"
    assert (skipped in said) == (words == ["docs"])


def test_a_file_whose_name_is_no_unicode_has_a_heading_too(tmp_path):
    (tmp_path / "below").mkdir()
    Path(os.fsdecode(bytes(tmp_path / "below") + b"/caf\xe9.txt")).write_text(TEXT)
    assert read_documents([str(tmp_path)]) == f"# {tmp_path}/below/caf?.txt\n\n{TEXT.strip()}"


def test_a_document_is_not_overwritten_by_the_saved_text(asked, documents):
    status, _, said = asked("docs/z.txt", "docs/a.md", "When?", "--save", "docs/a.md")
    assert status == 2 and "--save would overwrite docs/a.md, the text itself" in said


def test_a_saved_text_is_compared_too(folder, asked, tmp_path, monkeypatch):
    saved = tmp_path / "text.kv"
    status, out, _ = asked(folder / "text.md", "When?", "--retention", "0.15", "--compare", "--save", saved)
    assert status == 0 and "with the full cache: " in out
    status, again, said = asked("--load", saved, "When?", "--compare", method="")
    assert status == 0 and again == out and f"[reading {len(TEXT)} tokens for the full cache: about" in said
    # Images are saved as their tokens alone.
    ids = Context.load(saved, *load_model(str(folder / "model"))).ids
    monkeypatch.setattr(LlamaConfig, "image_token_id", ids[3], raising=False)
    status, _, said = asked("--load", saved, "When?", "--compare", method="")
    assert status == 2 and "the saved text has images, which --compare cannot read again; leave --compare out" in said


def test_ctrl_c_stops_an_answer_and_a_second_one_ends_the_chat(
    folder, asked, typed, tmp_path, monkeypatch, interruptible
):
    pieces: list[str] = []

    class Interrupted(TextIteratorStreamer):
        def __next__(self):
            pieces.append(super().__next__())
            if len(pieces) == 1:
                signal.raise_signal(signal.SIGINT)
            return pieces[-1]

    monkeypatch.setattr("lkv.context.generation.TextIteratorStreamer", Interrupted)
    typed += ["When?", "/undo", "Where?", "^C", "Who?", "^C", "^C", "never asked"]
    status, out, said = asked(folder / "text.md", "--save", tmp_path / "text.kv")
    chat = Chat(read(folder)[1])
    assert status == 130 and typed == ["never asked"] and said.endswith("lkv: interrupted\n")
    assert out.endswith("".join(f"{chat.ask(question, 4)}\n" for question in ("Where?", "Who?")))
    assert said.count("[stopped; Ctrl-C again, or Ctrl-D, ends the chat]") == 1 and "taken back: When?" in said
    assert said.count("\nCtrl-C again, or Ctrl-D, ends the chat.\n") == 2
    assert Context.load(tmp_path / "text.kv", *load_model(str(folder / "model"))).ids == read(folder)[1].ids


def test_ctrl_c_ends_what_is_not_typed(folder, asked, monkeypatch, interruptible):
    class Interrupted(TextIteratorStreamer):
        def __next__(self):
            raise KeyboardInterrupt

    monkeypatch.setattr("lkv.context.generation.TextIteratorStreamer", Interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("When?\nWhere?\n"))
    status, out, said = asked(folder / "text.md")
    assert (status, out) == (130, "") and said.endswith("lkv: interrupted\n")
