"""The routes inside vLLM's server, with fakes in the place of vLLM."""

import asyncio
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from lkv.context.compression import compress
from lkv.errors import PolicyFileError, PolicyMismatchError, PromptError, StoreError
from lkv.integrations.vllm import http
from lkv.integrations.vllm.contexts import COMPRESS, Compression, VllmContexts
from lkv.integrations.vllm.http import ContextRoutes, split_name
from lkv.serving.inputs import CompressionSettings
from lkv.serving.jobs import ContextRegistry, Job
from lkv.serving.settings import ContextSettings
from lkv.serving.stored_context import StoredContext
from tests.serving.server import TEXT, until

NAME = f"{'a' * 32}-{'b' * 16}"
TURN = [{"role": "user", "content": "Who?"}]


class Engine:
    """Reads a text when `has_read` is set, and has an outcome when `is_done` is."""

    started = cancelled = 0
    has_read, is_done, failure = False, True, ""

    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))

    def __init__(self, store_context):
        self._store_context = store_context

    async def check_health(self):
        if self.failure:
            raise RuntimeError(self.failure)

    async def generate(self, prompt, params, request, **options):
        self.started, self.options = self.started + 1, options
        self.created = json.loads(params.extra_args[COMPRESS])["created"]
        try:
            while not self.has_read:
                await asyncio.sleep(0.01)
            yield
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def collective_rpc(self, method, args=()):
        if method == "lkv_outcome" and self.has_read and self.is_done and not self.failure:
            self._store_context(created=self.created)
        return [self.failure if self.is_done else None]


@pytest.fixture
def contexts(parts, tmp_path):
    """The contexts of a front end, in an empty store."""
    contexts = VllmContexts.__new__(VllmContexts)
    contexts.model, contexts.tokenizer = parts
    contexts.settings = ContextSettings(method="knorm", store=str(tmp_path))
    contexts.policy, contexts.max_positions = None, 2048
    contexts.compression = CompressionSettings("knorm", 0.15, None, "", "")
    contexts.store, contexts._checked_files, contexts._remembered_tokens = contexts.open_store(0), {}, {}
    contexts._checking, contexts.secret = threading.Lock(), "secret"
    return contexts


@pytest.fixture
def store(contexts, parts):
    """Store the context of TEXT, under a title; returns its id."""
    name, context = contexts.encode(TEXT, contexts.compression).id, compress(*parts, TEXT, method="knorm")

    def store(title="", created=None):
        contexts.store.put(StoredContext.describe(name, title, context, contexts.compression, created), context)
        return name

    return store


@pytest.fixture
def routes(contexts, store, monkeypatch):
    """The routes over `contexts` and an `Engine`."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    routes = ContextRoutes()
    routes.max_length, routes.engine, routes.models = 2048, Engine(store), ["tiny"]
    routes.registry = ContextRegistry(contexts.store, 256)
    monkeypatch.setattr(routes, "contexts", lambda: asyncio.sleep(0, contexts))
    return routes


def app_of(routes, host="0.0.0.0", key=None):
    """An application with the routes."""
    app = FastAPI()
    app.state.args = SimpleNamespace(host=host, allowed_origins=["*"], api_key=key and [key])
    routes.attach_router(app)
    return app


@pytest.fixture
def client(routes, monkeypatch):
    """A client of the routes."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with TestClient(app_of(routes)) as client:
        yield client


def fail_to_write(*_):
    raise StoreError("no space.")


def create(client, text=TEXT, status=202, **fields):
    """The answer to a new text."""
    made = client.post("/v1/contexts", json={"text": text, **fields})
    assert made.status_code == status, made.text
    return made.json()


def delete(client, name, status=200):
    assert client.delete(f"/v1/contexts/{name}").status_code == status


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


def test_the_deletion_of_a_failed_text_deletes_what_another_server_stored(contexts, routes, store, client):
    name = store()
    routes.registry._jobs.append(Job(name, "", contexts.compression, time.time(), error="failed."))
    delete(client, name)
    assert contexts.store.describe(name) is None


def test_a_full_store_gives_what_it_has(contexts, routes, store, client):
    store()
    contexts.store.max_bytes = 10
    create(client, status=200)
    full = create(client, f"{TEXT} again", status=507)
    assert "the store is full" in full["error"]["message"]
    assert routes.registry.jobs() == []


def test_a_file_is_checked_once_for_all_who_ask_about_it(contexts, store):
    name, opened, open_store = store(), [], contexts.open_store
    contexts.open_store = lambda memory: opened.append(memory) or open_store(memory)
    with ThreadPoolExecutor(8) as pool:
        assert {*pool.map(contexts.tokens, [name] * 8)} == {contexts.store.get(name).tokens} and len(opened) == 1


