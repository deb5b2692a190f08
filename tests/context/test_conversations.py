"""Conversations as contexts: questions continue them as the chat template has it, and roles can be protected."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lkv.context.chat import Chat
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.context.protection import protected_tokens
from lkv.errors import PromptError
from lkv.hf.loading import load_default
from lkv.hf.prompt_kv import read_prompt
from lkv.utils.prompts import decode_tail, encode_context, encode_continuation, encode_question, render_messages
from tests.conftest import save_model, uneven_policy
from tests.context.test_chat import TEMPLATE
from tests.context.test_protection import kept_positions
from tests.masked import hidden_from_continuation

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGED = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
TURNS = [
    {"role": "system", "content": "Answer in capital letters."},
    {"role": "user", "content": "The lamp was lit at dusk, and nobody came that night.\n"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "t"}}]},
    {"role": "tool", "content": "high water at nine"},
    {"role": "assistant", "content": "The sea was calm."},
]
QUESTION = "When was the lamp lit?"
TOOLS = [{"type": "function", "function": {"name": name, "description": "high water"}} for name in ("tide", "lamp")]
_TOOLS = "{% for t in tools or [] %}<tool>{{ t.function.name }}: {{ t.function.description }}</tool>{% endfor %}"
_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}<call>{% endfor %}<|im_end|>\n"
# Where chat templates put tools: before all turns, in the first or the last turn of the user, behind all turns.
TOOL_TEMPLATES = {
    "first": _TOOLS + "{% for m in messages %}" + _TURN + "{% endfor %}",
    "user": "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
    "{% if m == users[0] %}" + _TOOLS + "{% endif %}" + _TURN + "{% endfor %}",
    "last user": "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
    "{% if m == users[-1] %}" + _TOOLS + "{% endif %}" + _TURN + "{% endfor %}",
    "behind": "{% for m in messages %}" + _TURN + "{% endfor %}" + _TOOLS,
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A tiny model in float64 with a byte tokenizer, and a policy."""
    folder = save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    return model, tokenizer, uneven_policy(model)


def test_tool_calls_without_text_are_read_and_never_dropped(parts):
    model, tokenizer, policy = parts
    turns = [*TURNS[:2], {**TURNS[2], "content": None}, *TURNS[3:]]
    tokenizer.chat_template = CHATML
    assert compress(model, tokenizer, turns, policy=policy).ids == encode_context(tokenizer, TURNS)
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(PromptError, match="leaves messages out of a conversation"):
        compress(model, tokenizer, turns, policy=policy)


