"""The routes inside vLLM's server, with a fake engine."""

import asyncio
import json
import sys
import threading
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from lkv.context.compression import compress
from lkv.errors import StoreError
from lkv.integrations.vllm import http
from lkv.integrations.vllm.contexts import COMPRESS, VllmContexts
from lkv.integrations.vllm.http import ContextRoutes
from lkv.serving.inputs import CompressionSettings
from lkv.serving.jobs import ContextRegistry
from lkv.serving.settings import ContextSettings
from lkv.serving.stored_context import StoredContext
from tests.serving.server import TEXT

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


def create(client, text=TEXT, status=202, **fields):
    """The answer to a new text."""
    made = client.post("/v1/contexts", json={"text": text, **fields})
    assert made.status_code == status, made.text
    return made.json()


def delete(client, name, status=200):
    assert client.delete(f"/v1/contexts/{name}").status_code == status


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


def fail_to_write(*_):
    raise StoreError("no space.")
