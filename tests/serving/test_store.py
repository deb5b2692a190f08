"""The context store: files under the text's hash, least recently used ones let go, nothing half there."""

import errno
import json
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
import torch

from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.errors import ContextFileError, StoreError, UnknownContextError
from lkv.hf.spec import inspect_model
from lkv.policy.policy import Policy
from lkv.serving.inputs import CompressionSettings, context_id
from lkv.serving.store import ContextStore
from lkv.serving.stored_context import StoredContext
from lkv.utils import tensor_file
from tests.conftest import tiny_llama
from tests.context.test_compression import TEXT, Words
from tests.serving.server import unused_is_expired

SETTINGS = CompressionSettings("knorm", 0.4, None, "model", "tokenizer")


@pytest.fixture(scope="module")
def model():
    return tiny_llama(dtype=torch.float32)


def add(store, model, text, settings=SETTINGS, **options):
    context = compress(model, Words(), text, method=settings.method, retention=settings.retention, **options)
    name = context_id(text, settings)
    store.put(StoredContext.describe(name, text[:8], context, settings), context)
    return name, context


def made(place, model, policy=None, memory=10**9):
    return ContextStore(str(place), model, Words(), policy, memory)


@pytest.mark.parametrize("remote", [False, True])
def test_contexts_outlive_the_store(model, tmp_path, remote):
    place = f"memory://{tmp_path.name}" if remote else tmp_path / "deep" / "er"
    name, context = add(made(place, model), model, TEXT)
    other = made(place, model)
    assert other.resident() == {} and [entry.id for entry in other.list_contexts()] == [name]
    entry = other.describe(name)
    assert (entry.tokens, entry.nbytes, entry.full_nbytes) == (60, context.nbytes(), context.full_nbytes())
    assert other.get(name).ask("why ?", 9) == context.ask("why ?", 9) and set(other.resident()) == {name}
    assert other.delete(name) and not other.delete(name) and other.list_contexts() == []
    with pytest.raises(UnknownContextError, match="GET /v1/contexts lists all"):
        other.get(name)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("other", ["another text", "other settings", "no id of its own"])
def test_the_file_of_another_context_is_refused(model, tmp_path, remote, other):
    place = f"memory://swapped-{tmp_path.name}" if remote else str(tmp_path)
    store = made(place, model)
    name, context = add(store, model, TEXT)
    settings = SETTINGS._replace(retention=0.5) if other == "other settings" else SETTINGS
    other_name, other_context = add(store, model, TEXT if other == "other settings" else TEXT[::-1], settings)
    files, root = fsspec.core.url_to_fs(place)
    if other == "no id of its own":
        del other_context.metadata["stored_id"]
        other_context.save(tmp_path / "plain")
        files.put_file(str(tmp_path / "plain"), f"{root}/{other_name}.kv")
    for old, new in ((name, "x"), (other_name, name), ("x", other_name)):
        files.mv(f"{root}/{old}.kv", f"{root}/{new}.kv")
    swapped = made(place, model)
    with pytest.raises(ContextFileError, match=f"the file of the context '{name}' holds another context; compress its"):
        swapped.get(name)
    assert swapped.resident() == {}
    for old, new in ((name, "x"), (other_name, name), ("x", other_name)):
        files.mv(f"{root}/{old}.kv", f"{root}/{new}.kv")
    assert swapped.get(name).ask("why ?", 9) == context.ask("why ?", 9)
    files.rm(f"{root}/{other_name}.kv")
    assert [entry.id for entry in swapped.list_contexts()] == [name]


def test_what_another_process_deleted_is_not_answered(model, tmp_path):
    one, two = made(tmp_path, model), made(tmp_path, model)
    name, _ = add(one, model, TEXT)
    assert two.get(name).tokens == 60
    assert one.delete(name)
    with pytest.raises(UnknownContextError, match="GET /v1/contexts lists all"):
        two.get(name)
    assert two.resident() == {}


