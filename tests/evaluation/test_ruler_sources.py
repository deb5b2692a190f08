"""RULER's sources: all forms in which they come are read, and faults are named."""

import gzip
import json
import re
import sys

import pyarrow
import pytest
from pyarrow import parquet

from lkv.errors import DataError, EvaluationError, MissingPackageError
from lkv.evaluation.ruler import TASKS, Sources, check_sources, make_examples
from lkv.evaluation.ruler.tasks import NEEDLE_TASKS, word_list
from tests.ruler import ESSAY, hotpot_rows, one, squad_data, words, write_lines


def test_wrong_requests(sources):
    with pytest.raises(EvaluationError, match="no task 'niah_singel_1'; did you mean niah_single_1"):
        make_examples("niah_singel_1", 1000, 1, words, sources)
    with pytest.raises(EvaluationError, match="count is 0, but at least 1 example of vt"):
        make_examples("vt", 1000, 0, words, sources)
    with pytest.raises(EvaluationError, match=r"all 210 documents for qa_1 have \d+ tokens, fewer than"):
        make_examples("qa_1", 50_000, 1, words, sources)


def test_the_official_json_forms_are_read(tmp_path, sources):
    (tmp_path / "hotpot_dev_distractor_v1.json").write_text(json.dumps(hotpot_rows(60)))
    (tmp_path / "dev-v2.0.json").write_text(json.dumps(squad_data()))
    (tmp_path / "LICENSE.txt").write_text("No essay.")
    (tmp_path / "hotpotqa.jsonl.gz").write_bytes(b"LongBench's file of that name")
    (tmp_path / "essays").mkdir()
    (tmp_path / "essays" / "b.txt").write_text("Second file here. It ends.")
    (tmp_path / "essays" / "a.txt").write_text("First file here. It ends.")
    plain = Sources.from_folder(tmp_path)
    assert plain.words[:5] == ("First", "file", "here.", "It", "ends.") and plain.words[5] == "Second"
    for task in ("qa_1", "qa_2"):
        assert one(task, 2000, 5, plain) == one(task, 2000, 5, sources)


def test_the_hub_s_parquet_files_give_the_same_examples(tmp_path, sources, monkeypatch):
    asked = []

    def download(repo_id, filename, repo_type, revision):
        asked.append((repo_id, filename))
        assert repo_type == "dataset" and len(revision) == 40
        if "squad" in repo_id:
            rows = [
                {"title": article["title"], "context": p["context"], "question": q["question"],
                 "answers": {"text": [a["text"] for a in q["answers"]], "answer_start": [0] * len(q["answers"])}}
                for article in squad_data()["data"] for p in article["paragraphs"] for q in p["qas"]
            ]  # fmt: skip
        else:
            rows = [
                {**row,
                 "supporting_facts": {"title": [t for t, _ in row["supporting_facts"]], "sent_id": [0, 1]},
                 "context": {"title": [t for t, _ in row["context"]], "sentences": [s for _, s in row["context"]]}}
                for row in hotpot_rows(60)
            ]  # fmt: skip
        path = tmp_path / f"{len(asked)}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return str(path)

    (tmp_path / "essay.txt").write_text(ESSAY)
    monkeypatch.setattr(f"{Sources.__module__}.hf_hub_download", download)
    hub = Sources(tmp_path / "essay.txt")
    assert one("niah_single_1", 2000, 5, hub) == one("niah_single_1", 2000, 5, sources) and not asked
    for task in ("qa_1", "qa_2", "qa_1", "niah_single_2"):
        assert one(task, 2000, 5, hub) == one(task, 2000, 5, sources)
    assert asked == [
        ("rajpurkar/squad_v2", "squad_v2/validation-00000-of-00001.parquet"),
        ("hotpotqa/hotpot_qa", "distractor/validation-00000-of-00001.parquet"),
    ]


def no_hub(*_, **__):
    raise ConnectionError("no route")


