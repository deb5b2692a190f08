"""The seven sets as files."""

import gzip
import json

import pytest

from experiments.data.loom import TREC_CLASSES
from tests.experiments.made_sets import rows_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The seven sets as the hub lays them out: Parquet in folders, SQuAD and TREC under their own official names."""
    import pyarrow as pa
    from pyarrow import parquet

    root = tmp_path_factory.mktemp("sets")
    places = {
        "hotpotqa": "hotpot/fullwiki/train-00000-of-00002.parquet",
        "multi_news": "multi_news/default/train/0000.parquet",
        "the_stack": "the-stack/data/python/data-00000-of-00144.parquet",
        "mmlu": "mmlu/all/auxiliary_train-00000-of-00001.parquet",
        "narrativeqa": "narrativeqa/data/train-00000-of-00024.parquet",
    }  # fmt: skip
    for name, place in places.items():
        (root / place).parent.mkdir(parents=True)
        parquet.write_table(pa.Table.from_pylist(list(rows_of(name))), root / place)
    articles = [
        {"title": row["title"], "paragraphs": [{"context": row["context"], "qas": [
            {"question": row["question"], "answers": [{"text": row["answers"]["text"][0]}]}]}]}
        for row in rows_of("squad")
    ]  # fmt: skip
    (root / "train-v1.1.json").write_text(json.dumps({"data": articles, "version": "1.1"}))
    lines = "".join(f"{TREC_CLASSES[row['fine_label']]} {row['text']}\n" for row in rows_of("trec"))
    (root / "train_5500.label.gz").write_bytes(
        gzip.compress((lines + "NUM:How bad line\nDESC:def caf\xe9 ?\n").encode("latin-1"))
    )
    return root
