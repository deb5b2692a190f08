"""Rows of datasets on the hub: drawn, streamed, fetched after a broken line, and the same as the official files'."""

import gzip
from types import SimpleNamespace

import pytest

from experiments.data import build as building
from experiments.data.build import build_dataset
from experiments.data.hub import HUB_SOURCES, download_rows
from experiments.data.loom import LOOM_RATIOS, Loom
from lkv.errors import DataError
from lkv.training.data.documents import ROW_READERS, MultiHopQuestion, ShortQuestion, read_dataset
from lkv.training.data.public_datasets import index_folder, match_dataset
from lkv.utils.data_files import read_records, split_lines
from tests.experiments.made_sets import Tokens, files, lines_of, rows_of, settings


@pytest.mark.parametrize("name", LOOM_RATIOS)
def test_the_hub_s_rows_and_the_official_files_are_the_same_items(name, folder):
    every = [path for path in folder.rglob("*") if path.is_file()]
    found = [path for path in every if match_dataset(path.relative_to(folder)) == name]
    local = read_dataset(name, found, folder)
    streamed = list(ROW_READERS[name]((str(i), row) for i, row in enumerate(rows_of(name))))
    assert local[: len(streamed)] == streamed and len(streamed) == (15 if name == "narrativeqa" else 30)
    if name == "trec":
        assert local[-1] == ShortQuestion("café ?", "DESC:def", "TREC") and len(local) == 31
    if name == "multi_news":
        assert "NEWLINE_CHAR" not in local[0].text and "|||||" not in local[0].text
        assert not local[0].questions[0][1].startswith("\u2013")
    if name == "hotpotqa":
        assert isinstance(local[0], MultiHopQuestion) and local[0].needed == {1, 2}


def test_separators_inside_a_line_do_not_end_it(tmp_path):
    (tmp_path / "train.src.cleaned").write_text("a b\u2028c ||||| d\r\nx\x0by ||||| z\n", newline="")
    (tmp_path / "train.tgt").write_text("\u2013 one\n\u2013 two\x85more\n")
    items = read_dataset("multi_news", [tmp_path / "train.src.cleaned"], tmp_path)
    for path in (tmp_path / "train.src.cleaned", tmp_path / "train.tgt"):  # and gzipped
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    found = index_folder(tmp_path)
    assert found.used == {"multi_news": [tmp_path / "train.src.cleaned.gz"]}
    assert found.skipped == {tmp_path / "train.tgt.gz": "read with its source file"}
    assert read_dataset("multi_news", found.used["multi_news"], tmp_path) == items
    texts = [(item.text, item.questions[0][1]) for item in items]
    assert texts == [("a b\u2028c\n\nd", "one"), ("x\x0by\n\nz", "two\x85more")]
    assert split_lines("") == [] and split_lines("a\n\nb") == ["a", "", "b"]


class Stream(list):
    """Rows as `datasets` streams them, breaking after some."""

    def __init__(self, rows, stop=None):
        super().__init__(rows)
        self.stop = stop

    def __iter__(self):
        for i, row in enumerate(super().__iter__()):
            if i == self.stop:
                raise ConnectionError("the line went dead")
            yield row


def test_a_fetch_goes_on_where_it_broke_and_takes_named_splits_alone(tmp_path):
    asked = []

    def load(repository, stop=None, **options):
        asked.append((repository, options))
        return Stream(rows_of("mmlu", 40), stop)

    with pytest.raises(
        DataError,
        match=r"MMLU auxiliary_train and dev cannot be downloaded from cais/mmlu .* went dead.* all/auxiliary_train",
    ):
        download_rows("mmlu", tmp_path, 60, load=lambda *a, **o: load(*a, stop=25, **o))
    path, commit = download_rows("mmlu", tmp_path, 60, load=load)
    assert commit == HUB_SOURCES["mmlu"].revision and len(commit) == 40
    assert [options["split"] for _, options in asked] == ["auxiliary_train", "auxiliary_train", "dev"]
    assert all(o == {"split": o["split"], "name": "all", "revision": commit, "streaming": True} for _, o in asked)
    drawn, every = [row for _, row in read_records(path)], list(rows_of("mmlu", 40))
    assert drawn[:30] == drawn[30:] and [every.index(row) for row in drawn[:30]] != list(range(30))
    assert download_rows("mmlu", tmp_path, 60, load=None)[0] == path  # nothing is fetched again
    path, _ = download_rows("the_stack", tmp_path, 8, load=lambda *a, **o: Stream(rows_of("the_stack")))
    assert all(
        set(row) == {"content", "max_stars_repo_path", "max_stars_repo_licenses", "lang"}
        for _, row in read_records(path)
    )
    path, _ = download_rows("narrativeqa", tmp_path, 20, load=lambda *a, **o: Stream(rows_of("narrativeqa")))
    stories = [row["document"] for _, row in read_records(path)]
    first = [story["id"] not in {other["id"] for other in stories[:n]} for n, story in enumerate(stories)]
    assert [bool(story["text"]) for story in stories] == first and 10 <= sum(first) < len(stories) == 20


def test_a_build_from_the_hub_alone_goes_on_with_its_settings_alone(tmp_path, monkeypatch):
    names = {hub.repository: name for name, hub in HUB_SOURCES.items()}
    monkeypatch.setattr(building, "_SHARD_SAMPLES", 4)
    monkeypatch.setattr(building, "_MIN_ROWS", 10)
    head = SimpleNamespace(dataset_info=lambda repository, revision: SimpleNamespace(sha="a" * 40))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: head)  # of the hub's own conversions

    def run(out, **changes):
        def load(repository, **options):
            assert options["streaming"] and len(options["revision"]) == 40
            return Stream(rows_of(names[repository], 200))

        return build_dataset(settings(tmp_path / out, None, **changes), Tokens(), "words", load)

    make_candidate = Loom.candidate

    def stop(self, source, number):
        if number == 6:
            raise OSError("out of order")
        return make_candidate(self, source, number)

    made = run("whole")
    assert made["sources"]["multi_news"]["commit"] == "a" * 40 and len(lines_of(tmp_path / "whole")) > 30
    assert made["sources"]["squad"]["from"].startswith("rajpurkar/squad at 7b6d24c4")
    with monkeypatch.context() as patch:
        patch.setattr(Loom, "candidate", stop)
        with pytest.raises(OSError, match="out of order"):
            run("stopped")
    fetched = files(tmp_path / "stopped" / "fetched")
    with pytest.raises(DataError, match=r"progress\.json belongs to a build with other settings \(asked\)"):
        run("stopped", samples=400)
    assert files(tmp_path / "stopped" / "fetched") == fetched
    run("stopped")
    assert files(tmp_path / "stopped") == files(tmp_path / "whole")
