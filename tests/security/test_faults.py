"""Stores that fail, hang or lie, requests that are cancelled at any await, and files that nobody can read or delete."""

import asyncio
import json
import os
import stat
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from lkv.context.compression import compress
from lkv.errors import StoreError, UnknownContextError
from lkv.serving import service as service_module
from lkv.serving.answer import SamplingParams
from lkv.serving.app import make_app
from lkv.serving.store import ContextStore
from tests.conftest import tiny_llama
from tests.context.test_compression import Words
from tests.kills import STORED, put_context, run_and_kill, store_contexts, stored_answers
from tests.security.conftest import ready
from tests.serving.server import KNORM, OTHER, TEXT, serving, until, unused_is_expired

TURN = [{"role": "user", "content": "Who?"}]
LONG = 400  # tokens, which no answer has where its request is cancelled


class OddError(Exception):
    """As of a library behind fsspec."""


def fail(plain):
    raise OddError("no credentials")


def vanish(plain):
    raise FileNotFoundError("gone")


def run_out(plain):
    raise MemoryError


def hang(plain):
    time.sleep(0.05)
    return plain()


LIES = {
    "ls": [{"name": "x"}, {"name": f"y/{'a' * 32}-{'b' * 16}.json", "size": None}, {"size": 3}],
    "exists": True, "cat_file": b'{"id": 1}', "put_file": None, "rm_file": None, "get_file": None, "makedirs": None,
}  # fmt: skip


class Faulty:
    """A file system whose call number `at` goes wrong as `how` says; "lie" answers what is not so."""

    def __init__(self, files):
        self.files, self.at, self.how, self.calls = files, -1, None, 0

    def __getattr__(self, name):
        plain = getattr(self.files, name)

        def call(*args, **options):
            self.calls += 1
            if self.calls - 1 != self.at:
                return plain(*args, **options)
            return LIES[name] if self.how == "lie" else self.how(lambda: plain(*args, **options))

        return call


def everything(server, text):
    """All that a client does with a context; every answer is one, or an error in OpenAI's form."""

    def ask(path, *args, **options):
        status, content = server.ask(path, *args, **options)
        assert status < 400 or set(content["error"]) == {"message", "type", "param", "code"}, content
        return status, content

    status, made = ask("/v1/contexts", {"text": text})
    if status < 400:
        name = made["id"]
        with suppress(KeyError):
            until(lambda: ask(f"/v1/contexts/{name}")[1].get("status") != "compressing")
        server.service.store.release(name)  # so that it is read
        body = {"messages": TURN, "context": name, "max_tokens": 3}
        ask("/v1/chat/completions", body)
        ask("/v1/chat/completions", body)
        for path in ("/v1/contexts", "/v1/models"):
            ask(path)
        server.ask("/metrics")
        ask(f"/v1/contexts/{name}", method="DELETE")


@pytest.mark.slow
@pytest.mark.parametrize("how", [fail, vanish, run_out, hang, "lie"])
def test_a_store_that_goes_wrong_at_any_call(parts, tmp_path, monkeypatch, how):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with serving(*parts, f"memory://{tmp_path.name}") as server:
        store, right = server.service.store, compress(*parts, OTHER, **KNORM).ask("Who?", 8)
        faulty = store._files = Faulty(store._files)
        everything(server, TEXT)
        calls = faulty.calls
        assert calls > 15
        for at in range(calls):
            faulty.calls, faulty.at, faulty.how = 0, at, how
            everything(server, f"{TEXT} {at}")
            assert server.service.answers.open == 0 and not store._loading.locked()
            assert not os.listdir(tmp_path)
        faulty.at = -1
        name = server.compressed(OTHER)
        assert server.answer("Who?", name) == right and server.ask("/healthz") == (200, "ok\n")


