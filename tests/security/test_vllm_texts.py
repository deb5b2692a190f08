"""Texts that vLLM's server compresses and stores, with fakes in the place of vLLM."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lkv.errors import PolicyFileError, PolicyMismatchError, StoreError
from lkv.integrations.vllm.contexts import Compression
from lkv.serving.jobs import Job
from tests.security.vllm_fakes import NAME, create, delete, fail_to_write, start
from tests.serving.server import TEXT, until


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


@pytest.mark.parametrize(("engines", "expected"), [(1, {}), (2, {"data_parallel_rank": 0})])
def test_of_several_engines_the_first_reads_texts(contexts, routes, monkeypatch, engines, expected):
    """The outcome is that of the first one, whichever has fewer requests."""
    engine = start(routes, monkeypatch, engines)
    asyncio.run(routes._read(contexts.encode(TEXT, contexts.compression)))
    assert engine.options == expected


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
