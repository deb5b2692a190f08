"""Tools, structured output and reasoning parsers with a context, asked by OpenAI's client."""

import copy
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from tokenizers import decoders

from lkv.context.compression import compress_ids
from lkv.methods.request import CompressionRequest
from lkv.utils.prompts import encode, encode_context, render_messages
from tests.serving.server import until
from tests.vllm import test_http
from tests.vllm.servers import serving_lab

# Tools before the turns, and an empty thought where the model must not think.
TEMPLATE = (
    "{% for t in tools or [] %}[tool]{{ t.function.name }}[/tool]{% endfor %}{% for m in messages %}"
    "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>"
    "{% endfor %}{% endfor %}[assistant]{{ '' if enable_thinking else '<think></think>' }}"
)
COLOURS = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "parameters": COLOURS}},
    {"type": "function", "function": {"name": "halt", "parameters": {"type": "object", "properties": {}}}},
]
PAGES = 36  # few, so that requests are preempted
CALL = {"id": "call_1", "type": "function", "function": {"name": "paint", "arguments": '{"colour": "red"}'}}
TURNS = [
    {"role": "user", "content": "which colour has the lamp?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "painted", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "it is red now"},
]


def squash(text):
    """Without what vLLM shows beside tools alone (special tokens) or keeps back (first bytes of a last letter)."""
    return re.sub("<s>|<pad>|</s>", "", test_http.squash(text)).rstrip("\ufffd")


@pytest.fixture(scope="module")
def tokenizer(lab):
    """With a chat template, and with a decoder, as parsers need it: the lab's own puts spaces between tokens."""
    tokenizer = copy.deepcopy(lab.tokenizer)
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def server(lab, tokenizer):
    lab.close_shared()
    before = {file: file.read_bytes() for file in (lab.folder / "tokenizer.json", lab.folder / "tokenizer_config.json")}
    tokenizer.save_pretrained(lab.folder)
    options = "--enforce-eager --max-model-len 1024 --enable-auto-tool-choice --tool-call-parser hermes"
    # A random model may write nothing but white space.
    grammar = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})
    options += f" --reasoning-parser qwen3 --structured-outputs-config '{grammar}'"
    options += f" --block-size 32 --num-gpu-blocks-override {PAGES}"
    try:
        with serving_lab(lab, "--vllm-args", options) as server:
            yield server
    finally:
        (lab.folder / "chat_template.jinja").unlink()
        for file, data in before.items():
            file.write_bytes(data)


@pytest.fixture
def context(server):
    return server.create(None, messages=TURNS, tools=TOOLS)


def chat(server, context, messages, **options):
    """One greedy answer."""
    options = {"max_tokens": 100, "temperature": 0, **options}
    answer = server.client.chat.completions.create(model=f"tiny:{context}", messages=messages, **options)
    return answer.choices[0]


def expected(lab, tokenizer, tokens, messages, **options):
    """What the oracle answers after the conversation."""
    turns = [{**turn, "content": turn["content"] or ""} for turn in TURNS]
    request = CompressionRequest.of_text({"policy": lab.policy, "retention": lab.settings["retention"]})
    own = compress_ids(lab.model, tokenizer, encode_context(tokenizer, turns, tools=TOOLS), request)
    text = render_messages(tokenizer, messages, "conversation", TOOLS, TOOLS, **options)
    return squash(tokenizer.decode(lab.answer(own, encode(tokenizer, text), tokens), skip_special_tokens=True))


def test_the_next_turns_call_the_tools_of_the_conversation(server, lab, tokenizer, context):
    question = {"role": "user", "content": "and now?"}
    named = {"type": "function", "function": {"name": "paint"}}
    strict = [tool | {"function": tool["function"] | {"strict": True}} for tool in TOOLS]  # by a grammar of its schema
    answer = chat(server, context, [question], tools=strict, tool_choice=named, max_tokens=500)
    (call,) = answer.message.tool_calls
    assert call.function.name == "paint" and json.loads(call.function.arguments)["colour"] in ("red", "green")
    # By the model's own form, which the parser reads; the model is too small to choose it.
    form = '<tool_call>\n{"name": "paint", "arguments": {"colour": "green"}}\n</tool_call>'
    forced = {"structured_outputs": {"choice": [form]}, "chat_template_kwargs": {"enable_thinking": False}}
    answer = chat(server, context, [question], tools=TOOLS, extra_body=forced)
    assert answer.finish_reason == "tool_calls"
    assert json.loads(answer.message.tool_calls[0].function.arguments) == {"colour": "green"}
    # The turns of the loop that the framework sends: the call and its result.
    call = answer.message.tool_calls[0].model_dump()
    messages = [
        question,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": call["id"]},
    ]
    read = [{**message, "content": message["content"] or ""} for message in messages]
    for options in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        said = chat(server, context, messages, max_tokens=12, **options).message.content
        assert squash(said) == expected(lab, tokenizer, 12, read)


