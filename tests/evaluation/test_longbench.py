"""LongBench: rows become the official prompts; files that are missing or malformed are named."""

import gzip
import json
import sys
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lkv.evaluation.longbench
from lkv.errors import DataError, MissingPackageError
from lkv.evaluation.longbench import CATEGORIES, TASKS, load_examples

# Official prompts of five tasks, typed apart from the package's data.
HOTPOTQA = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
TREC = "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}"
SAMSUM = "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}"
GOV_REPORT = (
    "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}\n\n"
    "Now, write a one-page summary of the report.\n\nSummary:"
)
REPOBENCH = "Please complete the code given below. \n{context}{input}Next line of code:\n"
OFFICIAL = {"hotpotqa": HOTPOTQA, "trec": TREC, "samsum": SAMSUM, "gov_report": GOV_REPORT, "repobench-p": REPOBENCH}
# Generation lengths and metrics as LongBench lists them.
LISTED = {
    "narrativeqa": (128, "qa_f1"), "qasper": (128, "qa_f1"), "multifieldqa_en": (64, "qa_f1"),
    "hotpotqa": (32, "qa_f1"), "2wikimqa": (32, "qa_f1"), "musique": (32, "qa_f1"),
    "gov_report": (512, "rouge_l"), "qmsum": (512, "rouge_l"), "multi_news": (512, "rouge_l"),
    "trec": (64, "classification"), "triviaqa": (32, "qa_f1"), "samsum": (128, "rouge_l"),
    "passage_count": (32, "count"), "passage_retrieval_en": (32, "retrieval"),
    "lcc": (64, "code_sim"), "repobench-p": (64, "code_sim"),
}  # fmt: skip


def row(**changes) -> dict:
    """A row in LongBench's fields, with braces and percent signs that a template must leave alone."""
    fields = {"_id": "x", "dataset": "any", "language": "en", "length": 3, "all_classes": ["River", "Town"]}
    fields |= {"input": "Which {river} is it?", "context": "A {context} of 100% rivers.\nThe Neva."}
    return fields | {"answers": ["Paragraph 3", "The Neva"]} | changes


def write(folder, task, *rows, suffix=".jsonl"):
    text = "".join((line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)) + "\n" for line in rows)
    path = folder / f"{task}{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("task", LISTED)
def test_every_task_loads_with_its_length_metric_and_rules(task, tmp_path):
    assert set(TASKS) == set(LISTED) and [len(tasks) for tasks in CATEGORIES.values()] == [3, 3, 3, 3, 2, 2]
    answers = ["Paragraph 3"] if task == "passage_retrieval_en" else ["The Neva"]
    write(tmp_path, task, row(answers=answers))
    (example,) = load_examples(task, tmp_path)
    assert (example.max_new_tokens, example.metric) == LISTED[task]
    assert (example.suite, example.task, example.number, example.length) == ("longbench", task, 0, None)
    assert example.answers == tuple(answers)
    assert example.classes == (("River", "Town") if task == "trec" else ())
    assert example.first_line == (task in ("trec", "triviaqa", "samsum"))
    assert example.stop_at_newline == (task == "samsum")
    assert example.chat == (task not in ("trec", "triviaqa", "samsum", "lcc", "repobench-p"))
    assert row()["context"] in example.context and row()["context"] not in example.question


words = st.text(st.sampled_from("ab{}%\\\n:éγ "), min_size=1, max_size=20).filter(str.strip)


@given(st.sampled_from(sorted(OFFICIAL)), words, words, st.sampled_from(["", "\nType:", "\nSummary: ", "Summary:\n"]))
def test_parts_make_the_official_prompt(tmp_path_factory, task, context, question, end):
    folder = tmp_path_factory.mktemp("longbench")
    write(folder, task, row(context=context, input=question + end))
    (example,) = load_examples(task, folder)
    before, after = OFFICIAL[task].split("{context}")
    prompt = before + context + after.replace("{input}", question + end)
    assert example.context + example.question + example.answer_prefix == prompt
    assert context in example.context


@pytest.mark.parametrize(
    ("task", "given", "prefix"),
    [
        ("trec", "Question: Who?\nType:", "Type:"),
        ("triviaqa", "Passage:\nAnswer: 3\nQuestion:\nWho?\nAnswer:\n", "Answer:\n"),
        ("samsum", "Dialogue: Summary: no\nSummary: ", "Summary: "),
        ("samsum", "Dialogue: no end", ""),
    ],
)
def test_few_shot_inputs_end_with_the_beginning_of_the_answer(task, given, prefix, tmp_path):
    write(tmp_path, task, row(input=given))
    (example,) = load_examples(task, tmp_path)
    assert example.answer_prefix == prefix
    assert example.question + example.answer_prefix == given


