"""vLLM's server with the plugin, asked by OpenAI's client: contexts by HTTP, errors, deletion, a killed engine."""

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest

from lkv.context.compression import compress
from lkv.utils.prompts import encode, render_messages
from tests.vllm.servers import serving_lab, squash


@pytest.fixture(scope="module")
def server(lab):
    lab.close_shared()
    with serving_lab(lab) as server:
        yield server


def expected(lab, context, question, tokens=12):
    """The oracle's answer to a chat."""
    messages = [{"role": "user", "content": question}]
    ids = encode(lab.tokenizer, render_messages(lab.tokenizer, messages, after=None if context is None else "text"))
    return squash(lab.tokenizer.decode(lab.answer(context, ids, tokens), skip_special_tokens=True))


def test_a_stock_client_asks_a_context_in_three_ways(server, lab):
    text, question = lab.text(30), "how much is it?"
    name, context = server.create(text, name="a text"), lab.context(text)
    want = expected(lab, context, question)
    assert server.ask(question, f"tiny:{name}") == want
    assert server.ask(question, extra_body={"vllm_xargs": {"lkv_context": name}}) == want
    assert server.ask(question, extra_body={"context": name}) == want
    messages = [{"role": "user", "content": question}]
    stream = server.client.chat.completions.create(
        model=f"tiny:{name}", messages=messages, stream=True, max_tokens=12, temperature=0
    )
    assert squash("".join(part.choices[0].delta.content or "" for part in stream if part.choices)) == want
    parts = [{"type": "text", "text": question, "image_url": None}]  # as some clients send text
    request = {"model": f"tiny:{name}", "messages": [{"role": "user", "content": parts}], "max_tokens": 12}
    answer = server.http.post("/v1/chat/completions", json={**request, "temperature": 0}).json()
    assert squash(answer["choices"][0]["message"]["content"]) == want
    # Without a number an answer has the tokens of --max-tokens.
    named = server.client.chat.completions.with_raw_response.create(
        model=f"tiny:{name}", messages=messages, temperature=0
    )
    assert named.headers["lkv-context"] == name
    assert squash(named.parse().choices[0].message.content) == expected(lab, context, question, 16)
    usage = named.parse().usage
    new_tokens = len(encode(lab.tokenizer, render_messages(lab.tokenizer, messages, after="text")))
    assert usage.prompt_tokens == context.tokens + new_tokens and usage.total_tokens == usage.prompt_tokens + 16
    assert usage.prompt_tokens_details.cached_tokens == context.tokens
    stream = server.client.chat.completions.create(
        model=f"tiny:{name}", messages=messages, stream=True, max_tokens=2, stream_options={"include_usage": True}
    )
    assert [part.usage.prompt_tokens for part in stream if part.usage] == [usage.prompt_tokens]
    assert {"tiny", f"tiny:{name}"} <= {model.id for model in server.client.models.list()}
    assert server.http.get("/healthz").status_code == 200
    plain = server.client.completions.with_raw_response.create(model="tiny", prompt="abc", max_tokens=2)
    assert "lkv-context" not in plain.headers
    ids = encode(lab.tokenizer, "abc def")
    completion = server.client.completions.create(model=f"tiny:{name}", prompt="abc def", max_tokens=8, temperature=0)
    assert squash(completion.choices[0].text) == squash(lab.tokenizer.decode(lab.answer(context, ids, 8)))


def test_a_conversation_is_folded_and_continues(server, lab):
    turns = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": lab.text(20)},
        {"role": "assistant", "content": "it is a lamp"},
    ]
    name = server.create(None, messages=turns, protect=[{"role": "system"}])
    options = {"policy": lab.policy, "retention": lab.settings["retention"], "protect": [{"role": "system"}]}
    own = compress(lab.model, lab.tokenizer, turns, **options)
    assert server.ask("how much is it?", f"tiny:{name}") == squash(own.ask("how much is it?", 12))
    whole = encode(lab.tokenizer, render_messages(lab.tokenizer, [*turns, {"role": "user", "content": "is it ?"}]))
    messages = [{"role": "user", "content": "is it ?"}]
    answer = server.client.chat.completions.create(model=f"tiny:{name}", messages=messages, max_tokens=2)
    assert answer.usage.prompt_tokens == len(whole)