def test_a_slow_store_delays_its_own_requests_alone(parts, tmp_path):
    with serving(*parts, f"memory://{tmp_path.name}") as server:
        name = server.compressed(TEXT)
        faulty = server.service.store._files = Faulty(server.service.store._files)
        release = threading.Event()
        faulty.at, faulty.how = 0, lambda plain: release.wait(30) and plain()
        waiting = threading.Thread(target=server.answer, args=("Who?", name))
        waiting.start()
        until(lambda: faulty.calls)
        began = time.monotonic()
        assert server.answer("Who?") and server.answer("Who?", name)
        assert server.ask("/healthz") == (200, "ok\n") and server.ask("/v1/models")[0] == 200
        assert time.monotonic() - began < 25  # less than the 30 s that the first one may wait
        release.set()
        waiting.join()


def test_what_nobody_foresaw_is_an_error_in_openais_form(server, monkeypatch):
    def explode():
        raise OddError("secret")

    monkeypatch.setattr(server.service.registry, "jobs", explode)
    assert server.problem("/v1/contexts") == (500, "the server failed to answer this request; send it again.")
    monkeypatch.undo()
    assert server.ask("/v1/contexts")[0] == 200


class CancelledAt:
    """Awaits a coroutine in whose await number `at` the task is cancelled."""

    def __init__(self, coroutine, at):
        self._coroutine, self._at, self.awaits = coroutine, at, 0

    def __await__(self):
        step = self._coroutine.send
        value = None
        while True:
            try:
                waited_for = step(value)
            except StopIteration as end:
                return end.value
            if self.awaits == self._at:
                asyncio.current_task().cancel()
            self.awaits += 1
            try:
                step, value = self._coroutine.send, (yield waited_for)
            except BaseException as error:
                step, value = self._coroutine.throw, error


def cancelled_call(app, path, body, place, at):
    """Call an ASGI application, cancelled at an await or a send; (whether cancelled, whether complete)."""
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")], "client": None, "server": None,
    }  # fmt: skip
    parts, sent, tasks = [body[: len(body) // 2], body[len(body) // 2 :]], [], []

    async def receive():
        await asyncio.sleep(0)
        if not parts:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message):
        sent.append(message)
        if place == "send" and len(sent) - 1 == at:
            tasks[0].cancel()
        await asyncio.sleep(0)

    async def main():
        tasks.append(asyncio.current_task())
        try:
            await CancelledAt(app(scope, receive, send), at if place == "await" else -1)
        except asyncio.CancelledError:
            return True
        return False

    was_cancelled = asyncio.run(main())
    return was_cancelled, bool(sent) and (b"stream" not in body or not sent[-1].get("more_body", True))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/v1/chat/completions", {"messages": TURN, "max_tokens": LONG}, marks=pytest.mark.slow),
        ("/v1/chat/completions", {"messages": TURN, "max_tokens": LONG, "stream": True}),
        ("/v1/contexts", {"text": TEXT}),
    ],
)
def test_a_request_that_is_cancelled_at_any_await(make, parts, monkeypatch, path, body):
    monkeypatch.setattr(parts[0].generation_config, "eos_token_id", None)
    service = make()
    app, body = make_app(service), json.dumps(body).encode()
    cancelled = 0
    for place in ("await", "send"):
        for at in range(12):
            before = service.answers.tokens
            was_cancelled, is_complete = cancelled_call(app, path, body, place, at)
            cancelled += was_cancelled
            until(lambda: service.answers.open == 0, 10)
            assert is_complete or service.answers.tokens - before < LONG
            if not was_cancelled:  # it ended before: so it does wherever it would be cancelled later
                break
    assert cancelled > 3
    until(lambda: not service.registry.jobs())
    assert service.is_healthy and not service.answers._waiting
    assert service.ask(TURN, "", SamplingParams(max_tokens=3)).done.wait(20)