def test_names_tell_texts_and_settings_apart():
    changes = {"retention": 0.3, "policy": "p", "model": "m", "system": "s", "method": "tova", "tokenizer": "t"}
    different = [SETTINGS, *(SETTINGS._replace(**{name: value}) for name, value in changes.items())]
    assert len({context_id(text, settings) for text in ("a", "b") for settings in different}) == 14
    assert context_id("a", SETTINGS) == context_id("a", CompressionSettings(*SETTINGS))


def test_the_least_recently_used_leave_memory_alone(model, tmp_path):
    one = compress(model, Words(), TEXT, method="knorm", retention=0.4).nbytes()
    store = made(tmp_path, model, memory=int(2.5 * one))
    texts = [" ".join(f"{letter}{number}" for number in range(60)) for letter in "abc"]
    first, second = (add(store, model, text)[0] for text in texts[:2])
    before = weakref.ref(store.get(second))
    assert store.get(first) is store.get(first)
    third = add(store, model, texts[2])[0]
    assert set(store.resident()) == {first, third} and sum(store.resident().values()) <= 2.5 * one
    assert before() is None  # really let go
    assert (store.queries, store.hits) == (3, 3)
    answer = compress(model, Words(), texts[1], method="knorm", retention=0.4).ask("why ?", 6)
    assert store.get(second).ask("why ?", 6) == answer and set(store.resident()) == {third, second}
    assert len(store.list_contexts()) == 3 and (store.queries, store.hits) == (4, 3)
    assert store.usage() == (3, sum(file.stat().st_size for file in tmp_path.iterdir()))
    small = made(tmp_path, model, memory=1)  # a context larger than that is served all the same
    assert small.get(first).ask("why ?", 6) and set(small.resident()) == {first}


def test_a_context_that_answers_still_use_is_not_loaded_again(model, tmp_path):
    store = made(tmp_path, model, memory=1)  # for one context
    first, second = (add(store, model, f"{TEXT} {number}")[0] for number in range(2))
    used = store.get(first)
    assert store.get(second).tokens and store.get(first) is used
    assert (store.queries, store.hits) == (3, 1)
    store.get(second)
    assert set(store.resident()) == {first, second} and store.resident()[first] == used.nbytes()
    store.release(first)
    assert store.get(first) is not used  # made anew meanwhile, perhaps
    del used
    store.get(second)
    assert set(store.resident()) == {second}


@pytest.mark.parametrize("remote", [False, True])
def test_a_context_that_another_process_uses_does_not_expire(model, tmp_path, remote, monkeypatch):
    """Nor one that was used before a restart."""
    place = f"memory://{tmp_path.name}" if remote else tmp_path
    store = made(place, model)
    used, _ = add(store, model, TEXT)
    add(store, model, TEXT + " more")
    before = store.describe(used)
    with unused_is_expired(made(place, model), monkeypatch):
        assert made(place, model).get(used).tokens == 60
    assert store.list_contexts() == [before]


def test_a_context_is_used_though_that_cannot_be_recorded(model, tmp_path, monkeypatch):
    name, _ = add(made(tmp_path, model), model, TEXT)

    def refuse(*_):
        raise PermissionError("another user's")

    monkeypatch.setattr("os.utime", refuse)
    assert made(tmp_path, model).get(name).tokens == 60


def test_a_stored_context_takes_another_title(model, tmp_path):
    store = made(tmp_path, model)
    name, _ = add(store, model, TEXT)
    stored = store.describe(name)
    assert store.rename(stored, "") is stored and store.rename(stored, stored.name) is stored
    renamed = store.rename(stored, "another")
    assert made(tmp_path, model).describe(name) == renamed == stored.model_copy(update={"name": "another"})
    (tmp_path / f"{name}.kv").unlink()  # deleted by another process
    with pytest.raises(UnknownContextError):
        store.rename(renamed, "a third")
    assert store.describe(name) is None


def test_a_question_at_the_same_moment_undoes_no_rename(model, tmp_path, monkeypatch):
    store = made(f"memory://{tmp_path.name}", model)
    name, _ = add(store, model, TEXT)
    plain, stored = store.describe, store.describe(name)
    renaming = threading.Thread(target=store.rename, args=(stored, "another"))

    def describe(name):
        found = plain(name)
        renaming.start()
        renaming.join(0.5)  # it waits for the question's own change
        return found

    monkeypatch.setattr(store, "describe", describe)
    assert store.get(name).tokens == 60
    renaming.join()
    assert plain(name).name == "another"