def test_beam_search_over_a_context(server, lab):
    name, context, question = server.create(lab.text(30)), lab.context(lab.text(30)), "how much is it?"
    beams = {"use_beam_search": True, "ignore_eos": True, "length_penalty": 0.0}
    answer = server.client.chat.completions.create(
        model=f"tiny:{name}", messages=[{"role": "user", "content": question}], n=3, max_tokens=6, temperature=0,
        extra_body=beams,
    )  # fmt: skip
    ids = encode(lab.tokenizer, render_messages(lab.tokenizer, [{"role": "user", "content": question}], after="text"))
    want = [squash(lab.tokenizer.decode(beam, skip_special_tokens=True)) for beam in lab.beams(context, ids, 3, 6)[0]]
    assert [squash(choice.message.content) for choice in answer.choices] == want and len(set(want)) > 1
    prompt = {"prompt": "abc def", "n": 2, "max_tokens": 4, "temperature": 0, "cache_salt": "mine", **beams}
    completion = server.http.post("/v1/completions", json={"model": f"tiny:{name}", **prompt}).json()
    want = lab.beams(context, lab.tokenizer("abc def")["input_ids"], 2, 4)[0]
    assert [squash(choice["text"]) for choice in completion["choices"]] == [
        squash(lab.tokenizer.decode(beam, skip_special_tokens=True)) for beam in want
    ]


