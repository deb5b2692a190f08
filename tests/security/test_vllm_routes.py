"""The routes inside vLLM's server, with fakes in the place of vLLM."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from lkv.errors import BusyError
from lkv.integrations.vllm import http
from lkv.integrations.vllm.contexts import PluginSettings, VllmContexts
from lkv.integrations.vllm.http import ContextRoutes
from lkv.serving.schemas import ContextRequest
from lkv.serving.service import Job
from lkv.serving.store import CompressionSettings, ContextStore
from tests.serving.server import TEXT

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


def test_texts_that_are_not_compressed_are_not_kept(parts, tmp_path, monkeypatch):
    contexts = VllmContexts.__new__(VllmContexts)
    contexts.model, contexts.tokenizer = parts
    contexts.settings, contexts.policy, contexts.max_positions = PluginSettings(method="knorm"), None, 2048
    contexts.compression = CompressionSettings("knorm", 0.15, None, "", "")
    contexts.store, contexts._announced_texts = ContextStore(str(tmp_path), *parts, None, 0), {}
    routes = ContextRoutes()
    routes._length = 2048
    routes._jobs = {str(number): Job(str(number), "", "", None, 0.0) for number in range(http._MAX_JOBS)}
    monkeypatch.setattr(routes, "contexts", lambda: asyncio.sleep(0, contexts))
    for number in range(3):
        with pytest.raises(BusyError):
            asyncio.run(routes._create(ContextRequest(text=f"{TEXT} {number}")))
    assert contexts._announced_texts == {}
