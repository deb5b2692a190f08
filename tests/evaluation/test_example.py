"""Prompts of examples under both protocols: their text, truncation, and chat templates of each model family."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lkv.errors import EvaluationError, PromptError
from lkv.evaluation.example import PROTOCOLS, Example, make_prompt
from lkv.evaluation.longbench import load_examples
from lkv.training.data.samples import Continuation, Sample, tokenize_sample
from lkv.utils.prompts import chat_template_parts, encode_context, encode_question
from tests.evaluation.test_longbench import OFFICIAL

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)


def byte_tokenizer(template: str | None, bos: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte, so that places in a text of ASCII are places in its ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<s>", *letters])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")
    tokenizer.chat_template = template
    return tokenizer


CHAT, PLAIN = byte_tokenizer(TEMPLATE), byte_tokenizer(None)


def example(context="Some words.", answers=("Neva",), question="Which river?\n", prefix="Answer:", new=10, **more):
    parts = ("longbench", "qasper", 7, context, question, prefix, tuple(answers), new)
    return Example(*parts, **{"metric": "qa_f1", **more})


def texts(prompt, tokenizer) -> tuple[str, str]:
    return tokenizer.decode(prompt.context), tokenizer.decode(prompt.question)


@pytest.mark.parametrize(
    ("protocol", "tokenizer", "chat", "question"),
    [
        ("kvpress", CHAT, True, "Which river?\n</>\n<assistant><think></think>Answer:"),
        ("kvpress", CHAT, False, "Which river?\n</>\n<assistant><think></think>Answer:"),
        ("kvpress", PLAIN, True, "Which river?\n\nAnswer:"),
        ("longbench", CHAT, True, "Which river?\nAnswer:</>\n<assistant><think></think>"),
        ("longbench", CHAT, False, "Which river?\nAnswer:"),
        ("longbench", PLAIN, True, "Which river?\nAnswer:"),
    ],
)
def test_order_of_template_question_and_answer_prefix(protocol, tokenizer, chat, question):
    prompt = make_prompt(example(chat=chat), tokenizer, protocol, 500)
    templated = tokenizer is CHAT and (chat or protocol == "kvpress")
    assert texts(prompt, tokenizer) == (("<user>" if templated else "") + "Some words.", question)
    assert not prompt.truncated and not prompt.answer_lost


@pytest.mark.slow
@given(st.sampled_from(sorted(OFFICIAL)), st.text(max_size=30), st.text(max_size=30))
def test_longbench_protocol_gives_the_official_prompt(tmp_path_factory, task, context, question):
    """Character for character, with the chat template only around the tasks that have it in the official script."""
    context, question = context + "x", question + "\nType:"
    folder = tmp_path_factory.mktemp("longbench")
    row = {"input": question, "context": context, "answers": ["x"], "all_classes": ["x"]}
    (folder / f"{task}.jsonl").write_text(json.dumps(row), encoding="utf-8")
    (item,) = load_examples(task, folder)
    before, after = OFFICIAL[task].split("{context}")
    text = before + context + after.replace("{input}", question)
    whole = "".join(texts(make_prompt(item, CHAT, "longbench", 10_000), CHAT))
    chat = task in ("hotpotqa", "gov_report")
    assert whole == (f"<user>{text}</>\n<assistant><think></think>" if chat else text)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_first_token_occurs_once(protocol):
    """Where no template is used, what the tokenizer puts before a text is there once, and counts when cutting."""
    base, chat = byte_tokenizer(None, bos=True), byte_tokenizer("<s>" + TEMPLATE, bos=True)
    assert make_prompt(example(), base, protocol, 500).context == base("Some words.")["input_ids"]
    assert make_prompt(example(), chat, protocol, 500).context == chat("<user>Some words.")["input_ids"]
    bare = make_prompt(example(chat=False), chat, "longbench", 500)
    assert bare.context == chat("Some words.")["input_ids"]
    cut = make_prompt(example("0123456789" * 9), base, protocol, 50)
    assert cut.context[0] == 0 and len(cut.context) + len(cut.question) + 10 == 50


@given(st.sampled_from(PROTOCOLS), st.integers(1, 200), st.integers(0, 30), st.integers(1, 40),
       st.integers(-3, 20) | st.integers(20, 220), st.booleans())  # fmt: skip
def test_truncation_removes_the_middle_of_the_context(protocol, length, asked, new, room, chat):
    item = example("".join(chr(65 + i % 26) for i in range(length)), question="?" * asked, new=new)
    tokenizer = CHAT if chat else PLAIN
    whole = make_prompt(item, tokenizer, protocol, 10_000)
    positions = new + len(whole.question) + room
    # The template's "<user>" must be whole.
    if room < min(len(whole.context), 12 if chat else 2):
        with pytest.raises(PromptError, match="qasper 7: its question"):
            make_prompt(item, tokenizer, protocol, positions)
        return
    prompt = make_prompt(item, tokenizer, protocol, positions)
    assert prompt.question == whole.question
    assert prompt.truncated == (len(whole.context) > room)
    head = -(-room // 2)
    cut = whole.context[:head] + whole.context[len(whole.context) - (room - head) :]
    assert prompt.context == (cut if prompt.truncated else whole.context)
    assert not prompt.truncated or len(prompt.context) == room


@given(st.integers(0, 150), st.integers(60, 200), st.sampled_from(["Neva", "Lake Ladoga", "3.5%"]))
def test_an_answer_is_lost_if_its_words_are_removed(place, positions, answer):
    context = "." * place + f" {answer.upper()} " + "." * (150 - place)
    item = example(context, ["nowhere", answer])
    prompt = make_prompt(item, PLAIN, "longbench", positions)
    room = positions - 10 - len(prompt.question)
    start, end = place + 1, place + 1 + len(answer)
    head, tail = -(-room // 2), len(context) - room // 2
    kept = not prompt.truncated or end <= head or start >= tail
    assert prompt.answer_lost == (not kept)


FILLER = ". " * 100


@pytest.mark.parametrize(
    ("middle", "changes", "lost"),
    [
        ("the Neva river", {}, True),
        ("the Neva\n river", {"answers": ("Neva River",)}, True),
        ("the river", {}, False),  # it never stood there
        ("Nevada", {}, False),  # nor did it here
        ("the Neva", {"question": "Is the Neva long?"}, False),
        ("the Neva", {"answers": ("Neva", "Volga"), "context": "Volga " + FILLER + "Neva" + FILLER}, False),
        ("yes", {"answers": ("Yes.",)}, False),
        ("Paragraph 12: x", {"answers": ("Paragraph 12",), "metric": "retrieval"}, True),
        ("Paragraph 1: x", {"answers": ("Paragraph 12",), "metric": "retrieval"}, False),
        ("71, 82", {"answers": ("71", "82"), "metric": "string_match_all"}, True),
        ("x = 1", {"answers": ("x = 1",), "metric": "code_sim"}, False),
        ("Food", {"answers": ("Food",), "metric": "classification", "classes": ("Food",)}, False),
    ],
)
def test_which_answers_can_be_lost(middle, changes, lost):
    item = example(**({"context": FILLER + middle + FILLER} | changes))
    prompt = make_prompt(item, PLAIN, "longbench", 120)
    assert prompt.truncated and prompt.answer_lost is lost
    assert not make_prompt(item, PLAIN, "longbench", 1000).answer_lost


def test_an_answer_across_the_cut_does_not_count():
    whole = make_prompt(example("x", ["Neva"]), PLAIN, "longbench", 1000)
    positions = 10 + len(whole.question) + 40
    prompt = make_prompt(example("." * 17 + " Ne the Neva va " + "." * 17, ["Neva"]), PLAIN, "longbench", positions)
    assert " Neva " in PLAIN.decode(prompt.context)
    assert prompt.answer_lost


def test_impossible_prompts_are_refused():
    with pytest.raises(EvaluationError, match="no protocol 'official'; use one of kvpress, longbench"):
        make_prompt(example(), PLAIN, "official", 100)
    with pytest.raises(PromptError, match=r"qasper 7: its question \(57 tokens\) and answer \(10\) leave -7 of 60"):
        make_prompt(example(question="?" * 50), PLAIN, "longbench", 60)
    with pytest.raises(PromptError, match="qasper 7 has nothing to read after its context"):
        make_prompt(example(question="", prefix=""), PLAIN, "longbench", 60)


# Made up after each family's: its markers, what it does with a system turn, whether it strips and whether it thinks.
_TURNS = "{% for m in messages %}"
TEMPLATES = {
    "llama": (
        "<s>[system]Today: 26 Jul 2024[end]" + _TURNS + "[{{ m['role'] }}]\n\n{{ m['content'] | trim }}[end]"
        "{% endfor %}{% if add_generation_prompt %}[assistant]\n\n{% endif %}",
        "[end][assistant]\n\n",
    ),
    "qwen3": (
        _TURNS + "[{{ m['role'] }}\n{{ m['content'] }}]\n{% endfor %}{% if add_generation_prompt %}[assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
        "]\n[assistant\n<think>\n\n</think>\n\n",
    ),
    "gemma": (
        "<s>" + _TURNS + "<turn>{{ m['role'] }}\n{{ m['content'] | trim }}</turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>model\n{% endif %}",
        "</turn>\n<turn>model\n",
    ),
    "none": (None, "\nAnswer:"),
}  # fmt: skip


@pytest.mark.parametrize("family", TEMPLATES)
def test_training_and_evaluation_begin_the_answer_at_one_place(family):
    template, after = TEMPLATES[family]
    tokenizer = byte_tokenizer(template)
    assert chat_template_parts(tokenizer)[2] == after
    context, question = "The tower is old.", "How old?"
    trained = tokenize_sample(Sample("s", context, (Continuation(question, "Very"),)), tokenizer, 500, 500)
    (ids, skip), = trained.continuations  # fmt: skip
    assert tokenizer.decode(ids[:skip]).endswith(after) and tokenizer.decode(ids[skip:]).startswith("Very")
    assert ids[:skip] == encode_question(tokenizer, question)
    assert trained.context == encode_context(tokenizer, context)
    if template is None:
        return  # evaluations write their own question forms where there is no template
    # An evaluated question brings its line breaks with it; the paper's answers begin where the template ends.
    for protocol in ("kvpress", "longbench"):
        example = Example("ruler", "niah", 0, context, "\n\n" + question, "", ("Very",), 5, "string_match_all")
        prompt = make_prompt(example, tokenizer, protocol, 900)
        assert (prompt.context, prompt.question) == (trained.context, ids[:skip])


@pytest.mark.parametrize("template", ["no turn at all", "{{ messages[0]['content'] }}{{ messages[0]['content'] }}"])
def test_templates_that_lose_or_repeat_the_text_are_refused(template):
    with pytest.raises(PromptError, match="does not carry the user's text exactly once"):
        chat_template_parts(byte_tokenizer(template))
