"""A token that was added to the tokenizer and has no embedding in the model: refused wherever a text enters."""

import json
from contextlib import nullcontext

import pytest
from transformers import AutoTokenizer

from lkv.context.chat import Chat
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.context.inspection import inspect_text
from lkv.errors import PromptError
from lkv.training.config import TrainingConfig
from lkv.training.datasets import draw_sample, open_texts
from tests.commands import main
from tests.serving.server import serving, tiny

EXTRA = "<extra>"
SIZE = 259  # tokens of the model
TEXT = "The harbour of Lisse holds 41 boats. "
SAYS = rf"the text contains the token '{EXTRA}', number {SIZE} of the tokenizer, but the model has embeddings of {SIZE}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def parts(folder):
    """(model, tokenizer), saved in `folder` too."""
    model, tokenizer = tiny(folder)
    assert tokenizer.add_tokens(EXTRA) == 1 and tokenizer.convert_tokens_to_ids(EXTRA) == SIZE
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.mark.parametrize("options", [{}, {"chunk": 16}, {"streaming": True, "chunk": 16}, {"method": "full"}])
def test_texts(parts, options):
    options = {"method": "knorm"} | options
    with pytest.raises(PromptError, match=SAYS):
        compress(*parts, TEXT + EXTRA + TEXT, **options)
    assert compress(*parts, TEXT, **options).ask("How many?", 3) == compress(
        parts[0], AutoTokenizer.from_pretrained(parts[1].name_or_path), TEXT, **options
    ).ask("How many?", 3)


@pytest.mark.parametrize("method", ["knorm", "full"])
def test_questions(parts, method):
    context = compress(*parts, TEXT, method=method)
    expected, question = context.ask("How many?", 3), f"What is {EXTRA}?"
    asked = [
        lambda: context.ask(question),
        lambda: list(context.stream(question)),
        lambda: context.batch_ask(["How many?", question]),
        lambda: context.predict(question, "a boat"),
        lambda: context.predict("How many?", EXTRA),
    ]
    if method != "full":
        chat = Chat(context)
        chat.ask("How many?", 3)
        asked += [lambda: chat.ask(question), lambda: list(chat.stream(question))]
    for ask in asked:
        with pytest.raises(PromptError, match=SAYS):
            ask()
    assert context.ask("How many?", 3) == expected
    assert method == "full" or len(chat.turns) == 1


def test_inspections_and_training(parts):
    with pytest.raises(PromptError, match=SAYS):
        inspect_text(*parts, TEXT + EXTRA, "knorm", [0.5], by_memory=False)
    texts, config = open_texts([(TEXT + EXTRA) * 200]), TrainingConfig()
    own = [number for number in range(40) if EXTRA in texts.sample(number, config.continuations).context]
    assert own and len(own) < 40
    for number in range(40):
        with pytest.raises(PromptError, match=SAYS) if number in own else nullcontext():
            draw_sample(texts, number, *parts, config, 10_000)


def test_commands(folder, parts, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT + EXTRA)
    row = {"input": f"What is {EXTRA}?", "context": TEXT, "answers": ["a boat"], "all_classes": None}
    (tmp_path / "qasper.jsonl").write_text(json.dumps(row) + "\n")
    commands = [
        ("ask", tmp_path / "text.txt", "How many?", "--method", "knorm"),
        ("ask", tmp_path / "text.txt", "How many?", "--method", "duo", "--pattern", tmp_path / "text.txt"),
        ("eval", "longbench", "--tasks", "qasper", "--data", tmp_path, "--methods", "knorm", "--out", tmp_path / "out"),
    ]
    for words in commands:
        assert main([*map(str, words), "--model", str(folder)]) == 2
        assert EXTRA in capsys.readouterr().err.splitlines()[-1]


def test_a_server_answers_with_400(parts, tmp_path):
    with serving(*parts, tmp_path) as server:
        chat = {"messages": [{"role": "user", "content": f"What is {EXTRA}?"}], "max_tokens": 2}
        for path, body in (("/v1/chat/completions", chat), ("/v1/contexts", {"text": TEXT + EXTRA})):
            status, message = server.problem(path, body, **{"Content-Type": "application/json"})
            assert status == 400 and f"the token '{EXTRA}'" in message
        status, answer = server.ask("/v1/chat/completions", chat | {"messages": [{"role": "user", "content": "Hi"}]})
        assert status == 200 and answer["usage"]["completion_tokens"] == 2


def test_with_an_embedding_it_is_a_token_like_others(folder, parts):
    model, tokenizer = tiny(folder)
    assert len(tokenizer) == SIZE
    tokenizer = parts[1]
    model.resize_token_embeddings(len(tokenizer))
    context = compress(model, tokenizer, TEXT + EXTRA, method="knorm")
    assert SIZE in context.ids and isinstance(context, Context) and context.ask(f"What is {EXTRA}?", 3)