@pytest.mark.parametrize("template", [TEMPLATE, CHATML, MERGED, "of SmolLM2"])
def test_conversation_and_question_are_the_template_s_whole(parts, template):
    tokenizer = parts[1]
    if template == "of SmolLM2":
        tokenizer = load_default()[1]
    else:
        tokenizer.chat_template = template
    turns = TURNS if template == CHATML else [turn for turn in TURNS if "tool_calls" not in turn]
    ids = encode_context(tokenizer, turns)
    whole = tokenizer.apply_chat_template(
        [*turns, {"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    question = encode_question(tokenizer, QUESTION, decode_tail(tokenizer, ids), "conversation")
    assert ids + question == tokenizer(whole, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("blanks", [" ", "\n", "\n\n", "\t\n "])
@pytest.mark.parametrize("template", [TEMPLATE, CHATML, MERGED, "of SmolLM2"])
def test_white_space_around_a_question_changes_nothing_whatever_the_template_does_with_it(parts, template, blanks):
    model, tokenizer, policy = parts
    if template == "of SmolLM2":
        tokenizer = load_default()[1]
    else:
        tokenizer.chat_template = template
    turns = [turn for turn in TURNS if turn["role"] in ("user", "assistant") and turn["content"]]
    asked = [{"role": "user", "content": QUESTION}, turns[-1], {"role": "user", "content": "Why?"}]
    blank = [turn | {"content": blanks + turn["content"] + blanks} if turn in asked[::2] else turn for turn in asked]
    for context, kind in ((TURNS[1]["content"], "text"), (turns, "conversation")):
        ids = encode_context(tokenizer, context)
        before = decode_tail(tokenizer, ids)
        question = encode_question(tokenizer, QUESTION, before, kind)
        assert encode_question(tokenizer, blank[0]["content"], before, kind) == question
        for messages, expected in ((blank[:1], question), (blank, None)):
            rendered = encode_continuation(tokenizer, render_messages(tokenizer, messages, kind), before)
            plain = render_messages(tokenizer, asked[: len(messages)], kind)
            assert rendered == (expected or encode_continuation(tokenizer, plain, before))
    whole = tokenizer.apply_chat_template([*turns, asked[0]], add_generation_prompt=True)["input_ids"]
    assert ids + question == whole
    if template != "of SmolLM2":
        context = compress(model, tokenizer, turns, policy=policy)
        chats = [Chat(context.fork()), Chat(context.fork())]
        for chat, asking in zip(chats, (asked, blank), strict=True):
            chat.ask(asking[0]["content"], 4)
            chat.ask(asking[2]["content"], 4)
        assert chats[0]._ids == chats[1]._ids


def test_answers_are_those_of_the_stock_model_that_sees_what_is_kept(parts, tmp_path):
    model, tokenizer, policy = parts
    tokenizer.chat_template = CHATML
    options = {"policy": policy, "retention": 0.4}
    context = compress(model, tokenizer, TURNS, protect=[{"role": "system"}, "high water"], **options)
    prompt = read_prompt(model, torch.tensor([context.ids]))
    kept = kept_positions(context, prompt)
    logits, answer = context.predict(QUESTION, "at dusk")
    hidden = [
        torch.tensor([[place not in own for place in range(context.tokens)] for own in heads])[None] for heads in kept
    ]
    turns = [*TURNS, {"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) + "at dusk"
    whole = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with hidden_from_continuation(model, hidden, context.tokens):
        stock = model(whole, use_cache=False).logits[0, -len(answer) - 1 : -1]
    torch.testing.assert_close(logits, stock, atol=1e-9, rtol=0)

    context.save(tmp_path / "conversation.kv")
    loaded = Context.load(tmp_path / "conversation.kv", model, tokenizer)
    assert torch.equal(loaded.predict(QUESTION, "at dusk")[0], logits)
    chat = Chat(context)
    assert chat.ask(QUESTION, 8) == context.ask(QUESTION, 8)


def test_a_role_is_protected_in_all_of_its_messages_and_nowhere_else(parts):
    model, tokenizer, policy = parts
    tokenizer.chat_template = CHATML
    turns = [*TURNS[:2], {"role": "assistant", "content": "Answer in capital letters."}, *TURNS[3:]]
    ids = encode_context(tokenizer, turns)
    places = protected_tokens(tokenizer, turns, [{"role": "assistant"}])
    own = "Answer in capital letters.", "The sea was calm."
    assert [ids[place] for place in places] == [token for text in own for token in tokenizer(text)["input_ids"]]
    assert places[0] > len(tokenizer(turns[0]["content"] + turns[1]["content"])["input_ids"])
    context = compress(model, tokenizer, turns, protect=[{"role": "assistant"}], policy=policy, retention=0.5)
    kept = kept_positions(context, read_prompt(model, torch.tensor([ids])))
    assert all(set(places) <= own for heads in kept for own in heads)


CALLED = [
    {"role": "user", "content": "How high is the water?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "tide"}}]},
    {"role": "tool", "content": "41 feet"},
]


@pytest.mark.parametrize("place", TOOL_TEMPLATES)
def test_tools_of_a_context_are_where_its_template_has_them(parts, place):
    tokenizer = parts[1]
    tokenizer.chat_template = TOOL_TEMPLATES[place]
    prompt = {"tokenize": False, "add_generation_prompt": True, "tools": TOOLS}
    ids = encode_context(tokenizer, TURNS, tools=TOOLS)
    for tools in (TOOLS, None):  # in each request, as agents send them, or in none
        following = render_messages(tokenizer, CALLED, "conversation", tools, TOOLS)
        whole = tokenizer.apply_chat_template([*TURNS, *CALLED], **prompt)
        assert ids + tokenizer(following)["input_ids"] == tokenizer(whole)["input_ids"]
    text = encode_context(tokenizer, "The lamp was lit.", tools=TOOLS)
    following = render_messages(tokenizer, CALLED, "text", TOOLS, TOOLS)
    turns = [CALLED[0] | {"content": f"The lamp was lit.\n\n{CALLED[0]['content']}"}, *CALLED[1:]]
    whole = tokenizer.apply_chat_template(turns, **prompt)
    assert text + tokenizer(following)["input_ids"] == tokenizer(whole)["input_ids"]
    # Tools that the context does not have.
    for own in (None, TOOLS[:1]):
        if place == "behind":
            assert render_messages(tokenizer, CALLED, "text", TOOLS, own) == following
        else:
            with pytest.raises(PromptError, match=r"the request has tide, lamp; leave that out, or create the context"):
                render_messages(tokenizer, CALLED, "text", TOOLS, own)


def test_the_same_tools_in_the_words_of_another_library_are_those_of_the_context(parts):
    """openai-agents adds `strict` and titles; a parameter may itself have such a name."""
    tokenizer = parts[1]
    tokenizer.chat_template = "{{ tools | tojson }}" + TOOL_TEMPLATES["behind"]
    properties = {"title": {"type": "string"}, "berth": {"type": "integer"}}
    function = {"name": "tide", "description": "high water", "parameters": {"type": "object", "properties": properties}}
    own = [TOOLS[1], {"type": "function", "function": function}]
    schema = {"title": "tide_args", "additionalProperties": False, "type": "object"}
    schema["properties"] = {name: {"title": name, **kind} for name, kind in reversed(properties.items())}
    other = [{"function": function | {"parameters": schema, "strict": True}, "type": "function"}, TOOLS[1]]
    expected = render_messages(tokenizer, CALLED, "conversation", own, own)
    assert render_messages(tokenizer, CALLED, "conversation", other, own) == expected
    for changed in ({"description": "low water"}, {"parameters": {"type": "object", "properties": {"berth": {}}}}):
        tools = [TOOLS[1], {"type": "function", "function": function | changed}]
        with pytest.raises(PromptError, match="the request has lamp, tide with other definitions; leave that out"):
            render_messages(tokenizer, CALLED, "conversation", tools, own)


def test_tools_and_thinking_that_a_template_leaves_out_or_has_elsewhere_are_refused(parts):
    tokenizer = parts[1]
    tokenizer.chat_template = CHATML
    for refused in (
        lambda: encode_context(tokenizer, TURNS, tools=TOOLS),
        lambda: render_messages(tokenizer, CALLED, "text", TOOLS),
    ):
        with pytest.raises(PromptError, match="chat template leaves tools out"):
            refused()
    tokenizer.chat_template = None
    for text in ("a text", TURNS[1:2]):
        with pytest.raises(PromptError, match="has no chat template, which tools need"):
            encode_context(tokenizer, text, tools=TOOLS)
    tokenizer.chat_template = CHATML + "{{ '' if enable_thinking else '<think></think>' }}"
    silent = render_messages(tokenizer, CALLED, "conversation")
    assert silent == render_messages(tokenizer, CALLED, "conversation", has_thinking=True) + "<think></think>"
    tokenizer.chat_template = "{{ enable_thinking }}" + CHATML
    with pytest.raises(PromptError, match="but the request has no tools and enable_thinking; leave that out"):
        render_messages(tokenizer, CALLED, "conversation", has_thinking=True)
    for messages in (CALLED[1:], [{"role": "system", "content": "a"}, *CALLED[2:]]):
        with pytest.raises(PromptError, match="the first message after the system's must be one of the user"):
            render_messages(tokenizer, messages, "conversation")


def test_a_role_is_protected_in_its_messages_and_not_in_the_tools(parts):
    tokenizer = parts[1]
    tokenizer.chat_template = TOOL_TEMPLATES["first"]
    turns = [{"role": "user", "content": "high water"}, TURNS[-1]]
    ids = encode_context(tokenizer, turns, tools=TOOLS)
    places = protected_tokens(tokenizer, turns, [{"role": "user"}], tools=TOOLS)
    assert [ids[place] for place in places] == tokenizer("high water")["input_ids"]
    start = tokenizer("<|im_start|>user\n")["input_ids"]
    assert ids[places[0] - len(start) : places[0]] == start


@pytest.mark.parametrize(
    ("turns", "options", "message"),
    [
        ([], {}, "a conversation is a list of messages"),
        (["a", "b"], {}, "a conversation is a list of messages"),
        ([{"content": "a"}], {}, "a message of the conversation has no role"),
        ([{"role": "user", "content": None}], {}, "a message of the conversation has no text as its content"),
        ([{"role": "user", "content": "\0"}], {}, "a message holds NUL characters"),
        (TURNS[:2], {}, "must end with an answer of the assistant"),
        (TURNS, {"system": "Be brief."}, "has its system prompt among its messages"),
        (TURNS, {"images": [1]}, "images come with a text; in a conversation give"),
        (TURNS, {"protect": [{"role": "user", "at": 1}]}, "give {'role': ROLE}"),
        (TURNS, {"protect": [{"role": "critic"}]}, "with the role of a message"),
        ("a text", {"protect": [{"role": "user"}]}, "neither words of the text nor"),
    ],
)
def test_what_is_no_conversation_is_refused(parts, turns, options, message):
    model, tokenizer, policy = parts
    tokenizer.chat_template = CHATML
    with pytest.raises(PromptError, match=message):
        compress(model, tokenizer, turns, policy=policy, **options)


def test_a_template_that_leaves_messages_out_is_refused(parts):
    model, tokenizer, policy = parts
    tokenizer.chat_template = "{% for m in messages if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    with pytest.raises(PromptError, match="leaves messages out of a conversation"):
        compress(model, tokenizer, TURNS, policy=policy)


def test_without_a_template_turns_are_written_plainly(parts):
    tokenizer = parts[1]
    tokenizer.chat_template = None
    turns = [turn for turn in TURNS if turn["role"] != "tool" and turn["content"]]
    text = f"{turns[0]['content']}\n\nQuestion: {turns[1]['content']}\nAnswer: The sea was calm."
    assert encode_context(tokenizer, turns) == tokenizer(text)["input_ids"]
    question = encode_question(tokenizer, QUESTION, text, "conversation")
    assert question == tokenizer(f"\n\nQuestion: {QUESTION}\nAnswer:")["input_ids"]
