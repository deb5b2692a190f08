"""Requests and files made to break a server: each is refused, and the next request is answered."""

import json
import socket
import threading

import pytest

from lkv.cache.layer import RaggedLayer
from lkv.errors import BusyError, PromptError, StoreError, UnknownContextError
from lkv.serving import inputs
from lkv.serving.answer import SamplingParams
from lkv.serving.inputs import context_id
from lkv.serving.schemas import ContextRequest
from lkv.serving.stored_context import StoredContext
from tests.security.conftest import ready
from tests.serving.server import OTHER, TEXT, serving

TURN = [{"role": "user", "content": "Who?"}]


def test_a_dead_engine_is_not_healthy(server, monkeypatch):
    monkeypatch.setattr(type(server.service.answers), "is_alive", False)
    assert server.ask("/healthz")[0] == 503


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"stop": "a" * 200_000}, "stop"), ({"stop": ["a" * 201]}, "stop"), ({"context": "c" * 10**5}, "context"),
        ({"model": "m" * 10**5}, "model"), ({"messages": [1] * 50_000}, "messages"),
        ({"messages": TURN * 1001}, "messages"),
        ({"messages": [{"role": "a" * 99, "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [1] * 50_000}]}, "messages.0.content"),
        ({"temperature": float("nan")}, "temperature"), ({"max_tokens": 10**40}, "max_tokens"),
        ({"messages": [{"role": "\ud800", "content": "x"}]}, "the body"), ({"seed": 2**63}, "seed"),
    ],
)  # fmt: skip
def test_bodies_beyond_every_limit_get_one_sentence(server, body, says):
    status, message = server.problem("/v1/chat/completions", {"messages": TURN, **body})
    assert status == 400 and message.startswith(says) and len(message) < 300


def test_long_questions_are_refused_before_they_are_tokenised(server, monkeypatch):
    monkeypatch.setattr(inputs, "encode", lambda *_: pytest.fail("tokenised"))
    monkeypatch.setattr(inputs, "render_messages", lambda *_: pytest.fail("rendered"))
    status, message = server.chat("x" * 2**17)
    assert status == 400 and "the conversation has 131,072 characters" in message["error"]["message"]
    monkeypatch.setattr(inputs, "encode_context", lambda *_: pytest.fail("tokenised"))
    status, message = server.problem("/v1/contexts", {"text": "x" * 2**17})
    assert status == 400 and "the text has 131,072 characters" in message


@pytest.mark.parametrize("host", ["[", "[::1", "]", "a b"])
def test_hosts_that_are_none(server, host):
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"GET /healthz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert client.recv(100).startswith(b"HTTP/1.1 421")
    assert server.problem("/healthz", Origin="http://[")[0] == 403


def test_a_key_beyond_ascii(parts, tmp_path):
    with serving(*parts, tmp_path, key="schlüssel") as server:
        for sent, status in (("Bearer schlüssel", 200), ("Bearer schlussel", 401)):
            assert server.ask("/v1/models", Authorization=sent.encode())[0] == status


def test_clients_learn_nothing_of_files(parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.txt").write_text("secret")
    with serving(*parts, tmp_path / "store") as server:
        assert server.compressed("secret.txt", retention=1.0)  # not refused as the name of a file
        name = server.compressed(TEXT)
        path = tmp_path / "store" / f"{name}.kv"
        path.write_bytes(path.read_bytes()[:-50])
        server.service.store.release(name)
        status, content = server.chat("Who?", name)
        assert status == 409 and str(tmp_path) not in content["error"]["message"]


def test_unknown_ids_keep_no_memory(make):
    service = make()
    for name in ("x" * 10_000, "a" * 32 + "-" + "b" * 16):
        with pytest.raises(UnknownContextError) as error:
            service.context(name)
        assert len(str(error.value)) < 200
    assert service.store._last_asked == {} and not service.store._loading.locked()


def test_a_request_beyond_those_allowed_loads_no_context(make, parts, monkeypatch):
    monkeypatch.setattr(parts[0].generation_config, "eos_token_id", None)
    service = make(max_requests=1)
    name = ready(service)
    service.store.release(name)
    answer = service.ask(TURN, "", SamplingParams(max_tokens=1000))
    with monkeypatch.context() as patch:
        patch.setattr(service.store, "_load", lambda _: pytest.fail("loaded"))
        with pytest.raises(BusyError, match="1 requests are open"):
            service.ask(TURN, name, SamplingParams(max_tokens=3))
    service.answers.cancel(answer)
    assert service.ask(TURN, name, SamplingParams(max_tokens=3)).done.wait(20)


def test_one_bad_description_breaks_no_listing(make, tmp_path):
    service, bad = make(), f"{'a' * 32}-{'b' * 16}"
    name = ready(service)
    good = json.loads((tmp_path / f"{name}.json").read_text()) | {"id": bad}
    texts = ['{"id": 1}', "null", "[" * 100_000, '"\\ud800"', "{", '{"created": NaN}', '{"created": 1e999}']
    texts += [
        json.dumps(good | change) for change in ({"created": "now"}, {"id": "other"}, {"name": 3}, {"tokens": None})
    ]
    for text in texts:
        (tmp_path / f"{bad}.json").write_text(text)
        assert [stored.id for stored in service.store.list_contexts()] == [name]
        assert service.store.describe(bad) is None and list(service.collect())
    (tmp_path / f"{bad}.json").write_text(json.dumps(good))
    assert service.store.describe(bad) is not None


def test_a_store_without_a_folder_is_empty_and_a_full_one_refuses(make, tmp_path):
    service = make("store", max_store=100 / 2**20)
    (tmp_path / "store").rmdir()
    assert service.store.list_contexts() == [] and service.store.usage() == (0, 0)
    ready(service)
    with pytest.raises(StoreError, match=r"the store is full .100 bytes.; delete contexts first"):
        service.add(ContextRequest(text=OTHER))
    assert isinstance(service.add(ContextRequest(text=TEXT)), StoredContext)


def test_what_the_store_raises_is_one_sentence(parts, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ArithmeticError("no credentials")  # as a library behind fsspec may raise anything

    with serving(*parts, tmp_path) as server:
        name = server.compressed(TEXT)
        for attribute in ("exists", "ls", "cat_file", "rm_file"):
            monkeypatch.setattr(server.service.store._files, attribute, fail)
        for path, method in (("", "GET"), (f"/{name}", "GET"), (f"/{name}", "DELETE")):
            status, message = server.problem(f"/v1/contexts{path}", method=method)
            assert status == 507 and "no credentials" in message
        status, metrics = server.ask("/metrics")
        assert status == 200 and "\nlkv_healthy 1.0\n" in metrics and "lkv_contexts_stored" not in metrics


def test_a_context_that_does_not_fit_into_memory_is_no_damaged_one(parts, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    with serving(*parts, tmp_path) as server:
        name = server.compressed(TEXT)
        server.service.store.release(name)
        with monkeypatch.context() as patch:
            patch.setattr(RaggedLayer, "restore", fail)
            status, content = server.chat("Who?", name)
        assert status == 507 and f"{name} does not fit into free memory" in content["error"]["message"]
        assert server.chat("Who?", name)[0] == 200


def test_metrics_read_no_descriptions(make, monkeypatch):
    service = make()
    ready(service)
    monkeypatch.setattr(service.store, "describe", lambda _: pytest.fail("read"))
    stored, *_ = (metric for metric in service.collect() if metric.name == "lkv_contexts_stored")
    assert stored.samples[0].value == 1


def test_no_lock_is_held_while_the_store_is_read(make, monkeypatch):
    service, reading, release = make(), threading.Event(), threading.Event()

    def describe(name):
        reading.set()
        release.wait(20)

    monkeypatch.setattr(service.store, "describe", describe)
    adding = threading.Thread(target=service.add, args=(ContextRequest(text=TEXT),))
    adding.start()
    assert reading.wait(20)
    asking = threading.Thread(target=service.registry.jobs, daemon=True)
    asking.start()
    asking.join(5)
    assert not asking.is_alive()
    release.set()
    adding.join()


def test_ids_do_not_depend_on_the_server(make):
    service = make()
    assert context_id(TEXT, service.compression) == make().add(ContextRequest(text=TEXT)).id
    with pytest.raises(PromptError, match="the text is empty"):
        service.add(ContextRequest(text=" "))


def test_the_key_is_checked_before_a_body_is_read(parts, tmp_path):
    with (
        serving(*parts, tmp_path, key="secret") as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as client,
    ):
        client.sendall(b"POST /v1/contexts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 401")
