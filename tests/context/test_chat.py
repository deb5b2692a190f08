"""Questions side by side, in turns, and as they come: all held to `ask` and to the model without any cache."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.chat import Chat
from lkv.context.compression import compress
from lkv.errors import CacheError, PromptError
from lkv.utils.prompts import (
    chat_template_parts,
    encode_context,
    encode_next_question,
    encode_question,
    next_turn_parts,
    render_messages,
)  # fmt: skip
from tests.conftest import save_model, tiny_llama
from tests.context.test_compression import TEXT, Words
from tests.families import build

QUESTIONS = ["what is one ?", "and what now then please ?", "why ?", "where did all of them go to ?", "why ?"]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class StopError(Exception):
    """What a callback raises to end a reading or an answer."""


def stop(*_, **__):
    raise StopError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny model with a byte tokenizer and a chat template."""
    folder = save_model(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    return AutoModelForCausalLM.from_pretrained(folder).double().eval(), tokenizer


@pytest.mark.parametrize(("dtype", "attention"), [(torch.float32, "sdpa"), (torch.float64, "eager")])
def test_batch_ask_answers_as_ask_does(policy, dtype, attention):
    model = tiny_llama(dtype=dtype)
    model.set_attn_implementation(attention)
    context = compress(model, Words(), TEXT, retention=0.3, policy=policy)
    expected = [context.ask(question, 12) for question in QUESTIONS]
    held = context.nbytes()
    assert context.batch_ask(QUESTIONS, 12) == expected
    assert len(set(expected)) > 2
    assert context.batch_ask(QUESTIONS[1:2], 12) == expected[1:2]
    assert context.ask(QUESTIONS[0], 12) == expected[0]
    assert context.nbytes() == held and context.cache.get_seq_length() == context.tokens
    # Rows that end early are cut.
    ends = [int(expected[row].split()[place]) for row, place in ((0, 2), (1, 5))]
    short = [context.ask(question, 12, eos_token_id=ends) for question in QUESTIONS]
    assert context.batch_ask(QUESTIONS, 12, eos_token_id=ends) == short
    assert len({len(answer.split()) for answer in short}) > 1


@pytest.mark.parametrize(
    ("method", "options"),
    [("full", {}), ("knorm", {"retention": 0.5, "decode_eviction": True}), ("knorm", {"retention": 0.5, "bits": 8}),
     ("knorm", {"memory": 0.25})],
)  # fmt: skip
def test_batch_ask_with_every_cache(method, options):
    context = compress(tiny_llama(dtype=torch.float32), Words(), TEXT, method=method, **options)
    assert context.batch_ask(QUESTIONS[:3], 8) == [context.ask(question, 8) for question in QUESTIONS[:3]]


@pytest.mark.parametrize(
    ("questions", "says"),
    [([], "at least one"), ("why ?", "takes a list"), (5, "takes a list"), (None, "takes a list"),
     (["why ?", " "], "question is empty"), (["w " * 600], "at most")],
)  # fmt: skip
def test_bad_lists_of_questions(model, policy, questions, says):
    context = compress(model, Words(), TEXT, policy=policy)
    with pytest.raises(PromptError, match=says):
        context.batch_ask(questions)


def test_a_stream_is_the_answer_in_pieces(model, policy):
    context = compress(model, Words(), TEXT, policy=policy)
    pieces = list(context.stream(QUESTIONS[1], 9))
    assert len(pieces) > 3 and "".join(pieces) == context.ask(QUESTIONS[1], 9)


def test_a_closed_stream_stops_generating(model, policy):
    context = compress(model, Words(), TEXT, policy=policy)
    threads = threading.active_count()
    stream = context.stream(QUESTIONS[1], 400)
    next(stream)
    stream.close()
    assert threading.active_count() == threads and context.answer_tokens < 400
    assert context.cache.get_seq_length() == context.tokens


def test_what_goes_wrong_in_a_stream_is_raised_where_it_is_read(model, policy):
    context = compress(model, Words(), TEXT, policy=policy)
    with pytest.raises(PromptError, match="question is empty"):
        context.stream(" ")
    for about in (context, Chat(context)):
        with pytest.raises(CacheError, match=r"stream\(\) sets stopping_criteria, streamer itself"):
            about.stream("why ?", streamer=1, stopping_criteria=[])
        with pytest.raises(CacheError, match=r"ask\(stream=True\) sets streamer itself"):
            about.ask("why ?", stream=True, streamer=1)
    broken = context.stream("why ?", 5, bad_words_ids="x")
    with pytest.raises(ValueError, match="bad_words_ids"):
        list(broken)


def test_turns_equal_one_prompt_of_all_of_them(saved):
    """With everything kept, a chat is the model reading the whole conversation; greedy ids compared."""
    model, tokenizer = saved
    context = compress(model, tokenizer, TEXT[:120], method="knorm", retention=1.0, system="Be brief.")
    chat = Chat(context)
    ids = encode_context(tokenizer, TEXT[:120], "Be brief.")
    for number, question in enumerate(["what?", "and then, at last?", "so?"]):
        ids = ids + (encode_next_question if number else encode_question)(tokenizer, question)
        out = model.generate(torch.tensor([ids]), max_new_tokens=7, do_sample=False)[0, len(ids) :].tolist()
        assert chat.ask(question, 7) == tokenizer.decode(out, skip_special_tokens=True).strip()
        ids += out[:-1] if out[-1] == 2 else out
    assert [turn.question for turn in chat.turns] == ["what?", "and then, at last?", "so?"]
    assert chat.cache.get_seq_length() >= len(ids) - 1 and context.cache.get_seq_length() == context.tokens


def test_turns_can_be_taken_back(saved):
    model, tokenizer = saved
    chat = Chat(compress(model, tokenizer, TEXT[:200], method="knorm", retention=0.4))
    first, second = chat.ask("one?", 6), chat.ask("two?", 6)
    assert chat.ask("three?", 6) and len(chat.turns) == 3
    chat.undo(2)
    assert [turn.answer for turn in chat.turns] == [first]
    assert "".join(chat.stream("two?", 6)) == second
    chat.undo(2)
    assert chat.ask("one?", 6) == first and chat.ask("two?", 6) == second
    with pytest.raises(CacheError, match=r"there are 2; give 0 to that"):
        chat.undo(3)


def test_a_chat_prints_an_answer_as_a_context_does(saved, capsys):
    model, tokenizer = saved
    context = compress(model, tokenizer, TEXT[:200], method="knorm", retention=0.4)
    chat = Chat(context)
    expected = context.ask("one?", 6, stream=True)
    printed = capsys.readouterr().out
    assert chat.ask("one?", 6, stream=True) == expected and capsys.readouterr().out == printed
    assert printed.strip() == expected and [turn.answer for turn in chat.turns] == [expected]


def test_a_turn_that_fails_leaves_the_chat_as_it_was(saved):
    model, tokenizer = saved
    chat = Chat(compress(model, tokenizer, TEXT[:200], method="knorm", retention=0.4))
    first = chat.ask("one?", 6)
    second = chat.ask("two?", 6)
    chat.undo()

    with pytest.raises(StopError):
        chat.ask("another?", 6, stopping_criteria=[stop])
    assert len(chat.turns) == 1 and chat.turns[0].answer == first
    assert chat.ask("two?", 6) == second


def test_threads_take_turns_in_a_chat(saved):
    """Whatever the order, each answer is the one after all turns before it."""
    model, tokenizer = saved
    context = compress(model, tokenizer, TEXT[:200], method="knorm", retention=0.4)
    chat, replayed = Chat(context), Chat(context)
    half_read = chat.stream("zero?", 6)
    pieces = [next(half_read)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda question: chat.ask(question, 6), map(str, range(8))))
    pieces += half_read
    assert chat.turns[0].question == "zero?" and len(chat.turns) == 9
    assert "".join(pieces) == chat.turns[0].answer
    assert {turn.question: turn.answer for turn in chat.turns[1:]} == dict(
        zip(map(str, range(8)), answers, strict=True)
    )
    assert [replayed.ask(turn.question, 6) for turn in chat.turns] == [turn.answer for turn in chat.turns]
    chat.undo(9)
    assert chat.ask("zero?", 6) == replayed.turns[0].answer


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_a_copy_of_a_chat_is_a_branch(saved, family):
    """Both answer as chats that had their turns alone."""
    model, tokenizer = build(family, vocab_size=300), saved[1]
    context = compress(model, tokenizer, TEXT[:200], method="knorm", retention=0.4)
    chat, chains = Chat(context), (["one?", "two?"], ["one?", "three?", "four?"])
    expected = []
    for questions in chains:
        fresh = Chat(context)
        expected.append([fresh.ask(question, 6) for question in questions])
    chat.ask("one?", 6)
    branch = copy.deepcopy(chat)
    assert (
        branch._model is model and branch.ask("three?", 6) == expected[1][1] and chat.ask("two?", 6) == expected[0][1]
    )
    assert branch.ask("four?", 6) == expected[1][2]
    assert [[turn.answer for turn in each.turns] for each in (chat, branch)] == expected
    branch.undo(3)
    assert branch.ask("one?", 6) == expected[1][0] and len(chat.turns) == 2


