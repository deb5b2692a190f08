"""The server as its clients see it: stock OpenAI clients and curl, contexts and answers, limits and the end.

Requests are those that openai 3.57, langchain-openai 1.7 and litellm 1.110 send.
"""

import http.client
import json
import shutil
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from lkv.cli.main import main, parse_arguments
from lkv.cli.serve import check_port, read_api_key
from lkv.context.compression import compress
from lkv.errors import ServerError
from lkv.serving.service import Service
from lkv.utils.prompts import render_messages
from tests.conftest import save_model
from tests.ports import free_port
from tests.serving.server import KNORM, OTHER, TEXT, field, form, serving, slow_answers, until

QUESTIONS = ["Who?", "How many boats are there?", "And then?"]
WHO, SURE = {"role": "user", "content": "Who?"}, {"role": "user", "content": "Sure?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
RESULT = {"content": "41", "role": "tool", "tool_call_id": "call_1"}
USAGE = {"include_usage": True}
# A chat template that renders calls and results, beside the one of the server's tokenizer, which does not.
TOOLS_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }} {{ c.function.arguments.q }}>{% endfor %}</s>{% endfor %}[assistant]"
)


@pytest.fixture(scope="module")
def context(server):
    return server.compressed(TEXT, name="harbour")


@pytest.fixture(scope="module")
def expected(parts):
    own = compress(*parts, TEXT, **KNORM)
    return {question: own.ask(question, 8) for question in QUESTIONS}


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


def stock_answer(model, tokenizer, ids):
    out = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(out, skip_special_tokens=True).strip()


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


def test_a_conversation_is_folded_and_continues(server, parts):
    model, tokenizer = parts
    turns = [
        {"role": "developer", "content": "Be brief."},
        WHO,
        {"role": "assistant", "content": f"{TEXT} So: nobody."},
    ]
    protect = [{"role": "system"}, "41 boats"]
    name = server.compressed(None, messages=turns, protect=protect, memory=None)
    own = compress(model, tokenizer, [turns[0] | {"role": "system"}, *turns[1:]], protect=protect, **KNORM)
    assert server.service.store.get(name).ids == own.ids
    assert server.service.store.get(name).cache.kept_counts() == own.cache.kept_counts()
    assert server.answer("Sure?", name) == own.ask("Sure?", 8)
    fields = (
        field("messages", json.dumps(turns)) + field("protect", json.dumps(protect[0])) + field("protect", "41 boats")
    )
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    assert server.ask("/v1/contexts", fields + b"--b--\r\n", **kind)[1]["id"] == name
    # With everything kept it is the stock model that reads the whole conversation.
    whole = server.compressed(None, messages=turns, retention=1.0)
    more = [SURE, {"role": "assistant", "content": "Yes."}, WHO]
    system = turns[0] | {"role": "system"}
    ids = tokenizer(
        render_messages(tokenizer, [system, *turns[1:], *more]), return_tensors="pt", add_special_tokens=False
    )["input_ids"]
    assert server.answer("", whole, messages=more, max_tokens=6) == stock_answer(model, tokenizer, ids)
    # The same conversation as a text is another context.
    assert server.compressed(tokenizer.decode(own.ids)) != name


