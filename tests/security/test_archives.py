"""Compressed files that were made to fill the memory of their reader."""

import gzip
import json
import zipfile

import pytest

from lkv.errors import DataError
from lkv.evaluation.longbench import _read_rows
from lkv.training.data.decontamination import read_strings
from lkv.utils import data_files
from lkv.utils.data_files import read_json, read_json_lines, read_text


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch):
    monkeypatch.setattr(data_files, "_MAX_SMALL", 2**16)
    monkeypatch.setattr(data_files, "_MAX_LINE", 2**16)


def compressed(path, data):
    with gzip.open(path, "wb") as file:
        file.write(data)
    return path


def test_gzip_files_of_nothing_but_zeros_are_refused(tmp_path):
    bomb = compressed(tmp_path / "a.json.gz", b" " * 2**22)
    for read in (read_json, read_text, lambda path: list(read_strings(path))):
        with pytest.raises(DataError, match=r"a\.json\.gz holds more than 200 bytes for each of its own; get the file"):
            read(bomb)
    lines = compressed(tmp_path / "a.jsonl.gz", b" " * 2**22)
    with pytest.raises(DataError, match="has a line of more than 65,536 characters"):
        list(read_json_lines(lines))


def test_members_of_zip_archives_are_bounded(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/a.jsonl", b" " * 2**22)
    for rows in (read_strings(tmp_path / "a.zip"), _read_rows(tmp_path / "a.zip", "a")):
        with pytest.raises(DataError, match="more than 200 bytes for each of its own"):
            list(rows)


def test_what_people_compress_is_read(tmp_path):
    rows = [{"text": f"Row {number} of a text that repeats itself. " * 20} for number in range(1000)]
    path = compressed(tmp_path / "a.jsonl.gz", "".join(json.dumps(row) + "\n" for row in rows).encode())
    assert list(read_json_lines(path)) == rows
    assert json.loads(read_text(path).split("\n")[7]) == rows[7]
