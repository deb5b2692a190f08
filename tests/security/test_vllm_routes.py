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
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from lkv.cli.serve import Serve
from lkv.context.compression import compress
from lkv.errors import BusyError, LkvError, PolicyFileError, PolicyMismatchError, StoreError
from lkv.integrations.vllm import command, context_middleware, http
from lkv.integrations.vllm.contexts import Compression, VllmContexts
from lkv.integrations.vllm.http import ContextRoutes
from lkv.serving.inputs import CompressionSettings
from lkv.serving.jobs import Job
from lkv.serving.schemas import ContextRequest
from lkv.serving.settings import ContextSettings
from lkv.serving.store import StoredContext
from tests.serving.server import TEXT, until

NAME = f"{'a' * 32}-{'b' * 16}"


@pytest.mark.parametrize("key", [None, "secret"])
@pytest.mark.parametrize("path", ["/invocations", "/generative_scoring", "/v1x"])
@pytest.mark.parametrize(
    "named",
    [
        {"cache_salt": f"lkv_context:{NAME}:"},
        {"vllm_xargs": {"lkv_context": NAME}},
        {"vllm_xargs": {"lkv_compress": 1}},
    ],
)
def test_contexts_are_not_asked_where_vllm_asks_for_no_key(monkeypatch, key, path, named):
    """vLLM's own routes outside of /v1 answer without its key."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    app, received = FastAPI(), []
    app.state.args = SimpleNamespace(host="0.0.0.0", allowed_origins=["*"], api_key=key and [key])

    @app.post(path)
    async def answer(request: Request):
        received.append(await request.json())

    ContextRoutes().attach_router(app)
    client, body = TestClient(app), {"model": "m", "messages": [{"role": "user", "content": "lkv"}]}
    assert client.post(path, json=body).status_code == 200 and received.pop() == body
    # "lkv_" in other letters of JSON
    written = json.dumps(body | named).replace("lkv_", "lk\\u0076_")
    status = client.post(path, content=written.encode()).status_code
    if key is not None:
        assert (status, received) == (401, [])
    elif NAME in json.dumps(named):  # not a route that can use contexts
        assert (status, received) == (400, [])
    else:
        assert (status, received) == (200, [body | named])


@pytest.mark.parametrize("path", ["/v1/contexts", "/api/v1/contexts"])
def test_pages_from_elsewhere_are_refused_below_a_root_path_too(path):
    app = FastAPI()
    app.state.args = SimpleNamespace(host="127.0.0.1", allowed_origins=["*"], api_key=None)
    routes = ContextRoutes()
    routes.attach_router(app)
    assert TestClient(app, "http://evil.example", root_path="/api").get(path).status_code == 421
    routes.is_stopping = True
    client = TestClient(app, "http://127.0.0.1", root_path="/api")
    assert client.get(path.replace("/v1/contexts", "/health")).status_code == 503


@pytest.fixture
def contexts(parts, tmp_path):
    """The contexts of a front end, in an empty store."""
    contexts = VllmContexts.__new__(VllmContexts)
    contexts.model, contexts.tokenizer = parts
    contexts.settings = ContextSettings(method="knorm", store=str(tmp_path))
    contexts.policy, contexts.max_positions = None, 2048
    contexts.compression = CompressionSettings("knorm", 0.15, None, "", "")
    contexts.store, contexts._announced_texts, contexts._checked_files = contexts.open_store(0), {}, {}
    contexts._checking, contexts._remembered_tokens = threading.Lock(), {}
    return contexts


@pytest.fixture
def routes(contexts, monkeypatch):
    """The routes over `contexts`."""
    routes = ContextRoutes()
    routes._length = 2048
    monkeypatch.setattr(routes, "contexts", lambda: asyncio.sleep(0, contexts))
    return routes


def test_texts_that_are_not_compressed_are_not_kept(contexts, routes):
    routes.queue._unfinished = {Job(str(number), "", None, 0.0) for number in range(http._MAX_TEXTS)}
    for number in range(3):
        with pytest.raises(BusyError):
            asyncio.run(routes.create(ContextRequest(text=f"{TEXT} {number}")))
    assert contexts._announced_texts == {}


def test_a_failed_job_hides_no_context_that_another_server_stored(contexts, routes, parts):
    name = contexts.encode(TEXT, contexts.compression).id
    context = compress(*parts, TEXT, method="knorm", retention=0.15)
    contexts.store.put(StoredContext.describe(name, "", context, contexts.compression), context)
    routes.queue._jobs[name] = Job(name, "", None, 0.0, error="no")
    assert isinstance(asyncio.run(routes.create(ContextRequest(text=TEXT))), StoredContext)
    assert routes.queue._jobs == {}


def test_a_full_store_gives_what_it_has(contexts, routes, client, parts):
    context = compress(*parts, TEXT, method="knorm", retention=0.15)
    contexts.store.put(
        StoredContext.describe(contexts.encode(TEXT, contexts.compression).id, "", context, contexts.compression),
        context,
    )
    contexts.store.max_bytes = 10
    assert client.post("/v1/contexts", json={"text": TEXT}).status_code == 200
    full = client.post("/v1/contexts", json={"text": f"{TEXT} again"})
    assert full.status_code == 507 and "the store is full" in full.json()["error"]["message"]
    assert routes.queue._jobs == {} and contexts._announced_texts == {}


def test_a_file_is_checked_once_for_all_who_ask_about_it(contexts, parts):
    context = compress(*parts, TEXT, method="knorm", retention=0.15)
    contexts.store.put(StoredContext.describe(NAME, "", context, contexts.compression), context)
    opened, open_store = [], contexts.open_store

    def count(memory):
        opened.append(memory)
        return open_store(memory)

    contexts.open_store = count
    with ThreadPoolExecutor(8) as pool:
        assert {*pool.map(contexts.tokens, [NAME] * 8)} == {context.tokens} and len(opened) == 1


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


def test_a_context_that_cannot_take_a_late_name_keeps_the_first(contexts, routes, parts, monkeypatch):
    new_context = contexts.encode(TEXT, contexts.compression)
    context = compress(*parts, TEXT, method="knorm", retention=0.15)
    contexts.store.put(StoredContext.describe(new_context.id, "first", context, contexts.compression), context)

    def fail(stored):
        raise StoreError("no")

    monkeypatch.setattr(contexts.store, "_rewrite", fail)
    monkeypatch.setattr(routes, "_read", lambda _: asyncio.sleep(0))
    routes._engine, job = SlowEngine(), Job(new_context.id, "second", None, 0.0)
    routes.queue._jobs[job.id] = job
    asyncio.run(routes._compress(contexts, new_context, job))
    assert job.error is None and routes.queue._jobs == {} and contexts.store.describe(job.id).name == "first"


def test_a_store_that_cannot_be_read_makes_no_context_anew(contexts, routes, monkeypatch):
    def fail(name):
        raise StoreError("no")

    monkeypatch.setattr(contexts.store, "describe", fail)
    with pytest.raises(StoreError):
        asyncio.run(routes.create(ContextRequest(text=TEXT)))
    assert routes.queue._jobs == {}


class SlowEngine:
    """Reads each text for ever, and says nothing of those that are cancelled until `is_done`."""

    started = cancelled = 0
    is_done = True

    async def generate(self, prompt, params, request):
        self.started += 1
        try:
            await asyncio.Event().wait()
            yield
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def collective_rpc(self, method, args):
        return ["" if self.is_done else None]


@pytest.fixture
def client(routes, monkeypatch):
    """A client of the routes over a `SlowEngine`."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    app, routes._engine = FastAPI(), SlowEngine()
    app.state.args = SimpleNamespace(host="0.0.0.0", allowed_origins=["*"], api_key=None)
    routes.attach_router(app)
    with TestClient(app) as client:
        yield client