def test_a_request_that_was_just_checked_asks_the_store_no_more(contexts, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(contexts, "tokens", lambda name: 1)
    contexts.remember_tokens(NAME, 7)
    assert contexts.recent_tokens(NAME) == 7
    now[0] += 6
    assert contexts.recent_tokens(NAME) == 1
    contexts.remember_tokens("other", 3)
    assert [*contexts._remembered_tokens] == ["other"]


@pytest.mark.parametrize(("error", "says"), [(None, "is still being compressed; ask again"), ("too short.", "too sh")])
def test_a_context_that_is_being_compressed_cannot_be_asked_yet(routes, client, error, says):
    routes.registry._jobs.append(Job(NAME, "", None, 0.0, error=error))
    answer = client.post("/v1/chat/completions", json={"model": f"tiny:{NAME}", "messages": TURN})
    assert answer.status_code == 409 and says in answer.json()["error"]["message"]


@pytest.mark.parametrize("is_sent_again", [False, True])
def test_a_text_sent_again_while_its_deleted_context_is_made_keeps_it(contexts, routes, client, is_sent_again):
    routes.engine.is_done = False
    name = create(client)["id"]
    until(lambda: routes.engine.started)
    delete(client, name)
    if is_sent_again:
        create(client)
    routes.engine.has_read = routes.engine.is_done = True
    until(lambda: not routes._tasks)
    assert client.get(f"/v1/contexts/{name}").status_code == (200 if is_sent_again else 404)
    assert (contexts.store.describe(name) is not None) == is_sent_again


def test_a_deletion_that_fails_can_be_repeated(contexts, store, client):
    name = store()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contexts.store, "delete", fail_to_write)
        delete(client, name, 507)
        assert client.get(f"/v1/contexts/{name}").status_code == 200
    delete(client, name)
    delete(client, name, 404)


def start(routes, monkeypatch, engines=1, **options):
    """Have the routes take an engine and the options of vLLM's server, as vLLM does."""
    monkeypatch.setattr(http, "REGISTRY", CollectorRegistry())
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", SimpleNamespace(EngineDeadError=RuntimeError))
    model, parallel = SimpleNamespace(max_model_len=2048), SimpleNamespace(data_parallel_size=engines)
    engine = Engine(None)
    engine.shutdown = engine.input_processor = None
    engine.has_read = True
    engine.vllm_config = SimpleNamespace(additional_config={}, model_config=model, parallel_config=parallel)
    arguments = {"model": "m", "served_model_name": None, "chat_template": None, "default_chat_template_kwargs": None}
    asyncio.run(routes.init_state(engine, None, SimpleNamespace(**arguments | options)))
    return engine


@pytest.mark.parametrize(("engines", "expected"), [(1, {}), (2, {"data_parallel_rank": 0})])
def test_of_several_engines_the_first_reads_texts(contexts, routes, monkeypatch, engines, expected):
    """The outcome is that of the first one, whichever has fewer requests."""
    engine = start(routes, monkeypatch, engines)
    asyncio.run(routes._read(contexts.encode(TEXT, contexts.compression)))
    assert engine.options == expected


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


@pytest.mark.parametrize("error", [PolicyMismatchError, PolicyFileError])
def test_a_policy_that_does_not_fit_is_a_conflict(routes, client, monkeypatch, error):
    async def fail():
        raise error("there is no policy for this model yet; make one with `lkv fit`.")

    monkeypatch.setattr(routes, "contexts", fail)
    assert create(client, status=409)["error"]["type"] == "conflict_error"


def test_a_deleted_text_is_not_read_on(routes, client):
    name = create(client)["id"]
    until(lambda: routes.engine.started)
    delete(client, name)
    until(lambda: not routes._tasks)
    assert routes.engine.cancelled == 1 and routes._readings == {} and routes.registry._jobs == []


def test_deleted_texts_count_until_the_engine_is_done_with_them(routes, client, monkeypatch):
    monkeypatch.setattr(routes.registry, "_max_unfinished", 2)
    routes.engine.is_done = False
    for number in range(2):
        delete(client, create(client, f"{TEXT} {number}")["id"])
    create(client, status=429)
    routes.engine.is_done = True
    until(lambda: not routes._tasks)
    create(client)


def test_the_store_is_not_filled_beyond_its_limit_by_texts_that_wait(contexts, tmp_path):
    new_context = contexts.encode(TEXT, contexts.compression)
    compression = Compression(contexts, new_context)
    contexts.store.max_bytes = 10
    (tmp_path / "other.kv").write_bytes(b"x" * 100)
    with pytest.raises(StoreError, match="the store is full"):
        compression._store(new_context.ids)


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
