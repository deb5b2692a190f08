"""Small sources and a cheap tokenizer for the tests of RULER."""

import gzip
import json
import re

from lkv.evaluation.ruler import Sources, make_examples

ESSAY = " ".join(f"Sentence number {i} tells of a hill and a river." for i in range(300))


def words(text, add_special_tokens=True):
    """A tokenizer that cuts words into pieces of up to eight characters, without a chat template."""
    return {"input_ids": re.findall(r"\S{1,8}", text)}


def size(example):
    parts = (example.context, example.question + example.answer_prefix)
    return sum(len(words(part)["input_ids"]) for part in parts) + example.max_new_tokens


def hotpot_rows(count):
    return [
        {"question": f"Who met whom in story {i}?", "answer": f"Name{i}",
         "supporting_facts": [[f"Title {i}-2", 0], [f"Title {i}-7", 1]],
         "context": [[f"Title {i}-{j}", [f"Paragraph {j} of {i}. ", f"Name{i} was seen. " * (1 + j % 3)]]
                     for j in range(10)]}
        for i in range(count)
    ]  # fmt: skip


def squad_data(articles=70):
    return {
        "data": [
            {"title": f"T{a}", "paragraphs": [
                {"context": f"Article {a} has paragraph {p}, and Key{a}{p} is its key. " * (1 + (a + p) % 4),
                 "qas": [{"question": f"What is the key of {a} {p}?", "is_impossible": False,
                          "answers": [{"text": f"Key{a}{p}"}, {"text": f"Key{a}{p}"}, {"text": "key"}]},
                         {"question": "What is not here?", "is_impossible": True, "answers": []}]}
                for p in range(3)]}
            for a in range(articles)
        ]
    }  # fmt: skip


def write_json(path, value):
    path.write_bytes(gzip.compress(json.dumps(value).encode()) if path.suffix == ".gz" else json.dumps(value).encode())
    return path


def write_lines(path, rows):
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def write_sources(folder):
    """Sources of each kind in `folder`, and a file of training data that must be passed over."""
    (folder / "PaulGrahamEssays_2.json").write_text(json.dumps({"text": ESSAY, "files": ["a.txt"]}))
    write_json(folder / "xquad.en.json.gz", squad_data())
    write_lines(folder / "hotpot_dev.jsonl.gz", hotpot_rows(60))
    write_lines(folder / "hotpot_train.jsonl.gz", [])
    return Sources.from_folder(folder)


def one(task, length, seed, sources, tokenizer=words):
    (example,) = make_examples(task, length, 1, tokenizer, sources, seed)
    return example