def test_a_conversation_with_tools_is_folded_with_them(server, monkeypatch):
    tokenizer = server.service.tokenizer
    turns = [WHO, {"role": "assistant", "tool_calls": [CALL]}, RESULT, {"role": "assistant", "content": "Nobody."}]
    status, said = server.problem("/v1/contexts", {"messages": turns[::3], "tools": TOOLS})
    assert status == 400 and "chat template leaves tools out" in said
    monkeypatch.setattr(tokenizer, "chat_template", "{% for t in tools or [] %}{{ t }}{% endfor %}" + TOOLS_TEMPLATE)
    name = server.compressed(None, messages=turns, tools=TOOLS, retention=1.0)
    assert server.ask(f"/v1/contexts/{name}")[1]["tools"] == server.service.store.describe(name).tools == TOOLS
    assert server.compressed(None, messages=turns, retention=1.0) != name
    fields = [
        field(*each) for each in (("messages", json.dumps(turns)), ("tools", json.dumps(TOOLS)), ("retention", "1"))
    ]
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    assert server.ask("/v1/contexts", b"".join(fields) + b"--b--\r\n", **kind)[1]["id"] == name
    more = [SURE, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]
    ids = tokenizer(
        f"{TOOLS[0]}[user]Who?</s>[assistant]<search x></s>[tool]41</s>[assistant]Nobody.</s>[user]Sure?</s>"
        "[assistant]<search x></s>[tool]41</s>[assistant]",
        return_tensors="pt",
        add_special_tokens=False,
    )["input_ids"]
    assert server.answer("", name, messages=more, max_tokens=6) == stock_answer(server.service.model, tokenizer, ids)
    status, said = server.problem("/v1/chat/completions", {"messages": [SURE], "tools": TOOLS, "context": name})
    assert status == 400 and "tools is not offered by this server" in said


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text": "a", "tools": [{"type": "function", "function": {"name": ""}}]}, "tools: Expected tools such as {"),
        ({"text": "a", "tools": [{"name": "f"}]}, "tools: Expected tools such as {"),
        ({"text": "a", "tools": TOOLS * 2}, "tools: Expected tools of different names"),
        ({"text": "a", "tools": [TOOLS[0] | {"x": "a" * 100_000}]}, "tools: Expected at most 100,000 characters"),
        ({"messages": [WHO]}, "the conversation must end with an answer of the assistant"),
        ({"messages": [WHO], "text": "a"}, "a context is made of a text or of messages, not of both"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [WHO, RESULT, {"role": "assistant", "content": [{"type": "image_url"}]}]}, "other than text"),
        ({"messages": [{"role": "assistant", "content": "a"}], "system": "b"}, "among its messages; leave system out"),
        ({"messages": [{"role": "assistant", "content": "a"}], "protect": [{"role": "tool"}]}, "the role of a message"),
    ],
)
def test_what_is_no_conversation_is_refused(server, body, message):
    status, answer = server.ask("/v1/contexts", body)
    assert status == 400 and message in answer["error"]["message"]


def test_the_same_text_is_one_file(server, context):
    status, again = server.ask("/v1/contexts", {"text": TEXT})
    assert status == 200 and again["id"] == context and again["status"] == "ready"
    assert 0 < again["bytes"] < again["full_bytes"] and again["realised_retention"] == pytest.approx(0.4, abs=0.01)
    assert [one["id"] for one in server.ask("/v1/contexts")[1]["data"]].count(context) == 1
    assert server.ask("/v1/contexts", {"text": TEXT, "name": "again"})[1]["name"] == "again"
    assert server.ask(f"/v1/contexts/{context}")[1]["name"] == "again"


def test_a_context_within_a_memory(server, parts):
    own = compress(*parts, TEXT, method="knorm", memory=0.25)
    name = server.compressed(TEXT, memory="25%")
    assert server.compressed(TEXT, memory="0.25") == name
    _, described = server.ask(f"/v1/contexts/{name}")
    assert described["memory"] == "0.25" and described["retention"] is None
    assert described["bytes"] == own.nbytes() <= 0.25 * described["full_bytes"]
    assert described["realised_retention"] > 0.4
    assert server.answer("Who?", name) == own.ask("Who?", 8)


def test_protected_words_are_kept_and_belong_to_the_settings(server, parts):
    own = compress(*parts, TEXT, **KNORM, system="Be brief.", protect=["Be brief.", "41 boats"])
    plain = server.compressed(TEXT, system="Be brief.")
    name = server.compressed(TEXT, system="Be brief.", protect=["Be brief.", "41 boats"])
    assert name != plain == server.compressed(TEXT, system="Be brief.", protect=[])
    assert server.service.store.get(name).cache.kept_counts() == own.cache.kept_counts()
    assert server.service.store.get(name).metadata["protected_tokens"] == len("Be brief.") + 6 * len("41 boats")
    assert server.answer("Who?", name) == own.ask("Who?", 8)
    fields = field("system", "Be brief.") + field("protect", "Be brief.") + field("protect", "41 boats")
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    assert server.ask("/v1/contexts", fields + form(TEXT.encode()), **kind)[1]["id"] == name


def test_a_memory_that_is_written_in_other_ways_is_the_same(server):
    """Also as a number. However small: a byte is not a share, and neither is a share too small for decimals."""
    assert server.compressed(TEXT, memory=0.57) == server.compressed(TEXT, memory="57%")
    assert server.compressed(TEXT, memory=50_000) == server.compressed(TEXT, memory="50kB")
    for least in ("1B", "0.001kb", "0.001%"):
        status, made = server.ask("/v1/contexts", {"text": TEXT, "memory": least})
        assert status == 202
        described = server.finished(made)
        assert described["status"] == "failed" and "nothing of it would be kept" in described["error"], least