def test_other_pages_and_hosts_get_no_context(server, lab):
    """vLLM itself answers under every host name, by which any page in a browser could ask it."""
    name = server.create(lab.text(30))
    chat = {"model": f"tiny:{name}", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    for headers, status in (({"Origin": "http://evil.example"}, 403), ({"Host": "evil.example"}, 421)):
        for path in ("/v1/contexts", f"/v1/contexts/{name}"):
            assert server.http.get(path, headers=headers).status_code == status
            assert server.http.delete(path, headers=headers).status_code == status
        assert server.http.post("/v1/contexts", json={"text": "a b c"}, headers=headers).status_code == status
        assert server.http.post("/v1/chat/completions", json=chat, headers=headers).status_code == status
        for named in ({"vllm_xargs": {"lkv_context": name}}, {"cache_salt": f"lkv_context:{name}"}):
            other = {"model": "tiny", "input": "a", "max_output_tokens": 2, **named}
            assert server.http.post("/v1/responses", json=other, headers=headers).status_code == status
            assert server.http.post("/v1/completions", json=other, headers=headers).status_code == status
        plain = {"model": "tiny", "prompt": "abc", "max_tokens": 2}
        assert server.http.post("/v1/completions", json=plain, headers=headers).status_code == 200
    own = {"Origin": str(server.http.base_url).rstrip("/")}
    assert server.http.post("/v1/chat/completions", json=chat, headers=own).status_code == 200
    assert "frame-ancestors 'none'" in server.http.get("/").headers["content-security-policy"]


def test_contexts_are_listed_described_and_deleted(server, lab):
    text = lab.text(31)
    name = server.create(text, name="second")
    about = server.http.get(f"/v1/contexts/{name}").json()
    context = lab.context(text)
    assert (about["tokens"], about["name"], about["method"]) == (context.tokens, "second", "lkv")
    assert about["realised_retention"] == pytest.approx(context.realised_retention(), abs=1e-6)
    assert name in [made["id"] for made in server.http.get("/v1/contexts").json()["data"]]
    assert server.http.post("/v1/contexts", json={"text": text}).status_code == 200
    file = server.http.post("/v1/contexts", files={"file": ("notes.txt", lab.text(32).encode())})
    assert file.json()["name"] == "notes.txt"
    server.create(lab.text(32))  # the same
    resident, nbytes = server.memory()
    assert nbytes >= about["bytes"] and resident >= 2
    metrics = server.http.get("/metrics").text
    assert "lkv_texts_waiting 0.0" in metrics and "vllm:num_requests_running" in metrics
    stored = list(lab.store.glob("*.json"))
    assert server.metrics()["lkv_contexts_stored"] == len(stored)
    assert server.metrics()["lkv_store_bytes"] == sum(file.stat().st_size for file in lab.store.iterdir())
    assert "/v1/contexts" in server.http.get("/").text  # the page
    assert server.http.delete(f"/v1/contexts/{name}").json()["deleted"] is True
    assert server.http.get(f"/v1/contexts/{name}").status_code == 404
    assert not (lab.store / f"{name}.kv").exists()
    assert server.memory() == (resident - 1, nbytes - about["bytes"])
    with pytest.raises(openai.NotFoundError, match="no context"):
        server.ask("what?", f"tiny:{name}")


def test_metrics_count_what_happened(server, lab):
    before = server.metrics()
    name = server.create(lab.text(44))
    for _ in range(3):
        server.ask("what?", f"tiny:{name}")
    server.http.post("/v1/chat/completions", json={"model": "tiny:none", "messages": []})
    server.client.completions.create(model="tiny", prompt="abc", max_tokens=2)  # without a context
    values = server.metrics()
    grown = {key: values[key] - before.get(key, 0.0) for key in values}
    expected = {
        'lkv_compressions_total{outcome="succeeded"}': 1, 'lkv_compressions_total{outcome="failed"}': 0,
        "lkv_compression_seconds_count": 1, 'lkv_context_requests_total{code="200"}': 3,
        'lkv_context_requests_total{code="404"}': 1, "lkv_context_queries_total": 3, "lkv_context_hits_total": 3,
        "lkv_contexts_resident": 1, "lkv_contexts_stored": 1,
    }  # fmt: skip
    assert {key: grown[key] for key in expected} == expected
    assert 0 < grown["lkv_compression_seconds_sum"] < 60


def test_every_error_has_the_form_of_openai(server):
    for method, path in (("DELETE", "/v1/contexts"), ("PUT", "/v1/contexts/a"), ("POST", "/v1/contexts/a")):
        answer = server.http.request(method, path, json={})
        assert answer.status_code == 405, answer.text
        message = answer.json()["error"]["message"]
        assert message.startswith(f"{method} {path}: Method Not Allowed; contexts take GET and POST at /v1/contexts")
    answer = server.http.get("/v1/nothing")
    assert answer.status_code == 404 and answer.json()["error"]["message"] == "GET /v1/nothing: Not Found."


def test_a_context_deleted_during_an_answer_lets_it_end(server, lab):
    text, before = lab.text(33), server.memory()
    name, want = server.create(text), expected(lab, lab.context(text), "what?", 200)
    messages = [{"role": "user", "content": "what?"}]
    stream = server.client.chat.completions.create(
        model=f"tiny:{name}", messages=messages, stream=True, max_tokens=200, temperature=0
    )
    parts = iter(stream)
    first = [next(parts) for _ in range(3)]
    assert server.http.delete(f"/v1/contexts/{name}").status_code == 200
    assert server.http.get(f"/v1/contexts/{name}").status_code == 404
    assert not (lab.store / f"{name}.kv").exists() and server.memory() == before
    assert squash("".join(x.choices[0].delta.content or "" for x in [*first, *parts] if x.choices)) == want


def test_a_context_that_a_worker_cannot_read_is_named(server, lab, tmp_path):
    """Its file was whole when it was checked, and is damaged when the worker reads it."""
    name, want = server.create(lab.text(45)), expected(lab, lab.context(lab.text(45)), "what?")
    assert server.ask("what?", f"tiny:{name}") == want
    files = [lab.store / f"{name}.{suffix}" for suffix in ("kv", "json")]
    for file in files:
        shutil.copy2(file, tmp_path)
    assert server.http.delete(f"/v1/contexts/{name}").status_code == 200  # also from the worker's memory
    for file in files:
        shutil.copy2(tmp_path / file.name, file)
    times, data = files[0].stat(), bytearray(files[0].read_bytes())
    data[-1] ^= 1
    files[0].write_bytes(data)
    os.utime(files[0], ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(openai.ConflictError, match="damaged"):
        server.ask("what?", f"tiny:{name}")
    shutil.copy2(tmp_path / files[0].name, files[0])
    assert server.ask("what?", f"tiny:{name}") == want


def test_texts_created_at_once_are_compressed_once(server, lab):
    def create(number):
        body = {"text": lab.text(34), "name": f"of client {number}"}
        return httpx.post(server.http.base_url.join("/v1/contexts"), json=body, headers=server.http.headers)

    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(create, range(6)))
    assert {answer.status_code for answer in made} <= {200, 202} and len({x.json()["id"] for x in made}) == 1
    name = server.create(lab.text(34))
    assert server.ask("what?", f"tiny:{name}") == expected(lab, lab.context(lab.text(34)), "what?")


@pytest.mark.parametrize(
    ("body", "status", "match"),
    [
        ({"model": "tiny:none"}, 404, "no context 'none'"),
        ({"model": "other:none"}, 404, "does not exist"),
        ({"model": "tiny:a", "context": "b"}, 400, "different contexts"),
        ({"model": "tiny:"}, 400, "'' is not an id"),
        ({"context": 3}, 400, "'3' is not an id"),
        ({"context": ["a"]}, 400, "is not an id"),
        ({"vllm_xargs": {"lkv_context": {}}}, 400, "is not an id"),
        ({"contxt": "a"}, 400, "'contxt' is not a field of a request; the field for a context is 'context', with"),
        ({"lkv_context": "a"}, 400, "the field for a context is 'context'"),
        ({"vllm_xargs": {"lkv_contxt": "a"}}, 400, "the key of vllm_xargs for a context is 'lkv_context'"),
        ({"vllm_xargs": {"lkv_document": "a"}}, 400, "'lkv_document' is not a field of a request"),
    ],
)
def test_errors_have_the_form_of_openai(server, body, status, match):
    request = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, **body}
    answer = server.http.post("/v1/chat/completions", json=request)
    assert answer.status_code == status and match in answer.json()["error"]["message"]


