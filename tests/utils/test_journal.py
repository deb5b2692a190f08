"""Journals that are resumed, torn, locked, or shared by several processes."""

import json

import pytest

from experiments.journal import open_journal
from experiments.result_file import write_results
from lkv.errors import DataError
from lkv.evaluation.sample_journal import SampleJournal
from lkv.utils.journal import lock_journal, read_journal, read_samples


def test_an_interrupted_journal_resumes(tmp_path):
    path = tmp_path / "x.jsonl"
    with pytest.raises(KeyboardInterrupt), open_journal(path, {"a": 1}) as done:  # noqa: PT012
        done.add("a", {"value": 1})
        raise KeyboardInterrupt
    with open_journal(path, {"a": 1}) as done:
        assert done == {"a": {"value": 1}}
        done.add("b", {"value": 2})
    assert not path.exists()


def test_other_settings_are_refused_and_incomplete_lines_dropped(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"seed": "1"}\n{"key": "a", "value": 1}\n{"key": "b", "va')
    with pytest.raises(DataError, match="other settings"), open_journal(path, {"seed": "2"}):
        pass
    with open_journal(path, {"seed": "1"}) as done:
        assert done == {"a": {"value": 1}}
        done.add("b", {"value": 2})
        assert [json.loads(line).get("key") for line in path.read_text().splitlines()] == [None, "a", "b"]


def test_a_write_cut_off_at_any_byte_is_dropped(tmp_path):
    path, last = tmp_path / "x.jsonl", '{"key": "b", "value": "naïve 灯台 \U0001f4a5"}\n'.encode()
    for end in range(len(last) - 1):
        path.write_bytes(b'{"seed": "1"}\n{"key": "a", "value": 1}\n' + last[:end])
        with pytest.raises(KeyboardInterrupt), open_journal(path, {"seed": "1"}) as done:  # noqa: PT012
            assert done == {"a": {"value": 1}}
            raise KeyboardInterrupt
    path.write_bytes(b'{"seed": "1"}\n' + last.replace(b"na", b"\xff") + last)
    with pytest.raises(DataError, match="is not text"):
        read_samples(path)


def test_a_complete_last_line_without_newline_counts(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"seed": 1}\n\n{"key": "a", "value": 1}\n{"key": "b", "value": 2}')
    assert read_journal(path, DataError, "mend") == (
        [(1, {"seed": 1}), (3, {"key": "a", "value": 1}), (4, {"key": "b", "value": 2})],
        False,
    )
    with open_journal(path, {"seed": 1}) as done:
        done.add("c", {"value": 3})
        assert read_samples(path) == (
            {"seed": 1},
            [{"key": k, "value": v} for k, v in zip("abc", (1, 2, 3), strict=True)],
        )
    path.write_text('{"seed": 1}\n{"key": "a"}\n{"seed": 1}\n')
    with pytest.raises(DataError, match=r"line 3 is neither a header nor a sample; delete the damaged line"):
        read_samples(path)


def test_parts_of_any_number_of_processes_are_merged(tmp_path):
    out, header = tmp_path / "x.jsonl", {"format": 1, "machine": "a"}
    keys = [f"k{number}" for number in range(7)]
    journals = [SampleJournal(out, header, rank, 3) for rank in range(3)]
    for number, key in enumerate(keys):
        journals[number % 3].add({"key": key, "value": key})
    with (tmp_path / "x.part1.jsonl").open("a") as file:
        file.write('{"key": "torn')
    (tmp_path / "x.partial.jsonl").write_text("somebody else's")
    again = SampleJournal(out, header | {"machine": "b"})
    assert set(again.done) == set(keys)
    again.add({"key": "k7", "value": "ü"})
    again.finish([*keys[::-1], "k7"])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines == [header, *({"key": key, "value": key} for key in keys[::-1]), {"key": "k7", "value": "ü"}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.jsonl", "x.partial.jsonl"]


def test_result_files(tmp_path):
    write_results(tmp_path / "deep/x.json", "x", [{"method": "lkv", "value": 0.1234567}], 3, "make x")
    document = json.loads((tmp_path / "deep/x.json").read_text())
    assert list(document) == ["name", "command", "seed", "date", "machine", "versions", "rows"]
    assert document["rows"] == [{"method": "lkv", "value": 0.12346}] and document["seed"] == 3
    assert document["versions"]["torch"].startswith("2.")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.json"]


def test_a_journal_has_one_writer(tmp_path):
    path = tmp_path / "x.jsonl"
    with open_journal(path, {"seed": 1}):
        for opened in (open_journal(path, {"seed": 1}), lock_journal(path)):
            with pytest.raises(DataError, match=r"another evaluation is writing to .*x\.jsonl; wait"), opened:
                pass
    with lock_journal(path):
        pass
    assert not list(tmp_path.iterdir())
