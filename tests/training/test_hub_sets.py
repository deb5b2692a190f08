"""The sets of a training fetched from the hub: rows, splits, and a line that breaks."""

import json

import pytest

from lkv.errors import DataError
from lkv.training.data.build import build_dataset
from lkv.training.data.documents import ROW_READERS, MultiHopQuestion, ShortQuestion, read_dataset
from lkv.training.data.public_datasets import PUBLIC_DATASETS, download_rows, match_dataset
from lkv.training.data.recipes import LOOM_RATIOS
from lkv.utils.data_files import read_records
from tests.training.made_sets import Tokens, lines_of, rows_of, settings


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
    assert commit == PUBLIC_DATASETS["mmlu"].hub.revision and len(commit) == 40
    assert [options["split"] for _, options in asked] == ["auxiliary_train", "auxiliary_train", "dev"]
    assert all(o == {"split": o["split"], "name": "all", "revision": commit, "streaming": True} for _, o in asked)
    assert [row for _, row in read_records(path)] == [*list(rows_of("mmlu", 40))[:30]] * 2
    assert download_rows("mmlu", tmp_path, 60, load=None)[0] == path  # nothing is fetched again
    path, _ = download_rows("the_stack", tmp_path, 8, load=lambda *a, **o: Stream(rows_of("the_stack")))
    assert all(
        set(row) == {"content", "max_stars_repo_path", "max_stars_repo_licenses", "lang"}
        for _, row in read_records(path)
    )
    path, _ = download_rows("narrativeqa", tmp_path, 4, load=lambda *a, **o: Stream(rows_of("narrativeqa")))
    assert [bool(row["document"]["text"]) for _, row in read_records(path)] == [True, False, True, False]


def test_a_split_with_too_few_rows_neither_hides_nor_doubles_others(tmp_path):
    rows = list(rows_of("mmlu", 40))

    def load(repository, stop=None, **options):
        return Stream(rows[:10] if options["split"] == "auxiliary_train" else rows, stop)

    with pytest.raises(DataError, match="went dead"):
        download_rows("mmlu", tmp_path, 60, load=lambda *a, **o: load(*a, stop=15, **o))
    path, _ = download_rows("mmlu", tmp_path, 60, load=load)
    assert [row for _, row in read_records(path)] == [*rows[:10], *rows[:30]]
    assert download_rows("mmlu", tmp_path, 60, load=None)[0] == path  # as many as there are were asked for before
    download_rows("mmlu", tmp_path, 100, load=load)
    assert [row for _, row in read_records(path)] == [*rows[:10], *rows]
    assert download_rows("mmlu", tmp_path, 9000, load=None)[0] == path  # there are no more
    other = "b" * 40
    assert download_rows("mmlu", tmp_path, 60, other, load=load) == (path, other)
    assert [row for _, row in read_records(path)] == [*rows[:10], *rows[:30]]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mmlu.about.json", "mmlu.jsonl"]


def test_datasets_streams_what_is_read(tmp_path, folder):
    """The real library over the fixtures' Parquet, as it streams the hub's."""
    datasets = pytest.importorskip("datasets")

    def load(repository, split, revision, streaming, **options):
        file = next((folder / "hotpot").rglob("*.parquet"))
        return datasets.load_dataset(
            "parquet", data_files={split: str(file)}, split=split, streaming=streaming, cache_dir=str(tmp_path)
        )

    path, _ = download_rows("hotpotqa", tmp_path / "out", 12, load=load)
    assert [row for _, row in read_records(path)] == list(rows_of("hotpotqa"))[:12]


def test_a_build_from_the_hub_alone(tmp_path):
    names = {hub.repository: name for name, own in PUBLIC_DATASETS.items() if (hub := own.hub)}

    def load(repository, **options):
        assert options["streaming"] and len(options["revision"]) == 40
        return Stream(rows_of(names[repository]))

    lock = tmp_path / "lock.json"
    lock.write_text(
        json.dumps({"sources": {name: {"commit": "a" * 40} if name == "multi_news" else {} for name in LOOM_RATIOS}})
    )
    made = build_dataset(settings(tmp_path / "out", None, lock=lock), Tokens(), "words", load)
    assert made["sources"]["multi_news"]["commit"] == "a" * 40
    assert made["sources"]["squad"]["from"].startswith("rajpurkar/squad at 7b6d24c4")
    assert len(lines_of(tmp_path / "out")) == 40