def test_bad_questions_and_texts_are_refused_and_the_engine_lives(server, lab):
    name = server.create(lab.text(35))
    for body, match in (
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user", "content": " "}]}, "question is empty"),
        ({"messages": [{"role": "user", "text": "a"}]}, "messages.0: content is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "other than text"),
        ({"messages": [{"role": "user", "content": "a" * 1100}]}, "maximum context length"),
        ({"messages": [{"role": "user", "content": "a" * 2**20}]}, "1,048,576 characters, too many for a model that"),
        ({"chat_template_kwargs": {"style": 1}}, "chat_template_kwargs takes enable_thinking alone"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs takes enable_thinking alone"),
        ({"add_generation_prompt": False}, "add_generation_prompt cannot be used with a context"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "this model has no chat template, which tools need",
        ),
    ):
        request = {"model": f"tiny:{name}", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, **body}
        answer = server.http.post("/v1/chat/completions", json=request)
        assert answer.status_code == 400 and match in answer.json()["error"]["message"], answer.text
    for body, match in (
        ({"text": "a b", "retain": 0.5}, "retain: there is no such field"),
        ({"text": " "}, "is empty"),
        ({"text": "a", "retention": 0.1}, "nothing of it would be kept"),
        ({"text": lab.text(1, 1500)}, "--max-model-len"),
        ({"text": "a" * 100_000}, "the text has 100,000 characters, too many for a model that reads at most 2048"),
        ({"text": lab.text(1), "retention": 3}, "retention"),
        ({}, 'text: this field is missing; send JSON such as {"text": "...", "memory": "10%"}, or a form with file='),
    ):
        answer = server.http.post("/v1/contexts", json=body)
        assert answer.status_code == 400 and match in answer.json()["error"]["message"], answer.text
    large = server.http.post("/v1/contexts", json={"text": "a" * 2**20})
    assert large.status_code == 413 and "larger than 1,048,576 bytes" in large.json()["error"]["message"]
    data = bytearray((lab.store / f"{name}.kv").read_bytes())
    data[-1] ^= 1
    (lab.store / f"{name}.kv").write_bytes(data)
    with pytest.raises(openai.ConflictError, match="damaged"):
        server.ask("what?", f"tiny:{name}")
    assert httpx.get(f"{str(server.http.base_url).rstrip('/')}/v1/contexts").status_code == 401
    # Without a context, too: this tokenizer has no template for vLLM's own chats.
    assert server.client.completions.create(model="tiny", prompt="abc", max_tokens=2).usage.completion_tokens > 0


def test_a_killed_engine_loses_no_context(server, lab):
    """The last test of this server: its engine process is killed, and another server finds the contexts.

    That one is then ended while it answers, by Ctrl-C, which all of its processes get, with two seconds for the
    answers: what takes less is answered, and what takes longer ends with a reason.
    """
    text = lab.text(36)
    name, want = server.create(text), expected(lab, lab.context(text), "what?")
    (engine,) = (child for child in psutil.Process(server.process.pid).children() if child.children())
    engine.send_signal(signal.SIGKILL)
    server.process.wait(60)
    with serving_lab(lab, "--grace", "2", length=2048) as other:
        assert other.ask("what?", f"tiny:{name}") == want
        assert other.http.post("/v1/contexts", json={"text": text}).status_code == 200
        assert other.metrics()["lkv_context_queries_total"] == 1 and other.metrics()["lkv_context_hits_total"] == 0
        endless = {"model": "tiny", "prompt": "abc", "max_tokens": 2000, "ignore_eos": True, "temperature": 1}
        endless["return_token_ids"] = True
        short = {**endless, "max_tokens": 8, "stream": True}
        children = psutil.Process(other.process.pid).children(recursive=True)
        assert any(child.children() for child in children)  # the engine, and its worker
        with (
            ThreadPoolExecutor(1) as pool,
            other.http.stream("POST", "/v1/completions", json={**endless, "stream": True}) as stream,
        ):
            whole = pool.submit(other.http.post, "/v1/completions", json=endless)
            lines = stream.iter_lines()
            next(lines)
            with other.http.stream("POST", "/v1/completions", json=short) as answered:
                rest = answered.iter_lines()
                next(rest)
                for process in (*children, other.process):
                    process.send_signal(signal.SIGINT)
                assert "data: [DONE]" in list(rest)
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            cut_off = [[whole.result().json()], events]
            other.process.wait(30)
    for parts in cut_off:
        # vLLM may abort it; on a busy machine it may have come to its end, with all its tokens.
        reasons = {choice["finish_reason"] for choice in parts[-1].get("choices", ())}
        tokens = sum(len(choice["token_ids"] or ()) for part in parts for choice in part.get("choices", ()))
        is_whole = reasons == {"length"} and tokens == endless["max_tokens"]
        assert reasons == {"abort"} or is_whole or "error" in parts[-1], (tokens, parts[-1])