@pytest.mark.parametrize("method", ["knorm", "snapkv"])
def test_a_chat_that_evicts_from_turns_stays_within_its_memory(saved, method):
    """A budget in bytes bounds text, questions and answers, and a turn is the cache's own answer to all ids so far."""
    model, tokenizer = saved
    options = {"method": method, "memory": "12KB", "decode_eviction": True}
    context = compress(model, tokenizer, TEXT[:120], **options)
    chat, cache = Chat(context), RaggedCache(model, **options)
    model(torch.tensor([context.ids]), past_key_values=cache, use_cache=True)
    ids = context.ids
    for number in range(6):
        encode = encode_next_question if number else encode_question
        ids = ids + encode(tokenizer, f"what {number}?")
        row = torch.tensor([ids])
        answer = model.generate(row, past_key_values=cache, max_new_tokens=9, do_sample=False)[0, len(ids) :].tolist()
        assert chat.ask(f"what {number}?", 9) == tokenizer.decode(answer, skip_special_tokens=True).strip()
        ids += answer[:-1] if answer[-1] == 2 else answer
        observed = sum(x.numel() * 8 for layer in chat.cache.ragged_layers if (x := layer._last_queries) is not None)
        assert observed == (method == "snapkv") * 3 * 64 * 4 * 8 * 8
        assert 9_000 < chat.nbytes() - observed <= 12_000
    assert chat.cache.full_nbytes() > 20 * 12_000
    branch = copy.deepcopy(chat)
    with pytest.raises(CacheError, match="so no turn can be removed; go back to a copy"):
        chat.undo()
    with pytest.raises(ValueError, match="bad_words_ids"):
        chat.ask("what 6?", 9, bad_words_ids="x")
    with pytest.raises(StopError):  # after the question was read
        chat.ask("what 6?", 9, stopping_criteria=[stop])
    with pytest.raises(CacheError, match="an earlier answer failed midway"):
        chat.ask("what 7?", 9)
    assert len(chat.turns) == 6 and branch.ask("what 6?", 9) and len(branch.turns) == 7
    assert context.ask("what 0?", 9) == chat.turns[0].answer