def test_missing_sources_are_refused_before_any_example(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{Sources.__module__}.hf_hub_download", no_hub)
    downloads = r"{} cannot be downloaded \(ConnectionError: no route\); put {}.* as one of {}"
    complaints = {
        "essay": "or name a text file or such a folder with --haystack",
        "qa_1": downloads.format("rajpurkar/squad_v2", "SQuAD's validation file", r"dev-v2\.0\.json"),
        "qa_2": downloads.format("hotpotqa/hotpot_qa", "HotpotQA's validation file", r".*hotpot_"),
    }
    for empty in (Sources.from_folder(tmp_path), Sources()):
        for task in TASKS:
            needs_essay = NEEDLE_TASKS[task].haystack == "essay" if task in NEEDLE_TASKS else False
            if complaint := complaints.get("essay" if needs_essay else task):
                with pytest.raises(DataError, match=complaint):
                    check_sources(["vt", task], empty)
                with pytest.raises(DataError, match=complaint):
                    one(task, 1000, 0, empty)
            else:
                check_sources([task], empty)
    assert one("niah_single_1", 1000, 0, empty) and one("cwe", 1000, 0, empty)
    with pytest.raises(DataError, match="there is no folder"):
        Sources.from_folder(tmp_path / "nowhere")
    with pytest.raises(DataError, match="there is no file"):
        one("qa_1", 1000, 0, Sources(squad=tmp_path / "squad.json"))
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(DataError, match="has no text to hide needles in"):
        one("niah_single_2", 1000, 0, Sources(tmp_path / "blank.txt"))


def test_a_haystack_of_one_s_own(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("A text of my own. It ends.")
    for sources in (Sources.from_folder(tmp_path, path), Sources(path)):
        assert sources.words == tuple("A text of my own. It ends.".split())
    # Repeated where it is too short.
    assert one("niah_single_2", 1500, 0, sources).context.count("A text of my own.") > 20


def test_questions_whose_documents_are_absent_are_not_asked(tmp_path):
    rows = hotpot_rows(30)
    rows[4]["supporting_facts"].append(["Elsewhere", 0])
    sources = Sources(hotpot=write_lines(tmp_path / "hotpot.jsonl.gz", rows))
    examples = make_examples("qa_2", 1000, 29, words, sources)
    assert not any("story 4?" in example.question for example in examples)
    only = Sources(hotpot=write_lines(tmp_path / "one.jsonl.gz", [rows[4]]))
    with pytest.raises(DataError, match="has no question with an answer"):
        one("qa_2", 1000, 0, only)


def test_malformed_files_are_named_with_line_and_field(tmp_path):
    (right,), path = hotpot_rows(1), tmp_path / "hotpot.jsonl.gz"
    for row, complaint in (
        ({key: value for key, value in right.items() if key != "question"}, "field 'question' is missing"),
        ({key: value for key, value in right.items() if key != "context"}, "field 'context' is missing"),
        (right | {"answer": 3}, "field 'answer' is not a str"),
        (right | {"supporting_facts": [["a"]]}, "field 'supporting_facts' must hold pairs"),
        (["a list"], "not a JSON object but a list"),
    ):
        write_lines(path, [right, right, row])
        with pytest.raises(DataError, match=re.escape(f"{path}, line 3: {complaint}")):
            one("qa_2", 1000, 0, Sources(hotpot=path))
    path = tmp_path / "squad.json"
    for text, complaint in (
        ('{"data": [', "is not JSON"),
        ("[1]", "field 'data' is missing"),
        (json.dumps({"data": [{"paragraphs": [{"context": "a", "qas": []}, {"qas": []}]}]}),
         "article 1, paragraph 2: field 'context' is missing"),
        (json.dumps({"data": [{"paragraphs": [{"context": "a", "qas": [{"answers": [{"text": "b"}]}]}]}]}),
         "article 1, paragraph 1, question 1: field 'question' is missing"),
        ('{"data": []}', "has no question with an answer"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(DataError, match=re.escape(str(path)) + ".*" + re.escape(complaint)):
            one("qa_1", 1000, 0, Sources(squad=path))
    for name, content, complaint in (
        ("hotpot.jsonl.gz", b"not gzip", "is not a readable gzip file"),
        ("hotpot.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 999)[:-20], "is not a readable gzip file|field 'supporting"),
        ("hotpot.jsonl.gz", gzip.compress(b"{}\n{oops\n"), "line 1: field 'supporting_facts' is missing"),
        ("hotpot.jsonl.gz", gzip.compress(b"{oops\n"), "line 1: not a JSON object"),
        ("hotpot.json", b"{}", "must hold a JSON list of questions, but holds a dict"),
        ("hotpot.json.gz", b"not gzip", "cannot be read"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=complaint):
            one("qa_2", 1000, 0, Sources(hotpot=tmp_path / name))
    (tmp_path / "hotpot.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="is not a readable Parquet file"):
        one("qa_2", 1000, 0, Sources(hotpot=tmp_path / "hotpot.parquet"))


def test_without_its_package_the_word_list_says_what_to_install(monkeypatch):
    word_list.cache_clear()
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    with pytest.raises(MissingPackageError, match=r"RULER needs .*wonderwords.*pip install .*\[evals\]"):
        word_list("noun")