@pytest.mark.slow
def test_two_processes_on_one_store(tmp_path):
    right, model, found = stored_answers(), tiny_llama(), 0
    store = ContextStore(str(tmp_path), model, Words(), None, 0)
    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(run_and_kill, store_contexts, tmp_path, 3.0, lambda f: any(f.iterdir())) for _ in "ab"]
        while not all(writer.done() for writer in writers):
            for name in right:
                with suppress(UnknownContextError):  # deleted by one of them
                    assert store.get(name).ask("what ?", 3) == right[name]
                    found += 1
    assert found and all(writer.result() for writer in writers)
    assert {stored.id for stored in store.list_contexts()} <= right.keys()


def test_expired_contexts_and_leftovers_are_deleted(tmp_path, monkeypatch):
    store = ContextStore(str(tmp_path), tiny_llama(), Words(), None, 10**9)
    first, second = (put_context(store, tiny_llama(), text) for text in STORED[:2])
    for name in (f".{'0' * 16}.tmp", f"{'a' * 32}-{'b' * 16}.kv", "other.kv", "other.txt"):
        (tmp_path / name).write_bytes(b"x")
    store.expire(None)
    assert len(os.listdir(tmp_path)) == 8
    for file in tmp_path.iterdir():
        os.utime(file, (1, 1))
    store.expire(3600)
    kept = {f"{first}.kv", f"{first}.json", f"{second}.kv", f"{second}.json", "other.kv", "other.txt"}
    assert set(os.listdir(tmp_path)) == kept
    with unused_is_expired(store, monkeypatch):
        store.get(first)
    assert [stored.id for stored in store.list_contexts()] == [first]
    assert stat.S_IMODE((tmp_path / f"{first}.kv").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / f"{first}.json").stat().st_mode) == 0o600


def refuse(*_, **__):
    raise PermissionError("another user's")


def test_one_description_that_cannot_be_read_breaks_no_listing(make, tmp_path, monkeypatch):
    service = make()
    name = ready(service)
    folder, link, pipe, foreign = (f"{letter * 32}-{'0' * 16}.json" for letter in "abcd")
    (tmp_path / folder).mkdir()
    (tmp_path / link).symlink_to(link)
    os.mkfifo(tmp_path / pipe)
    (tmp_path / foreign).write_text("{}")
    plain = service.store._files.cat_file
    monkeypatch.setattr(
        service.store._files, "cat_file", lambda path, **range_: refuse() if foreign in path else plain(path, **range_)
    )
    assert [stored.id for stored in service.store.list_contexts()] == [name] and list(service.collect())
    service.store._last_asked.clear()
    time.sleep(0.01)
    service.store.expire(0.001)
    assert sorted(os.listdir(tmp_path)) == sorted([folder, link, pipe, foreign])


def test_one_file_that_cannot_be_deleted_keeps_no_other(tmp_path, monkeypatch):
    store, names = ContextStore(str(tmp_path), tiny_llama(), Words(), None, 0), [f".{at:016}.tmp" for at in range(4)]
    for name in names:
        (tmp_path / name).write_text("")
    (tmp_path / ".folder.tmp").mkdir()
    for file in tmp_path.iterdir():
        os.utime(file, (1, 1))
    plain = store._files.rm_file
    monkeypatch.setattr(store._files, "rm_file", lambda path: refuse() if names[1] in path else plain(path))
    with pytest.raises(StoreError, match="another user's"):
        store.expire(None)
    assert sorted(os.listdir(tmp_path)) == [names[1], ".folder.tmp"]


def test_times_in_words_and_a_failing_expiry_leave_the_worker_alive(make, monkeypatch):
    monkeypatch.setattr(service_module, "_EXPIRY_SECONDS", 0.01)
    service = make()
    listed = [{"name": ".0.tmp", "mtime": "yesterday"}, {"name": ".1.tmp", "mtime": None, "created": []}]
    monkeypatch.setattr(service.store._files, "ls", lambda *_, **__: listed)
    service.store.expire(None)
    tries = []
    monkeypatch.setattr(service.store, "expire", lambda seconds: tries.append(1) or 1 / 0)
    until(lambda: len(tries) > 3)
    assert service.is_healthy