def test_an_answer_with_a_schema(server, context):
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOURS}}
    question = {"role": "user", "content": "which colour?"}
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        said = chat(server, context, [question], response_format=form, max_tokens=60, **options).message.content
        assert json.loads(said)["colour"] in ("red", "green")


def test_thoughts_are_apart_from_the_answer(server, lab, tokenizer, context):
    question = {"role": "user", "content": "which colour?"}
    answer = chat(server, context, [question], max_tokens=12).message
    assert squash(answer.content) == expected(lab, tokenizer, 12, [question]) and not getattr(answer, "reasoning", None)
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = chat(server, context, [question], max_tokens=12, extra_body=thinking).message
    assert (
        squash(answer.reasoning) == expected(lab, tokenizer, 12, [question], has_thinking=True) and not answer.content
    )


def test_tools_that_cannot_follow_the_context_are_refused_by_name(server, lab, context):
    question, text = {"role": "user", "content": "and now?"}, server.create(lab.text(61))
    for name, options, match in (
        (context, {"tools": TOOLS[:1]}, "here paint, halt, but the request has paint; leave that out, or create the"),
        (text, {"tools": TOOLS}, "here no tools, but the request has paint, halt; leave that out"),
        (text, {"tools": [{"type": "function"}]}, "tools: Expected tools such as"),
        (context, {"extra_body": {"chat_template_kwargs": {"style": 1}}}, "takes enable_thinking alone"),
        (context, {"extra_body": {"chat_template_kwargs": {"enable_thinking": "no"}}}, "which is true or false"),
    ):
        with pytest.raises(openai.BadRequestError, match=match):
            chat(server, name, [question], **options)
    with pytest.raises(openai.BadRequestError, match="tools cannot be used with a context"):
        server.client.completions.create(model=f"tiny:{text}", prompt="abc", extra_body={"tools": TOOLS})
    made = server.http.get(f"/v1/contexts/{context}").json()
    assert made["tools"] == TOOLS


@pytest.mark.slow
def test_two_hundred_requests_with_tools_and_without(server, lab, tokenizer):
    """Over 20 contexts and none, some cut off, in few pages: answers are the oracle's, and nothing is left behind."""
    request = CompressionRequest.of_text({"policy": lab.policy, "retention": lab.settings["retention"]})
    contexts = {None: (None, None, None)}
    for seed in range(20):
        text, tools = lab.text(100 + seed, 60 + 12 * seed), TOOLS if seed % 2 else None
        turns = [{"role": "user", "content": text}, TURNS[-1]]
        body = {"messages": turns, "tools": tools} if tools else {}
        name = server.create(None if tools else text, **body)
        ids = encode_context(tokenizer, turns if tools else text, tools=tools)
        own = compress_ids(lab.model, tokenizer, ids, request)
        contexts[name] = own, "conversation" if tools else "text", tools
    draw, answers, before = random.Random(0), {}, server.memory()

    def ask(number):
        name, seed, tools, is_cut_off = requests[number]
        body = {"messages": [{"role": "user", "content": lab.text(seed, 10 + 40 * seed)}], "temperature": 0}
        body |= {"model": f"tiny:{name}" if name else "tiny", "max_tokens": 200 if is_cut_off else 16}
        if tools:
            body |= {"tools": tools, "tool_choice": "none"}
        if not name:
            body["chat_template_kwargs"] = {"enable_thinking": False}
        if is_cut_off:
            with server.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
                next(stream.iter_lines())
            return None
        answer = server.http.post("/v1/chat/completions", json={**body, "return_token_ids": True}).json()
        return answer["choices"][0]["token_ids"]

    requests = []
    for _ in range(200):
        name = draw.choice([*contexts])
        tools = contexts[name][2] if name else TOOLS
        requests.append((name, draw.randrange(6), draw.choice([None, tools]), draw.random() < 0.1))
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(ask, range(200)))
    for (name, seed, tools, is_cut_off), said in zip(requests, found, strict=True):
        key = name, seed, name is None and tools is not None
        if not is_cut_off and key not in answers:
            own, kind, its_tools = contexts[name]
            messages = [{"role": "user", "content": lab.text(seed, 10 + 40 * seed)}]
            text = render_messages(tokenizer, messages, kind, tools, its_tools)
            answers[key] = lab.answer(own, encode(tokenizer, text), 16)
        assert is_cut_off or said == answers[key], (name, seed, tools)
    assert sum(is_cut_off for *_, is_cut_off in requests) > 5 and len(answers) > 80

    def rest():
        values = dict(
            line.rsplit(" ", 1) for line in server.http.get("/metrics").text.splitlines() if line[:5] == "vllm:"
        )
        return {key.partition("{")[0]: float(value) for key, value in values.items()}

    until(lambda: rest()["vllm:num_requests_running"] == rest()["vllm:kv_cache_usage_perc"] == 0, 60)
    assert rest()["vllm:num_preemptions_total"] > 0
    assert server.memory() == before