def test_a_context_made_anew_keeps_its_name(contexts, routes, client, parts, tmp_path):
    name = contexts.encode(TEXT, contexts.compression).id
    context = compress(*parts, TEXT, method="knorm", retention=0.15)
    contexts.store.put(StoredContext.describe(name, "a name", context, contexts.compression), context)
    (tmp_path / f"{name}.kv").write_bytes(b"damaged")
    assert client.post("/v1/contexts", json={"text": TEXT}).json()["name"] == "a name"
    routes.queue._jobs[name].error = "no"
    (tmp_path / f"{name}.json").unlink()
    assert client.post("/v1/contexts", json={"text": TEXT}).json()["name"] == "a name"
    assert contexts._announced_texts[name].name == "a name"


def test_a_context_that_becomes_ready_is_listed(contexts, routes, client, monkeypatch):
    routes.queue._jobs[NAME] = Job(NAME, "", contexts.compression, 0.0)

    def list_before_the_end():
        routes.queue._jobs.pop(NAME)
        return []

    monkeypatch.setattr(contexts.store, "list_contexts", list_before_the_end)
    assert [one["id"] for one in client.get("/v1/contexts").json()["data"]] == [NAME]


def start(routes, monkeypatch, engines=1, **options):
    """Have the routes take an engine and the options of vLLM's server, as vLLM does."""
    monkeypatch.setattr(http, "REGISTRY", CollectorRegistry())
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", SimpleNamespace(EngineDeadError=RuntimeError))
    model, parallel = SimpleNamespace(max_model_len=2048), SimpleNamespace(data_parallel_size=engines)
    engine = SlowEngine()
    engine.shutdown = engine.input_processor = None
    engine.vllm_config = SimpleNamespace(additional_config={}, model_config=model, parallel_config=parallel)
    arguments = {"model": "m", "served_model_name": None, "chat_template": None, "default_chat_template_kwargs": None}
    asyncio.run(routes.init_state(engine, None, SimpleNamespace(**arguments | options)))


