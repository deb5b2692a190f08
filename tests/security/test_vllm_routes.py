"""The routes inside vLLM's server, with fakes in the place of vLLM."""

import json
import time

import pytest
from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient

from lkv.errors import PromptError
from lkv.integrations.vllm import http
from lkv.integrations.vllm.http import ContextRoutes, split_name
from lkv.serving.jobs import Job
from lkv.serving.settings import ContextSettings
from tests.security.vllm_fakes import NAME, TURN, app_of, fail_to_write, start
from tests.serving.server import TEXT


@pytest.mark.parametrize("key", [None, "secret"])
@pytest.mark.parametrize("path", ["/invocations", "/generative_scoring", "/v1x"])
@pytest.mark.parametrize(
    "named",
    [
        {"cache_salt": f"lkv_context:{NAME}:"},
        {"vllm_xargs": {"lkv_context": NAME}},
        {"vllm_xargs": {"lkv_compress": 1}},
        {"context": NAME},
        {"model": f"m:{NAME}"},
    ],
)
def test_contexts_are_not_asked_where_vllm_asks_for_no_key(monkeypatch, key, path, named):
    """vLLM's own routes outside of /v1 answer without its key."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    routes, received = ContextRoutes(), []
    routes.models, app = ["m"], app_of(routes, key=key)

    @app.post(path)
    async def receive(request: Request):
        received.append(await request.json())

    client, body = TestClient(app), {"model": "m", "messages": [{"role": "user", "content": "lkv"}]}
    assert client.post(path, json=body).status_code == 200 and received.pop() == body
    # "lkv_" in other letters of JSON
    written = json.dumps(body | named).replace("lkv_", "lk\\u0076_")
    answer = client.post(path, content=written.encode())
    if key is not None:
        assert (answer.status_code, received) == (401, [])
    elif NAME in json.dumps(named):  # not a route that can use contexts
        says = f"{path} cannot use contexts; use /v1/chat/completions or /v1/completions."
        assert (answer.status_code, received, answer.json()["error"]["message"]) == (400, [], says)
    else:
        assert (answer.status_code, received) == (200, [body | named])


@pytest.mark.parametrize("path", ["/v1/contexts", "/api/v1/contexts"])
def test_pages_from_elsewhere_are_refused_below_a_root_path_too(path):
    app = app_of(ContextRoutes(), host="127.0.0.1")
    assert TestClient(app, "http://evil.example", root_path="/api").get(path).status_code == 421


@pytest.mark.parametrize(
    "body", [{"extra_body": {"context": "a"}}, {"vllm_xarg": {"lkv_context": "a"}}, {"extra_args": {"lkv_context": 1}}]
)
def test_a_context_in_a_field_that_vllm_ignores_is_refused(body):
    with pytest.raises(
        PromptError, match=f"'{next(iter(body))}' is not a field that names a context; put 'context' beside"
    ):
        split_name({"model": "tiny", "messages": [], "metadata": {"context": "a"}, **body}, ["tiny"])
    assert split_name({"model": "tiny", "metadata": {"context": "a"}}, ["tiny"]) is None


@pytest.mark.parametrize(("error", "says"), [(None, "is still being compressed; ask again"), ("too short.", "too sh")])
def test_a_context_that_is_being_compressed_cannot_be_asked_yet(routes, client, error, says):
    routes.registry._jobs.append(Job(NAME, "", None, 0.0, error=error))
    answer = client.post("/v1/chat/completions", json={"model": f"tiny:{NAME}", "messages": TURN})
    assert answer.status_code == 409 and says in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "options", [{"chat_template": "a.jinja"}, {"default_chat_template_kwargs": {"enable_thinking": False}}]
)
def test_templates_of_the_server_are_not_left_out_unnoticed(monkeypatch, options):
    routes = ContextRoutes()
    client = TestClient(app_of(routes))
    start(routes, monkeypatch, **options)
    for path, body in (("contexts", {"text": TEXT}), ("chat/completions", {"model": f"m:{NAME}", "messages": TURN})):
        answer = client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400
        assert "put the template into the tokenizer's files." in answer.json()["error"]["message"]


def test_bodies_without_end_are_not_kept(client, monkeypatch):
    monkeypatch.setattr(http, "_MAX_BODY", 5000)
    answer = client.post("/v1/chat/completions", content=b"x" * 5001)
    assert answer.status_code == 413 and "larger than 5,000 bytes" in answer.json()["error"]["message"]
    assert client.post("/v1/chat/completions", content=b"x" * 5000).status_code == 404  # no vLLM answers here


@pytest.mark.parametrize("place", [None, "vllm_xargs"])
def test_fields_that_are_too_many_or_too_long_to_be_compared_are_not(client, monkeypatch, place):
    compared, plain = [], http.get_close_matches
    monkeypatch.setattr(http, "get_close_matches", lambda word, *args: compared.append(word) or plain(word, *args))

    def ask(fields):
        return client.post("/v1/chat/completions", json=fields if place is None else {place: fields})

    answer = ask({f"field {number}": 1 for number in range(300)})
    assert answer.status_code == 400 and "300 fields, but at most 256" in answer.json()["error"]["message"]
    assert ask({"x" * 10**6: 1}).status_code == 404
    assert len(compared) < 3
    assert ask({"contexts": NAME}).status_code == 400


def test_a_model_is_described_as_openais_clients_retrieve_it(contexts, routes, store, client):
    name = store()
    assert client.get("/v1/models/tiny").json() == {"id": "tiny", "object": "model", "created": 0, "owned_by": "lkv"}
    found = client.get(f"/v1/models/tiny:{name}").json()
    assert (found["id"], found["created"]) == (f"tiny:{name}", int(contexts.store.describe(name).created))
    for unknown, said in (("other", "no model 'other'"), (f"other:{name}", "no model"), ("tiny:no", "no context 'no'")):
        answer = client.get(f"/v1/models/{unknown}")
        assert answer.status_code == 404 and said in answer.json()["error"]["message"]
    local = TestClient(app_of(routes, host="127.0.0.1"), "http://evil.example")
    assert local.get(f"/v1/models/tiny:{name}").status_code == 421


USAGE = {"prompt_tokens": 5, "total_tokens": 7, "completion_tokens": 2}


def counted(tokens, cached=0):
    """`USAGE` with a context."""
    total = {"prompt_tokens": 5 + tokens, "total_tokens": 7 + tokens, "completion_tokens": 2}
    return {**total, "prompt_tokens_details": {"cached_tokens": cached + tokens}}


def test_the_usage_counts_the_context_as_cached(routes, store, contexts):
    name = store()
    tokens = contexts.tokens(name)
    app = app_of(routes)
    chunks = [{"choices": [{"delta": {"content": 'say "usage"'}}]}, {"choices": [], "usage": USAGE}]

    @app.post("/v1/chat/completions")
    async def answer(request: Request):
        if not (await request.json()).get("stream"):
            return {"choices": ["\u00e9"], "usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 3}}}
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        return StreamingResponse(iter(events), media_type="text/event-stream")

    client, chat = TestClient(app), {"model": f"tiny:{name}", "messages": TURN}
    made = client.post("/v1/chat/completions", json=chat)
    assert made.json() == {"choices": ["\u00e9"], "usage": counted(tokens, 3)}
    assert int(made.headers["content-length"]) == len(made.content) and made.headers["lkv-context"] == name
    stream = client.post("/v1/chat/completions", json=chat | {"stream": True}).text.split("\n\n")
    expected = [chunks[0], {"choices": [], "usage": counted(tokens)}]
    assert [json.loads(event.removeprefix("data: ")) for event in stream[:2]] == expected
    assert stream[2:] == ["data: [DONE]", ""]
    plain = client.post("/v1/chat/completions", json={"model": "tiny", "messages": TURN}).json()
    assert plain["usage"]["prompt_tokens"] == 5


def test_a_context_that_is_lost_while_a_question_waits_is_named(routes, store, tmp_path):
    name, app = store(), app_of(routes)

    @app.post("/v1/chat/completions")
    async def answer(request: Request):
        if not (await request.json()).get("stop"):
            (tmp_path / f"{name}.kv").write_bytes(b"damaged")
        return JSONResponse({"error": {"message": "Internal server error"}}, 500)

    client, chat = TestClient(app), {"model": f"tiny:{name}", "messages": TURN}
    other = client.post("/v1/chat/completions", json=chat | {"stop": "x"})
    assert other.status_code == 500 and "Internal" in other.json()["error"]["message"]
    lost = client.post("/v1/chat/completions", json=chat)
    assert lost.status_code == 409 and "is not a saved context" in lost.json()["error"]["message"]
    assert routes.metrics.requests == {"200": 0, "500": 1, "409": 1}


def test_the_health_of_both_servers_has_one_path(routes, client):
    for routes.engine.failure, status in (("", 200), ("dead", 503)):
        assert {client.get(path).status_code for path in ("/health", "/healthz")} == {status}


def test_a_proxy_is_named_by_its_host_where_a_key_is_set(routes, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    routes.settings = ContextSettings(allowed_hosts=["lkv.example.com"])
    for key, host, status in (
        ("k", "lkv.example.com", 200),
        ("k", "evil.example", 421),
        (None, "lkv.example.com", 421),
    ):
        client = TestClient(app_of(routes, "127.0.0.1", key))
        assert client.get("/v1/contexts", headers={"Host": host}).status_code == status


def test_the_list_of_models_has_the_contexts(routes, store, monkeypatch):
    name, own = store(), {"id": "tiny", "object": "model", "owned_by": "vllm"}

    def list_models(host="0.0.0.0", status=200, **headers):
        app = app_of(routes, host)

        @app.get("/v1/models")
        async def models():
            return JSONResponse({"object": "list", "data": [own]} if status == 200 else {"error": "no"}, status)

        return TestClient(app).get("/v1/models", headers=headers).json()

    listed = list_models()["data"]
    assert listed[0] == own and [model["id"] for model in listed[1:]] == [f"tiny:{name}"]
    assert listed[1]["owned_by"] == "lkv" and abs(listed[1]["created"] - time.time()) < 60
    # Pages of other origins see no contexts, and what is refused stays as it is.
    assert list_models("127.0.0.1", Origin="http://evil.example")["data"] == [own]
    assert list_models(status=401) == {"error": "no"}
    monkeypatch.setattr(routes, "contexts", fail_to_write)
    assert list_models()["data"] == [own]
