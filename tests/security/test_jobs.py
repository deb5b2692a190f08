"""Jobs: several servers on one store, names that come late, deletions, and what fails while a text is compressed."""

import asyncio
import threading

import pytest

from lkv.errors import BusyError, ContextPendingError, StoreError
from lkv.hf.spec import inspect_model
from lkv.serving import answer_queue
from lkv.serving import service as service_module
from lkv.serving.answer import SamplingParams
from lkv.serving.inputs import encode_text
from lkv.serving.jobs import ContextRegistry, Job
from lkv.serving.schemas import ContextRequest
from lkv.serving.stored_context import StoredContext
from tests.security.conftest import ready
from tests.serving.server import OTHER, TEXT, until


def refuse(*_, **__):
    raise PermissionError("another user's")


def fail_to_write(*_):
    raise StoreError("no space")


def test_a_context_that_becomes_ready_or_is_made_anew_is_listed_once(server, monkeypatch):
    service, plain = server.service, server.service.store.list_contexts
    name = server.compressed(TEXT)
    job = Job(name, "", service.compression, 0.0)

    def listed():
        return [one["id"] for one in server.ask("/v1/contexts")[1]["data"]].count(name)

    def list_before_the_end():
        stored = [context for context in plain() if context.id != name]
        service.registry._jobs.clear()
        return stored

    service.registry._jobs.append(job)
    assert listed() == 1
    monkeypatch.setattr(service.store, "list_contexts", list_before_the_end)
    assert listed() == 1


def test_a_job_that_ends_takes_no_other_of_its_id_with_it(make, monkeypatch):
    service = make()
    text = encode_text(service.tokenizer, 2048, TEXT, service.compression)
    first, second = (Job("a", "", service.compression, 0.0, text) for _ in range(2))
    service.registry._jobs.append(second)  # the first was deleted, and its text sent again, while it was written
    monkeypatch.setattr(service.store, "put", lambda stored, context: None)
    service._compress(first)
    assert service.registry.jobs() == [second]
    service._compress(second)
    assert service.registry.jobs() == []


def test_a_full_queue_and_a_stopping_one_refuse_a_text_for_different_reasons(make):
    service = make()
    registry = ContextRegistry(service.store, 2)
    for name in ("a", "b"):
        registry.submit(Job(name, "", service.compression, 0.0), refuse)
    with pytest.raises(BusyError, match="2 texts are waiting or being compressed, as many as are allowed; send this"):
        registry.submit(Job("c", "", service.compression, 0.0), refuse)
    registry.jobs()[0].error = "failed"  # failed jobs do not count
    registry.submit(Job("c", "", service.compression, 0.0), refuse)
    registry.close()
    with pytest.raises(BusyError, match="the server is stopping; send the text again"):
        registry.submit(Job("d", "", service.compression, 0.0), refuse)
    assert [job.id for job in registry.jobs()] == ["a", "b", "c"]


@pytest.mark.parametrize("is_written", [True, False])
def test_a_name_that_comes_while_a_context_is_stored_is_not_lost(make, monkeypatch, is_written):
    """Where it cannot be written, the context keeps the first name."""
    service = make()
    plain = service.store.put

    def put(*args):
        plain(*args)
        assert isinstance(service.add(ContextRequest(text=TEXT, name="second")), Job)

    monkeypatch.setattr(service.store, "put", put)
    if not is_written:
        monkeypatch.setattr(service.store, "_rewrite", fail_to_write)
    name = ready(service, "first")
    until(lambda: service.store.describe(name).name == ("second" if is_written else "first"))
    assert [stored.id for stored in service.store.list_contexts()] == [name]
    assert service.store.describe(name).model == inspect_model(service.model).digest()


def test_a_name_that_cannot_be_written_makes_no_context_anew(make, monkeypatch):
    service = make()
    name = ready(service, "old")
    service.registry._jobs.append(Job(name, "", service.compression, 0.0, error="no"))  # before it was stored

    monkeypatch.setattr(service.store, "_rewrite", fail_to_write)
    with pytest.raises(StoreError, match="no space"):
        service.add(ContextRequest(text=TEXT, name="new"))
    assert service.registry.jobs() == [] and service.context(name).tokens