@pytest.mark.parametrize(("engines", "expected"), [(1, {}), (2, {"data_parallel_rank": 0})])
def test_of_several_engines_the_first_reads_texts(contexts, routes, monkeypatch, engines, expected):
    """The outcome is that of the first one, whichever has fewer requests."""
    found = []

    async def generate(prompt, params, request, **options):
        found.append(options)
        yield

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    start(routes, monkeypatch, engines)
    routes._engine.generate = generate
    asyncio.run(routes._read(contexts.encode(TEXT, contexts.compression)))
    assert found == [expected]


@pytest.mark.parametrize(
    "options", [{"chat_template": "a.jinja"}, {"default_chat_template_kwargs": {"enable_thinking": False}}]
)
def test_templates_of_the_server_are_not_left_out_unnoticed(monkeypatch, options):
    app, routes = FastAPI(), ContextRoutes()
    app.state.args = SimpleNamespace(host="0.0.0.0", allowed_origins=["*"], api_key=None)
    routes.attach_router(app)
    start(routes, monkeypatch, **options)
    client = TestClient(app)
    asked = {"model": f"m:{NAME}", "messages": [{"role": "user", "content": "Who?"}]}
    for path, body in (("contexts", {"text": TEXT}), ("chat/completions", asked)):
        answer = client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400
        assert "put the template into the tokenizer's files." in answer.json()["error"]["message"]


@pytest.mark.parametrize("error", [PolicyMismatchError, PolicyFileError])
def test_a_policy_that_does_not_fit_is_a_conflict(routes, client, monkeypatch, error):
    async def fail():
        raise error("there is no policy for this model yet; make one with `lkv fit`.")

    monkeypatch.setattr(routes, "contexts", fail)
    answer = client.post("/v1/contexts", json={"text": TEXT})
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "conflict_error")


def test_a_deleted_text_is_not_read_on(routes, client):
    name = client.post("/v1/contexts", json={"text": TEXT}).json()["id"]
    until(lambda: routes._engine.started)
    assert client.delete(f"/v1/contexts/{name}").status_code == 200
    until(lambda: not routes._tasks)
    assert routes._engine.cancelled == 1 and routes._readings == {} and routes.queue._jobs == {}


def test_deleted_texts_count_until_the_engine_is_done_with_them(routes, client, monkeypatch):
    monkeypatch.setattr(routes.queue, "_max_unfinished", 2)
    routes._engine.is_done = False
    for number in range(2):
        made = client.post("/v1/contexts", json={"text": f"{TEXT} {number}"})
        assert made.status_code == 202
        assert client.delete(f"/v1/contexts/{made.json()['id']}").status_code == 200
    assert client.post("/v1/contexts", json={"text": TEXT}).status_code == 429
    routes._engine.is_done = True
    until(lambda: not routes._tasks)
    assert client.post("/v1/contexts", json={"text": TEXT}).status_code == 202


def test_the_store_is_not_filled_beyond_its_limit_by_texts_that_wait(contexts, tmp_path):
    new_context = contexts.encode(TEXT, contexts.compression)
    compression = Compression(contexts, new_context)
    contexts.store.max_bytes = 10
    (tmp_path / "other.kv").write_bytes(b"x" * 100)
    with pytest.raises(StoreError, match="the store is full"):
        compression._store(new_context.ids)


def test_bodies_without_end_are_not_kept(client, monkeypatch):
    monkeypatch.setattr(context_middleware, "_MAX_BODY", 5000)
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


@pytest.mark.parametrize("model", [".", "{folder}/"])
def test_a_folder_is_served_under_its_own_name(model, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: True)
    monkeypatch.setattr(command, "require", lambda *_: None)
    monkeypatch.setattr(command, "_memory_option", lambda _: [])
    (folder := tmp_path / "tiny").mkdir()
    monkeypatch.chdir(folder)
    options = {name: field.default for name, field in Serve.model_fields.items()}
    arguments, _ = command.server_command(options | {"model": model.format(folder=folder)}, None)
    assert arguments[arguments.index("--served-model-name") + 1] == "tiny"


def test_arguments_with_an_open_quote_are_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: True)
    monkeypatch.setattr(command, "require", lambda *_: None)
    with pytest.raises(LkvError, match=r"--vllm-args cannot be split into words \(No closing quotation"):
        command.server_command({"vllm_args": "--chat-template 'a b"}, None)
