"""The routes of contexts in vLLM's server, without a server: which fields name a context, and contexts being made."""

import asyncio
from importlib import import_module
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from lkv.errors import ContextPendingError, PromptError, StoreError
from lkv.integrations.vllm.contexts import NewContext
from lkv.integrations.vllm.http import ContextRoutes
from lkv.serving.inputs import CompressionSettings
from lkv.serving.jobs import Job
from lkv.serving.schemas import error_response
from lkv.serving.store import unknown_context


@pytest.mark.parametrize(
    "body", [{"extra_body": {"context": "a"}}, {"vllm_xarg": {"lkv_context": "a"}}, {"extra_args": {"lkv_context": 1}}]
)
def test_a_context_in_a_field_that_vllm_ignores_is_refused(body):
    with pytest.raises(
        PromptError, match=f"'{next(iter(body))}' is no field that names a context; put 'context' beside"
    ):
        ContextRoutes().split_name({"model": "tiny", "messages": [], "metadata": {"context": "a"}, **body})
    assert ContextRoutes().split_name({"model": "tiny", "metadata": {"context": "a"}}) is None


@pytest.mark.parametrize("schema", ["chat_completion:ChatCompletionRequest", "completion:CompletionRequest"])
def test_no_field_of_vllm_resembles_the_field_of_a_context(schema):
    module, _, name = schema.partition(":")
    fields = getattr(import_module(f"vllm.entrypoints.openai.{module}.protocol"), name).model_fields
    ContextRoutes().split_name(dict.fromkeys(fields))


class Store:
    """A store of names alone, which fails when `problem` is set."""

    def __init__(self):
        self.names, self.problem = set(), None

    def describe(self, name):
        return SimpleNamespace(name="", as_object=lambda: {"id": name}) if name in self.names else None

    def rename(self, stored, title):
        return stored

    def check_quota(self):
        """There is space."""

    def delete(self, name):
        if self.problem is not None:
            raise self.problem
        self.names.discard(name)


class Engine:
    """Compresses a text when `release` is called, or cannot where `failure` is set."""

    def __init__(self, store):
        self.failure, self._store, self._finished = "", store, asyncio.Event()

    async def generate(self, prompt, params, request):
        yield None

    async def collective_rpc(self, method, args):
        if method == "lkv_outcome":
            await self._finished.wait()
            if not self.failure:
                self._store.names.add(args[0])
        return [self.failure]

    def release(self):
        self._finished.set()


@pytest.fixture
def routes():
    """The routes over a store and an engine of names, and a client of theirs."""
    routes, store = ContextRoutes(), Store()
    routes._engine, routes._length = Engine(store), 100

    def tokens(name):
        if store.describe(name) is None:
            raise unknown_context(name)
        return 2

    contexts = SimpleNamespace(
        store=store, max_positions=100, compression=CompressionSettings("lkv", 0.5, None, "", ""),
        announce=lambda _: None, tokens=tokens,
        encode=lambda *_: NewContext(id="a", retention=0.5, sha256="", ids=[1, 2]),
    )  # fmt: skip

    async def find():
        return contexts

    routes.contexts, app = find, FastAPI()
    app.state.args = SimpleNamespace(host=None, allowed_origins=["*"], api_key=None)
    routes.attach_router(app)
    routes.store = store
    routes.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
    return routes


async def settle(routes):
    while routes._tasks:
        await asyncio.gather(*routes._tasks)


@pytest.mark.parametrize("is_sent_again", [False, True])
def test_a_text_sent_again_while_its_deleted_context_is_made_keeps_it(routes, is_sent_again):
    async def run():
        assert (await routes.client.post("/v1/contexts", json={"text": "a"})).status_code == 202
        assert (await routes.client.delete("/v1/contexts/a")).status_code == 200
        if is_sent_again:
            assert (await routes.client.post("/v1/contexts", json={"text": "a"})).status_code == 202
        routes._engine.release()
        await settle(routes)
        return (await routes.client.get("/v1/contexts/a")).status_code

    assert asyncio.run(run()) == (200 if is_sent_again else 404)
    assert routes.store.names == ({"a"} if is_sent_again else set())


@pytest.mark.parametrize("failure", ["", "the disk is full."])
def test_a_context_deleted_in_use_and_made_again_goes_only_where_that_fails(routes, failure):
    routes.store.names.add("a")
    routes._engine.failure = failure

    async def run():
        async with routes.using("a"):
            assert (await routes.client.delete("/v1/contexts/a")).json()["deleted"]
            assert routes.store.names == {"a"}
            assert (await routes.client.post("/v1/contexts", json={"text": "a"})).status_code == 202
        assert routes.store.names == {"a"}
        routes._engine.release()
        await settle(routes)
        return (await routes.client.get("/v1/contexts/a")).json()

    answer = asyncio.run(run())
    assert (routes.store.names, answer.get("error")) == (({"a"}, None) if not failure else (set(), failure))


def test_a_deletion_that_fails_can_be_repeated(routes):
    routes.store.names.add("a")

    async def run():
        routes.store.problem = StoreError("the store cannot be reached.")
        assert (await routes.client.delete("/v1/contexts/a")).status_code == 507
        assert (await routes.client.get("/v1/contexts/a")).status_code == 200
        routes.store.problem = None
        assert (await routes.client.delete("/v1/contexts/a")).status_code == 200
        assert (await routes.client.delete("/v1/contexts/a")).status_code == 404

    asyncio.run(run())
    assert not routes.store.names


def test_the_deletion_of_a_failed_text_deletes_what_another_server_stored(routes):
    routes.queue._jobs["a"] = Job("a", "", CompressionSettings("lkv", 0.5, None, "", ""), 0.0, error="failed.")
    routes.store.names.add("a")
    assert asyncio.run(routes.client.delete("/v1/contexts/a")).json()["deleted"]
    assert not routes.store.names


def test_a_context_that_is_being_compressed_cannot_be_asked_yet():
    job, routes = Job("a", "", None, 0.0), ContextRoutes()
    routes.queue._jobs["a"] = job
    routes.contexts = lambda: asyncio.sleep(0, SimpleNamespace(store=Store()))
    for error, says in (
        (None, "is still being compressed; ask again"),
        ("too short.", "could not be made: too short."),
    ):
        job.error = error
        with pytest.raises(ContextPendingError, match=says) as raised:
            asyncio.run(routes.rewrite("/v1/chat/completions", {}, "a"))
        assert error_response(raised.value).status_code == 409