def test_a_system_prompt_is_compressed_or_begins_the_question(server, parts):
    own = compress(*parts, TEXT, **KNORM, system="Be brief.")
    name = server.compressed(TEXT, system="Be brief.")
    assert server.answer("Who?", name) == own.ask("Who?", 8)
    late = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who?"}]
    assert server.answer("", name, messages=late) == own.ask("Be kind.\n\nWho?", 8)


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
        {"messages": [WHO], "repetition_penalty": 1.0, "min_p": 0.0, "seed": -3},  # neutral values of other servers
    ],
)
def test_what_clients_send_by_default_is_answered(server, body):
    status, content = server.ask("/v1/chat/completions", {"model": "tiny", **body})
    assert status == 200 and ("data: [DONE]" in content if body.get("stream") else content["choices"])


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
    whole = expected["Who?"]
    stop = whole[2:4].strip()
    status, cut = server.chat("Who?", context, stop=[stop, "never"])
    assert status == 200 and cut["choices"][0]["message"]["content"] == whole[: whole.index(stop)].rstrip()
    assert cut["choices"][0]["finish_reason"] == "stop"


def test_a_text_too_short_for_its_retention_is_a_failed_job(server):
    status, made = server.ask("/v1/contexts", {"text": "x", "retention": 0.01})
    assert status == 202
    made = server.finished(made)
    assert made["status"] == "failed" and "nothing of it would be kept" in made["error"]
    status, answer = server.chat("?", made["id"])
    assert status == 409 and "could not be made" in answer["error"]["message"]
    assert server.ask(f"/v1/contexts/{made['id']}", method="DELETE")[1]["deleted"] is True


