"""A small folder of training data."""

import random

import pytest

from tests.ruler import write_lines


@pytest.fixture
def folder(tmp_path):
    """A small data folder with made-up rows in the official fields."""
    tmp_path = tmp_path / "data"
    tmp_path.mkdir()
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "near", "some", "old", "river"]
    rng = random.Random(0)

    def text(count):
        return " ".join(rng.choice(words) for _ in range(count)) + "."

    write_lines(
        tmp_path / "squad_train_subset.jsonl.gz",
        [
            {"title": f"T_{i}", "context": f"{text(60)} Key {i}.", "question": f"Which? {i}", "answers": [f"Key {i}"]}
            for i in range(80)
        ],
    )  # fmt: skip
    write_lines(
        tmp_path / "hotpotqa_train_200.jsonl.gz",
        [
            {"question": f"Q{i}", "answer": f"A{i}", "supporting_facts": [["P0", 0], ["P3", 0]],
             "context": [[f"P{j}", [text(30), f" A{i} here."]] for j in range(6)]}
            for i in range(40)
        ],
    )  # fmt: skip
    for number in range(40):
        (tmp_path / f"story{number}.txt").write_text(text(900))
        (tmp_path / f"tool{number}.py").write_text("\n".join(f"def f{k}(x):\n    return x + {k}" for k in range(80)))
    return tmp_path
