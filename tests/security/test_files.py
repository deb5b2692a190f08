"""Files that were changed, hold numbers that no model has, or fill the memory of their reader."""

import gzip
import json
import math
import os
import zipfile
import zlib
from contextlib import nullcontext

import pytest
import torch
from filelock import FileLock

from lkv.errors import DataError, ModelLoadError, TrainingError
from lkv.evaluation.longbench import _read_rows
from lkv.hf import conversion
from lkv.hf.conversion import _VERSION, convert_once, is_complete
from lkv.hf.fingerprint import encode_direction
from lkv.training.checkpoint import lock_folder
from lkv.training.data.decontamination import read_strings
from lkv.utils import data_files
from lkv.utils.data_files import read_json, read_json_lines, read_text
from lkv.utils.files import file_digest
from lkv.utils.journal import lock_journal


def test_a_converted_model_that_was_changed_is_converted_again(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights of a model")
    record = {"size": 18, "mtime_ns": weights.stat().st_mtime_ns, "sha256": file_digest(weights)}
    (tmp_path / "conversion.json").write_text(
        json.dumps({"version": _VERSION, "source": "a.gguf", "files": {weights.name: record}})
    )
    assert is_complete(tmp_path)
    os.utime(weights, (1, 1))
    assert is_complete(tmp_path)  # copied, with another time
    weights.write_bytes(b"weights of another")
    assert weights.stat().st_size == 18 and not is_complete(tmp_path)
    for text in ("[" * 100_000, '{"files": ' * 50_000, "null", "{}"):
        (tmp_path / "conversion.json").write_text(text)
        assert not is_complete(tmp_path)


def test_planted_locks_are_not_followed(tmp_path, monkeypatch):
    victim, folder = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("mine")
    folder.mkdir()
    target = folder / "model"
    for name in (".lock", ".model.lock", f".{zlib.crc32(b'samples.jsonl'):08x}.lock"):
        (folder / name).symlink_to(victim)

    def lock(how, *names):
        with how(*names):
            pass

    with pytest.raises(TrainingError, match="shared cannot be locked"):
        lock(lock_folder, folder)
    with pytest.raises(DataError, match="cannot be locked"):
        lock(lock_journal, folder / "samples.jsonl")
    monkeypatch.setattr(conversion, "require", lambda *_: None)
    with pytest.raises(ModelLoadError, match="the converted model cannot be kept"):
        convert_once(target, lambda: nullcontext(tmp_path / "a.gguf"), torch.float32)
    assert victim.read_text() == "mine"


def test_a_lock_that_is_released_deletes_no_lock_of_another(tmp_path):
    """What `lock_journal` relies on: versions of filelock that delete files let two writers into one journal."""
    first, second = (FileLock(tmp_path / "a.lock", timeout=0) for _ in range(2))
    first.acquire()
    (tmp_path / "a.lock").unlink()
    second.acquire()
    first.release()
    assert (tmp_path / "a.lock").exists()
    second.release()


@pytest.mark.parametrize("values", [[math.inf, 1.0], [1.0, -math.inf], [math.nan, 1.0], [0.0, 0.0], []])
def test_rows_without_a_direction_have_no_fingerprint(values):
    assert encode_direction("a", values) is None
    assert encode_direction("a", [1e300, 5e-324]) is not None


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setattr(data_files, "_MAX_SMALL", 2**16)
    monkeypatch.setattr(data_files, "_MAX_LINE", 2**16)


def compressed(path, data):
    with gzip.open(path, "wb") as file:
        file.write(data)
    return path


def test_gzip_files_of_nothing_but_zeros_are_refused(tmp_path, small_limits):
    bomb = compressed(tmp_path / "a.json.gz", b" " * 2**22)
    for read in (read_json, read_text, lambda path: list(read_strings(path))):
        with pytest.raises(DataError, match=r"a\.json\.gz holds more than 200 bytes for each of its own; get the file"):
            read(bomb)
    lines = compressed(tmp_path / "a.jsonl.gz", b" " * 2**22)
    with pytest.raises(DataError, match="has a line of more than 65,536 characters"):
        list(read_json_lines(lines))


def test_members_of_zip_archives_are_bounded(tmp_path, small_limits):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/a.jsonl", b" " * 2**22)
    for rows in (read_strings(tmp_path / "a.zip"), _read_rows(tmp_path / "a.zip", "a")):
        with pytest.raises(DataError, match="more than 200 bytes for each of its own"):
            list(rows)


def test_what_people_compress_is_read(tmp_path, small_limits):
    rows = [{"text": f"Row {number} of a text that repeats itself. " * 20} for number in range(1000)]
    path = compressed(tmp_path / "a.jsonl.gz", "".join(json.dumps(row) + "\n" for row in rows).encode())
    assert list(read_json_lines(path)) == rows
    assert json.loads(read_text(path).split("\n")[7]) == rows[7]