def test_a_context_deleted_while_it_is_asked_answers_to_the_end(server, parts):
    name = server.compressed(OTHER + "!")
    own = compress(*parts, OTHER + "!", **KNORM)
    body = {"messages": [{"role": "user", "content": "Who?"}], "context": name, "max_tokens": 60, "stream": True}
    with server.open("/v1/chat/completions", body) as stream:
        first = stream.readline()
        deleted = server.ask(f"/v1/contexts/{name}", method="DELETE")[1]
        assert deleted == {"object": "context", "id": name, "deleted": True}
        rest = first + stream.read()
    events = [json.loads(line[6:]) for line in rest.decode().split("\n\n") if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == own.ask("Who?", 60)
    assert server.chat("Who?", name)[0] == 404


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


def test_a_key_and_limits(parts, tmp_path, monkeypatch):
    limits = {"max_upload": 3000 / 2**20, "max_requests": 1, "max_texts": 1, "max_tokens": 900, "timeout": 2}
    slow_answers(monkeypatch)
    with serving(*parts, tmp_path, key="secret", host="0.0.0.0", **limits) as server:
        assert server.ask("/healthz", Authorization="")[0] == server.ask("/", Authorization="")[0] == 200
        assert server.ask("/v1/models", Authorization="bearer secret")[0] == 200
        for wrong in ("", "Bearer wrong", "secretBearer "):
            status, said = server.problem("/v1/models", Authorization=wrong)
            assert status == 401 and "the key is missing or wrong" in said
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert server.ask("/v1/models", Host="elsewhere.example")[0] == 200
        status, said = server.problem("/v1/contexts", {"text": "x" * 4000})
        assert status == 413 and "larger than 3,000 bytes" in said
        for kind, path in (("application/json", "/v1/contexts"), ("application/json", "/v1/chat/completions"),
                           ("multipart/form-data; boundary=b", "/v1/contexts")):  # fmt: skip
            sent = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            headers = {"Authorization": "Bearer secret", "Content-Type": kind}
            pieces = iter([form(b"")[:70], *[b"x" * 500] * 9])  # of a length that is not told
            sent.request("POST", path, pieces, headers, encode_chunked=True)
            answer = sent.getresponse()
            assert answer.status == 413 and b"larger than 3,000 bytes" in answer.read()
            sent.close()
        name = server.compressed(TEXT)
        # Longer than the time that an answer may take, and the one request at once that is served.
        with ThreadPoolExecutor() as pool:
            long = pool.submit(server.chat, "Who?", name, max_tokens=900)
            until(lambda: server.service.answers.open)
            status, refused = server.chat("Who?", name)
            assert status == 429 and "ask again later" in refused["error"]["message"]
        status, late = long.result()  # its beginning
        assert status == 200 and "took more than 2 seconds" in late["warning"]
        assert late["choices"][0]["message"]["content"] and late["choices"][0]["finish_reason"] == "length"
        until(lambda: not server.service.answers.open)


def waiting_texts(server):
    return [job for job in server.service.registry.jobs() if not job.is_started]


def test_texts_beyond_those_that_may_wait_get_429(parts, tmp_path, monkeypatch):
    release = threading.Event()
    plain = Service._compress

    def slow(self, job):
        release.wait(30)
        plain(self, job)

    monkeypatch.setattr(Service, "_compress", slow)
    with serving(*parts, tmp_path, max_texts=1) as server:
        first = server.ask("/v1/contexts", {"text": "one " * 9})[1]
        until(lambda: not waiting_texts(server))
        second = server.ask("/v1/contexts", {"text": "two " * 9})[1]
        assert server.ask("/v1/contexts", {"text": "one " * 9})[1]["id"] == first["id"]
        assert server.problem("/v1/contexts", {"text": "three " * 9})[0] == 429
        status, answer = server.chat("?", first["id"])
        assert status == 409 and "is still being compressed; ask again" in answer["error"]["message"]
        for _ in range(3):  # a deleted text waits no longer
            assert server.ask(f"/v1/contexts/{second['id']}", method="DELETE")[0] == 200
            assert not waiting_texts(server)
            status, second = server.ask("/v1/contexts", {"text": "two " * 9})
            assert status == 202
        assert server.ask(f"/v1/contexts/{second['id']}", method="DELETE")[0] == 200
        release.set()
        assert server.finished(first)["status"] == "ready"
        assert [one["id"] for one in server.ask("/v1/contexts")[1]["data"]] == [first["id"]]


def test_a_stop_lets_answers_end(parts, tmp_path, monkeypatch):
    slow_answers(monkeypatch)
    with ThreadPoolExecutor() as pool, serving(*parts, tmp_path, grace=30) as server:
        name = server.compressed(TEXT)
        asking = pool.submit(server.answer, "Who?", name, max_tokens=40)
        until(lambda: server.service.answers.open)
    assert asking.result() == compress(*parts, TEXT, **KNORM).ask("Who?", 40) and server.service.answers.open == 0


def test_the_folder_in_which_it_starts_is_a_model_with_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(save_model(tmp_path / "tiny"))
    words = ["serve", "--model", ".", "--method", "knorm", "--store", str(tmp_path / "store")]
    service = parse_arguments(words).make_service()
    service.stop(0)
    assert service.name == "tiny"


def test_a_key_is_needed_where_others_can_reach_it(monkeypatch):
    monkeypatch.delenv("LKV_API_KEY", raising=False)
    assert read_api_key("127.0.0.1") is read_api_key("localhost") is None
    with pytest.raises(ServerError, match=r"0.0.0.0 can be reached by others: set LKV_API_KEY"):
        read_api_key("0.0.0.0")
    monkeypatch.setenv("LKV_API_KEY", "x")
    assert read_api_key("0.0.0.0") == "x"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServerError, match="is already in use"):
            check_port("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--host", "0.0.0.0"], "set LKV_API_KEY"), (["--method", "full"], "cannot be stored"),
        (["--allowed-hosts", "lkv.example.com"], "lkv.example.com can be reached by others: set LKV_API_KEY"),
        (["--allowed-hosts", "https://a.b"], "but must be a host name without scheme and port, such as lkv.example"),
        (["--retention", "2"], "must lie in (0, 1]"), (["--grace", "nan"], "--grace is nan"),
        (["--grace", "inf"], "--grace is inf"), (["--contexts-memory", "inf"], "--contexts-memory is inf"),
        (["--timeout", "inf"], "--timeout is inf"),
        (["--store", "nosuch://place", "--method", "knorm", "--model", "{model}"], "Protocol not known"),
        (["--model", "{nothing}"], "could be loaded"), (["--vllm-args=--enforce-eager"], "needs --engine vllm"),
        (["--policy", "smollm2-135m-instruct", "--method", "knorm"], "takes no --policy"),
        (["--engine", "vllm", "--timeout", "300", "--device", "cpu"], "does not read --device, --timeout; leave them"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_be_says_so(words, says, monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("LKV_API_KEY", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if "{model}" in words:
        save_model(tmp_path / "model")
    (tmp_path / "nothing").mkdir()
    words = [word.format(model=tmp_path / "model", nothing=tmp_path / "nothing") for word in words]
    assert main(["serve", "--port", str(free_port()), *words]) == 2
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said