def test_a_chat_is_not_asked_by_its_own_streamer(saved):
    model, tokenizer = saved
    chat = Chat(compress(model, tokenizer, TEXT[:200], method="knorm", retention=0.4))

    def ask_again(*_, **__):
        for call in (lambda: chat.ask("so?"), lambda: chat.undo(0)):
            with pytest.raises(CacheError, match="is already generating an answer"):
                call()
        return torch.tensor([False])

    assert chat.ask("one?", 6, stopping_criteria=[ask_again]) and len(chat.turns) == 1


def test_a_system_prompt_stands_before_the_text(saved):
    model, tokenizer = saved
    context = compress(model, tokenizer, "some text", method="knorm", retention=1.0, system="Be brief.")
    assert context.ids == tokenizer("[system]Be brief.</s>[user]some text", add_special_tokens=False)["input_ids"]
    tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    with pytest.raises(PromptError, match="leaves a system prompt out"):
        chat_template_parts(tokenizer, "Be brief.")
    tokenizer.chat_template = "{{ raise_exception('no system here') if messages[0].role == 'system' }}"
    with pytest.raises(PromptError, match="refuses turns of system, user"):
        chat_template_parts(tokenizer, "Be brief.")
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(PromptError, match="system prompt is empty"):
        compress(model, tokenizer, "some text", method="knorm", system=" ")


@pytest.mark.parametrize(
    "template",
    [
        "{% set m = messages[-1] %}[{{ m.role }}]{{ m.content }}</s>",  # the last turn alone
        "{% for m in messages if m.role == 'user' %}[user]{{ m.content }}</s>{% endfor %}",  # no answers
    ],
)
def test_a_template_without_earlier_turns_cannot_go_on(saved, monkeypatch, template):
    tokenizer = saved[1]
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(PromptError, match="does not carry an earlier answer and the next question"):
        next_turn_parts(tokenizer)


def test_without_a_template_a_system_message_begins_the_turn_after_the_context():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    assert render_messages(Words(), messages, after="text") == "\n\nQuestion: Be brief.\n\nWho?\nAnswer:"
    assert render_messages(Words(), messages, after=None) == "Be brief.\n\nQuestion: Who?\nAnswer:"


def test_a_context_and_a_chat_tell_what_they_are(model, policy):
    context = compress(model, Words(), TEXT, retention=0.3, policy=policy)
    assert repr(context).startswith("<Context of 60 tokens, lkv: ") and "of the entries kept" in repr(context)
    chat = Chat(context)
    chat.ask("why ?", 3)
    assert repr(chat) == f"<Chat of 1 turns, {60 + 4 + 3:,} tokens, about {chat._context!r}>"
    with pytest.raises(CacheError, match="a chat is about a Context, not a Chat; make one with"):
        Chat(chat)
    with pytest.raises(CacheError, match="not compressed"):
        Chat(compress(model, Words(), TEXT, method="full"))


@pytest.mark.parametrize("chunk", [None, 20])
def test_progress_rises_layer_by_layer(model, chunk):
    shares = []
    context = compress(model, Words(), TEXT, method="knorm", retention=0.4, chunk=chunk, progress=shares.append)
    parts = 3 if chunk else 1
    assert shares == pytest.approx([(part + layer / 3) / parts for part in range(parts) for layer in range(3)])
    assert context.ask("why ?", 3) and len(shares) == 3 * parts


@pytest.mark.parametrize("method", ["knorm", "kvzip", "global+knorm", "full"])
def test_progress_rises_with_every_method_and_can_end_the_reading(model, method):
    retention, shares = None if method == "full" else 0.4, []
    compress(model, Words(), TEXT, method=method, retention=retention, progress=shares.append)
    assert len(shares) >= 3 and shares == sorted(shares) and shares[0] < 0.5 and 0.6 < shares[-1] <= 1
    with pytest.raises(StopError):
        compress(model, Words(), TEXT, method=method, retention=retention, progress=stop)
    assert not any(layer._forward_hooks for layer in model.model.layers)