def test_compressed_files(tmp_path):
    rows = [row(input=str(number)) for number in range(4)]
    write(tmp_path, "qmsum", *rows, suffix=".jsonl.gz")
    assert [(item.number, item.question) for item in load_examples("qmsum", tmp_path, count=3)] == [
        (number, f"Query: {number}\n") for number in range(3)
    ]
    assert len(load_examples("qmsum", tmp_path)) == 4


def test_the_hub_serves_the_archive(tmp_path, monkeypatch):
    archive, calls = tmp_path / "data.zip", []
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("data/lcc.jsonl", json.dumps(row(answers=["é = 1"]), ensure_ascii=False) + "\n")

    def download(repository, name, *, repo_type, revision):
        calls.append((repository, name, repo_type, len(revision)))
        if len(calls) > 2:
            raise RuntimeError("no connection")  # as the HTTP client does: no OSError
        return str(archive)

    monkeypatch.setattr(lkv.evaluation.longbench, "hf_hub_download", download)
    (example,) = load_examples("lcc", None)
    assert example.answers == ("é = 1",)
    assert calls == [("zai-org/LongBench", "data.zip", "dataset", 40)]
    assert load_examples("lcc", tmp_path) == [example]
    with pytest.raises(DataError, match=r"data\.zip has no data/trec\.jsonl; get LongBench's data\.zip again"):
        load_examples("trec", None)
    with pytest.raises(DataError, match=r"could not be downloaded \(no connection\).* or give a folder"):
        load_examples("lcc", None)


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        ("qasper", "{", r"qasper\.jsonl, line 2: not a JSON object"),
        ("qasper", "[1]", "line 2: not a JSON object but a list"),
        ("qasper", row(input=None), "line 2: field 'input' is missing"),
        ("qasper", row(context=["a"]), "line 2: field 'context' is not a str"),
        ("qasper", row(context=" \n"), r"line 2: field 'context' is empty"),
        ("qasper", row(answers=[]), r"line 2: field 'answers' must be a list of at least one text, but is \[\]"),
        ("qasper", row(answers="Neva"), r"line 2: field 'answers' must be a list .* but is 'Neva'"),
        ("qasper", row(answers=[3]), r"line 2: field 'answers' must be a list .* but is \[3\]"),
        ("qasper", {"input": "a", "context": "b"}, r"line 2: field 'answers' .* but is None"),
        ("trec", row(all_classes=None), r"line 2: field 'all_classes' must be a list .* but is None"),
        ("passage_retrieval_en", row(answers=["three"]), r"line 2: field 'answers' must name a paragraph"),
    ],
)
def test_malformed_rows_are_refused_with_line_and_field(task, line, message, tmp_path):
    write(tmp_path, task, row(answers=["Paragraph 1"]), line)
    with pytest.raises(DataError, match=message):
        load_examples(task, tmp_path)
    assert len(load_examples(task, tmp_path, count=1)) == 1


def test_unknown_tasks_and_missing_empty_and_damaged_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"holds none of qasper\.jsonl, qasper\.jsonl\.gz, data\.zip"):
        load_examples("qasper", tmp_path)
    write(tmp_path, "qasper")
    (tmp_path / "lcc.jsonl").write_bytes(b"\xff\xfe")
    path = write(tmp_path, "trec", *[row(input=f"{number}" * 50) for number in range(50)], suffix=".jsonl.gz")
    path.write_bytes(path.read_bytes()[:-40])
    (tmp_path / "data.zip").write_bytes(b"PK nothing")
    for task, count, message in (
        ("hotpot_qa", None, r"no LongBench task 'hotpot_qa'; did you mean hotpotqa\?"),
        ("zzz", None, r"'zzz'; use one of narrativeqa, .*repobench-p.*Chinese tasks are left out"),
        ("qasper", None, r"qasper\.jsonl has no row of qasper"),
        ("qasper", 0, "count is 0, but at least 1 row"),
        ("lcc", None, r"lcc\.jsonl, line 1: not a JSON object"),
        ("trec", None, r"trec\.jsonl\.gz is not a readable gzip file"),
        ("musique", None, r"data\.zip cannot be read"),
    ):
        with pytest.raises(DataError, match=message):
            load_examples(task, tmp_path, count)
    monkeypatch.setitem(sys.modules, "rouge", None)
    write(tmp_path, "samsum", row())
    with pytest.raises(MissingPackageError, match="ROUGE-L needs optional packages"):
        load_examples("samsum", tmp_path)