def failed_job(service, monkeypatch):
    """The job of TEXT, which could not be compressed."""
    with monkeypatch.context() as patch:
        patch.setattr(service_module, "compress_ids", refuse)
        job = service.add(ContextRequest(text=TEXT))
        until(lambda: job.error)
    return job


def test_a_context_made_anew_keeps_its_name(make, tmp_path, monkeypatch):
    service = make()
    name = ready(service, "a name")
    (tmp_path / f"{name}.kv").write_bytes(b"damaged")
    service.store.release(name)
    failed_job(service, monkeypatch)
    (tmp_path / f"{name}.json").unlink()
    assert service.add(ContextRequest(text=TEXT)).title == "a name"
    until(lambda: not service.registry.jobs())
    assert service.store.describe(name).name == "a name"


def test_the_end_of_a_server_deletes_nothing_of_another(make, monkeypatch):
    first, second = make(), make()
    release, begun, plain = threading.Event(), threading.Event(), service_module.compress_ids

    def held(*args, **options):
        begun.set()
        context = plain(*args, **options | {"progress": None})
        release.wait(20)
        return context

    with monkeypatch.context() as patch:
        patch.setattr(service_module, "compress_ids", held)
        job = first.add(ContextRequest(text=TEXT))
        assert begun.wait(20)
    assert second.add(ContextRequest(text=TEXT)).id == job.id
    until(lambda: second.store.describe(job.id))
    stopping = threading.Thread(target=first.stop, args=(20,))
    stopping.start()
    until(lambda: first.registry.is_closed)
    release.set()
    stopping.join()
    assert second.store.describe(job.id) is not None


def test_a_failed_job_hides_no_context_that_another_server_stored(make, monkeypatch):
    first, second = make(), make()
    job = failed_job(first, monkeypatch)
    assert first.registry.find(job.id) is job and first.registry.list_contexts() == [job]
    with pytest.raises(ContextPendingError, match="could not be made"):
        first.context(job.id)
    second.add(ContextRequest(text=TEXT))
    until(lambda: second.store.describe(job.id))
    assert [stored.as_object()["status"] for stored in first.registry.list_contexts()] == ["ready"]
    assert first.context(job.id).tokens and first.registry.jobs() == []
    first.registry._jobs.append(job)
    assert isinstance(first.registry.find(job.id), StoredContext) and first.registry.jobs() == []
    first.registry._jobs.append(job)
    assert isinstance(first.add(ContextRequest(text=TEXT)), StoredContext) and first.registry.jobs() == []


def test_a_deletion_that_fails_leaves_the_worker_alive(make, monkeypatch):
    service = make()
    plain = service.store.put

    def put(stored, context):
        plain(stored, context)
        asyncio.run(service.delete(stored.id))
        monkeypatch.setattr(service.store, "delete", fail_to_write)

    monkeypatch.setattr(service.store, "put", put)
    service.add(ContextRequest(text=TEXT))
    until(lambda: not service.registry.jobs())
    monkeypatch.undo()
    job = service.add(ContextRequest(text=OTHER))
    until(lambda: service.store.describe(job.id))
    assert service.is_healthy


def test_passes_that_change_rotations_take_turns(make, monkeypatch):
    monkeypatch.setattr(answer_queue, "has_length_dependent_rope", lambda model: True)
    service = make()
    with service.answers.passes:
        job = service.add(ContextRequest(text=TEXT))
        answer = service.ask([{"role": "user", "content": "Who?"}], "", SamplingParams(max_tokens=3))
        assert not answer.done.wait(0.3) and service.registry.find(job.id) is job and job.progress == 0
    assert answer.done.wait(20) and answer.error is None
    until(lambda: not service.registry.jobs())
    assert service.context(job.id).tokens