def test_threads_that_want_one_context_load_it_once(model, tmp_path, monkeypatch):
    name, _ = add(made(tmp_path, model), model, TEXT)
    store, loads, plain = made(tmp_path, model), [], Context.load
    monkeypatch.setattr(Context, "load", lambda *words: loads.append(words) or plain(*words))
    with ThreadPoolExecutor(8) as pool:
        found = set(map(id, pool.map(store.get, [name] * 8)))
    assert len(loads) == 1 and len(found) == 1


def test_contexts_are_loaded_one_at_a_time(model, tmp_path, monkeypatch):
    """Else as many as there are threads would be in memory, beside those that count."""
    names = [add(made(tmp_path, model), model, f"{TEXT} {number}")[0] for number in range(4)]
    store, loading, most, plain = made(tmp_path, model, memory=0), [], [], Context.load

    def load(*args):
        loading.append(1)
        most.append(len(loading))
        time.sleep(0.05)
        loading.pop()
        return plain(*args)

    monkeypatch.setattr(Context, "load", load)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(store.get, names))
    assert most == [1] * 4


def test_a_context_of_another_model_or_policy_is_refused(tmp_path, model):
    name, _ = add(made(tmp_path, model), model, TEXT)
    other = tiny_llama(7, dtype=torch.float32)
    of_other = made(tmp_path, other)
    assert of_other.list_contexts() == []
    own, _ = add(of_other, other, TEXT[::-1])
    assert [stored.id for stored in of_other.list_contexts()] == [own] and of_other.usage()[0] == 2
    with pytest.raises(ContextFileError, match="was saved by a model with"):  # one that is asked for by its id
        of_other.get(name)
    policy = Policy(inspect_model(model)).requires_grad_(False)
    settings = CompressionSettings("lkv", 0.4, policy.digest(), "model", "tokenizer")
    name, _ = add(made(tmp_path, model, policy.digest()), model, TEXT, settings, policy=policy)
    assert made(tmp_path, model, policy.digest()).get(name).tokens == 60
    with pytest.raises(ContextFileError, match="under another policy than this one"):
        made(tmp_path, model, "0" * 64).get(name)


def test_a_full_disk_leaves_what_was_there(model, tmp_path, monkeypatch):
    store = made(tmp_path, model)
    name, context = add(store, model, TEXT)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lkv.utils.tensor_file._write_tensors", full)
    with pytest.raises(StoreError, match=r"cannot be written .*No space left on device.*free some space"):
        add(store, model, TEXT)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(StoreError, match="No space left"):
        add(store, model, TEXT + " more")
    assert [entry.id for entry in store.list_contexts()] == [name] and context.tokens == 60


def test_only_ids_reach_the_files(model, tmp_path):
    (tmp_path / "other.kv").write_bytes(b"x")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / ("a" * 32 + "-" + "b" * 16 + ".json")).write_text(json.dumps({"id": 1}))
    store = made(tmp_path, model)
    for name in ("other", "../other", "", "a" * 49, "/etc/passwd"):
        assert store.describe(name) is None and store.delete(name) is False
        with pytest.raises(UnknownContextError):
            store.get(name)
    assert store.list_contexts() == [] and (tmp_path / "other.kv").exists()


def test_a_place_that_cannot_be_used_is_named(model, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot be stored at"):
        made(tmp_path / "file" / "folder", model)


def test_what_is_listed_is_complete(model, tmp_path, monkeypatch):
    """Stopped between the two files, a context is not there, and can be made again."""
    store = made(tmp_path, model)
    plain = tensor_file.write

    def stops(*words):
        plain(*words)
        raise KeyboardInterrupt

    monkeypatch.setattr(tensor_file, "write", stops)
    with pytest.raises(KeyboardInterrupt):
        add(store, model, TEXT)
    monkeypatch.undo()
    assert made(tmp_path, model).list_contexts() == []
    name, _ = add(store, model, TEXT)
    assert [entry.id for entry in store.list_contexts()] == [name]
