"""Question answering data as people have it: rows of other kinds are read, or refused in one sentence."""

import pytest

from lkv.errors import DataError
from lkv.utils.qa_readers import hotpot_questions, squad_questions

SQUAD = {"context": "A lamp.", "question": "What?"}
HOTPOT = {"question": "Who?", "answer": "She", "supporting_facts": {"title": ["a"], "sent_id": [0]}}


@pytest.mark.parametrize("answers", [{"text": ["x", "x"]}, ["x"], [{"text": "x", "answer_start": 3}]])
def test_answers_are_texts_columns_or_entries(answers):
    (found,) = squad_questions([("row 1", SQUAD | {"answers": answers})])
    assert found.answers == ("x",)


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ({"title": ["a", "b"], "sentences": [["x"]]}, "row 1: 'context' has 2 titles and 1 lists of sentences"),
        ({"title": ["a"], "sentences": [[None]]}, "row 1: field 'context' must hold texts, but has None"),
        ({"title": [3], "sentences": [["x"]]}, "row 1: field 'context' must hold texts, but has 3"),
        ({"title": ["a"], "sentences": [3]}, "row 1: field 'context' must hold lists of sentences, but has 3"),
    ],
)
def test_paragraphs_of_another_kind_are_refused(context, message):
    with pytest.raises(DataError, match=message):
        list(hotpot_questions([("row 1", HOTPOT | {"context": context})]))
    with pytest.raises(DataError, match="must hold texts, but has 7"):
        list(squad_questions([("row 1", SQUAD | {"answers": [7]})]))


def test_paragraphs_without_sentences_are_empty():
    (found,) = hotpot_questions(
        [("row 1", HOTPOT | {"context": {"title": ["a", "b"], "sentences": [["x ", "y"], None]}})]
    )
    assert found.paragraphs == (("a", "x y"), ("b", ""))
