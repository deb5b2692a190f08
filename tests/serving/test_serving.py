"""The server as its clients see it: stock OpenAI clients, curl and the page, with and without a context.

Requests are those that openai 3.57, langchain-openai 1.7 and litellm 1.110 send.
"""

import json
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import get_type_hints

import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

from lkv.context.compression import compress
from lkv.serving.schemas import ContextRequest
from lkv.utils.prompts import render_messages
from tests.serving.server import (
    CALL,
    KNORM,
    OTHER,
    QUESTIONS,
    RESULT,
    SURE,
    TEXT,
    TOOLS_TEMPLATE,
    WHO,
    stock_answer,
    until,
)  # fmt: skip

USAGE = {"include_usage": True}


def test_a_stock_client_asks_a_context(server, context, expected):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()][:2] == ["tiny", f"tiny:{context}"]
    for question in QUESTIONS:
        turn = [{"role": "user", "content": question}]
        named = client.chat.completions.create(model=f"tiny:{context}", messages=turn, max_tokens=8)
        field = client.chat.completions.create(
            model="tiny", messages=turn, max_completion_tokens=8, extra_body={"context": context}
        )
        assert named.choices[0].message.content == field.choices[0].message.content == expected[question]
        assert named.choices[0].finish_reason in ("length", "stop") and named.usage.completion_tokens <= 8
        assert named.usage.prompt_tokens_details.cached_tokens == len(TEXT) + len("[user]")
        stream = client.chat.completions.create(
            model=f"tiny:{context}", messages=turn, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected[question]
        assert chunks[-2].choices[0].finish_reason == named.choices[0].finish_reason
        assert chunks[-1].usage == named.usage and not chunks[-1].choices


def test_many_clients_at_once(server, context, parts, expected):
    other = server.compressed(OTHER)
    own = compress(*parts, OTHER, **KNORM)
    right = {(context, question): text for question, text in expected.items()}
    right |= {(other, question): own.ask(question, 8) for question in QUESTIONS}
    keys = [*right] * 3
    with ThreadPoolExecutor(len(keys)) as pool:
        assert list(pool.map(lambda key: server.answer(key[1], key[0]), keys)) == [right[key] for key in keys]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_uploads_a_file_and_asks(server, tmp_path):
    file = tmp_path / "note.txt"
    file.write_bytes("\ufeffDie Brücke ist gesperrt. ".encode() * 4)

    def curl(*words):
        done = subprocess.run(["curl", "-sS", "-m", "60", *words], capture_output=True, check=True)
        return done.stdout.decode()

    made = json.loads(curl("-F", f"file=@{file}", "-F", "retention=1", f"{server.url}/v1/contexts"))
    assert made["skipped"] == []
    made = server.finished(json.loads(curl(f"{server.url}/v1/contexts/{made['id']}")))
    assert made["name"] == "note.txt" and made["retention"] == made["realised_retention"] == 1.0
    body = json.dumps({"messages": [{"role": "user", "content": "Warum?"}], "context": made["id"], "stream": True,
                       "max_tokens": 3})  # fmt: skip
    lines = curl("-N", "-H", "Content-Type: application/json", "-d", body, f"{server.url}/v1/chat/completions").split(
        "\n\n"
    )
    assert lines[0].startswith("data: {") and lines[-2] == "data: [DONE]"
    assert curl(f"{server.url}/healthz") == curl(f"{server.url}/health") == "ok\n"


def test_without_a_context_it_is_a_plain_chat_model(server, parts):
    model, tokenizer = parts
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    ids = tokenizer(render_messages(tokenizer, turns), return_tensors="pt", add_special_tokens=False)["input_ids"]
    right = stock_answer(model, tokenizer, ids)
    harmless = {"user": "me", "metadata": {"a": "b"}, "n": 1, "logit_bias": {}, "tools": None, "other": None}
    assert server.answer("", None, messages=turns, max_tokens=6, **harmless) == right


def test_turns_follow_the_context_as_the_template_writes_them(server, context, parts):
    model, tokenizer = parts
    whole = server.compressed(TEXT, retention=1.0)
    assert whole != context
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Nobody."}]
    last = [{"type": "text", "text": "And "}, {"type": "text", "text": "then?"}]
    conversation = f"[user]{TEXT}\n\nWho?</s>[assistant]Nobody.</s>[user]And then?</s>[assistant]"
    ids = tokenizer(conversation, return_tensors="pt", add_special_tokens=False)["input_ids"]
    right = stock_answer(model, tokenizer, ids)
    assert server.answer("", whole, messages=[*turns, {"role": "user", "content": last}], max_tokens=6) == right


def test_a_models_name_may_hold_colons(server, context, expected, monkeypatch):
    monkeypatch.setattr(server.service, "name", "owner/a:b")
    assert server.answer("Who?", None, model=f"owner/a:b:{context}") == expected["Who?"]
    assert server.answer("Who?", context, model="owner/a:b") == expected["Who?"]
    assert server.chat("Who?", None, model="owner/a")[0] == 404
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    listed = {model.id: model for model in client.models.list()}
    for name in ("owner/a:b", f"owner/a:b:{context}"):
        assert client.models.retrieve(name) == listed[name]
    for name in ("owner/a", "owner/a:b:none"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [WHO]},  # openai, litellm
        {"stream": False, "messages": [WHO]},  # LangChain
        {"stream": True, "messages": [WHO]},  # LangChain
        {"messages": [WHO], "temperature": 0, "max_tokens": 5, "stream": True},  # litellm
        {"stream": True, "messages": [WHO], "stream_options": USAGE, "temperature": 0.8, "top_p": 0.9},  # a chat page
        {"messages": [WHO], "stream": False, "max_completion_tokens": 1000},  # a chat page, for a title
        {"messages": [{**WHO, "name": "me"}], "user": "me", "n": 1, "tools": None, "response_format": {"type": "text"}},
        # Neutral values of other servers.
        {"messages": [WHO], "repetition_penalty": 1.0, "min_p": 0.0, "best_of": 1, "seed": -3},
    ],
)
def test_what_clients_send_by_default_is_answered(server, body):
    status, content = server.ask("/v1/chat/completions", {"model": "tiny", **body})
    assert status == 200 and ("data: [DONE]" in content if body.get("stream") else content["choices"])


def test_null_means_the_default_in_every_field_of_openais_client(server, context, expected):
    fields = get_type_hints(CompletionCreateParamsNonStreaming).keys() - {"messages"} | {"context"}
    assert {"stream", "stream_options", "n", "stop", "tools", "model", "temperature"} <= fields
    plain = server.answer("Who?")
    for field in fields:
        assert server.answer("Who?", **{"max_tokens": 8, field: None})[: len(plain)] == plain
    message = dict.fromkeys(("name", "refusal", "audio", "tool_calls", "function_call")) | WHO
    body = {"messages": [message], "max_tokens": 8, "stream_options": {"include_usage": None}}
    assert server.answer("", **dict.fromkeys(fields) | body) == plain
    status, made = server.ask(
        "/v1/contexts", {"text": TEXT, **dict.fromkeys(ContextRequest.model_fields.keys() - {"text"})}
    )
    assert (status, made["id"]) == (200, context) and server.answer("Who?", made["id"]) == expected["Who?"]


@pytest.mark.parametrize("missing", [{"content": None}, {}])  # LangChain, litellm
def test_calls_of_tools_in_a_history_are_rendered_or_refused_by_name(server, monkeypatch, missing):
    messages = [WHO, {"role": "assistant", "tool_calls": [CALL], **missing}, RESULT, SURE]
    status, said = server.problem("/v1/chat/completions", {"messages": messages})
    assert status == 400 and "chat template leaves tool_calls out" in said
    tokenizer = server.service.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", TOOLS_TEMPLATE)
    plain = server.answer(
        "", messages=[{"role": "user", "content": "Who?</s>[assistant]<search x></s>[tool]41</s>[user]Sure?"}]
    )
    assert server.answer("", messages=messages) == plain
    # The last message may be a tool's result, which the template has to read.
    shorter = [{"role": "user", "content": "Who?</s>[assistant]<search x></s>[tool]41"}]
    assert server.answer("", messages=messages[:-1]) == server.answer("", messages=shorter)
    monkeypatch.setattr(tokenizer, "chat_template", TOOLS_TEMPLATE.replace("messages", "messages if m.role != 'tool'"))
    status, said = server.problem("/v1/chat/completions", {"messages": messages[:-1]})
    assert status == 400 and "chat template leaves tools' results out" in said


def test_sampling_seeds_and_stops(server, context, expected):
    hot = {"temperature": 1.9, "seed": 3, "max_tokens": 12}
    assert server.answer("Who?", context, **hot) == server.answer("Who?", context, **hot)
    texts = {server.answer("Who?", context, temperature=1.9, seed=seed, max_tokens=12) for seed in range(4)}
    assert len(texts) > 1
    assert server.answer("Who?", context, top_p=0, **hot) == server.answer("Who?", context, max_tokens=12)
    for off in (-1, 0):  # as in vLLM's API
        assert server.answer("Who?", context, top_k=off, **hot) == server.answer("Who?", context, **hot)
    assert server.chat("Who?", context, top_k=-2)[0] == server.chat("Who?", context, top_p=-0.1)[0] == 400
    whole = expected["Who?"]
    stop = whole[2:4].strip()
    status, cut = server.chat("Who?", context, stop=[stop, "never"])
    assert status == 200 and cut["choices"][0]["message"]["content"] == whole[: whole.index(stop)].rstrip()
    assert cut["choices"][0]["finish_reason"] == "stop"


def test_a_client_that_goes_ends_its_answer(server, context):
    body = json.dumps({"messages": [{"role": "user", "content": "Who?"}], "context": context, "max_tokens": 1000,
                       "stream": True}).encode()  # fmt: skip
    before = server.service.answers.tokens
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                       b"Content-Length: %d\r\n\r\n" % len(body) + body)  # fmt: skip
        client.recv(400)
    until(lambda: not server.service.answers.open)
    assert server.service.answers.tokens - before < 1000


def test_metrics_tell_what_is_held(server, context):
    server.answer("Who?", context)

    def metrics():
        text = server.ask("/metrics")[1]
        return dict(line.split(" ") for line in text.splitlines() if not line.startswith("#"))

    # Slots of the answer are given back after it was sent.
    until(lambda: float(metrics()["lkv_context_bytes"]) == sum(server.service.store.resident().values()))
    values, resident = metrics(), server.service.store.resident()
    assert float(values["lkv_generated_tokens_total"]) == server.service.answers.tokens > 0
    assert float(values["lkv_contexts_resident"]) == len(resident) >= 1
    assert float(values["lkv_context_bytes_saved"]) > 0
    assert float(values["lkv_requests_open"]) == 0 and float(values["lkv_texts_waiting"]) == 0


def test_the_page_is_whole_and_asks_nobody_else(server):
    with server.open("/") as answer:
        page, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    assert "<title>LKV</title>" in page and {"default-src 'none'", " frame-ancestors 'none'"} < set(policy.split(";"))
    assert "http://" not in page and "https://" not in page and "src=" not in page
