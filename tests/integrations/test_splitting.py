"""The context of a prompt is told from its question by the document, by the question's beginning, or by a window."""

import pytest

from lkv.errors import IntegrationError
from lkv.integrations.splitting import Split, shared_prefix

CONTEXT = "One boat.\nTwo boats. Question: a trap?"
LONGBENCH = f"Answer the question.\n\n{CONTEXT}\n\nAnswer the question based on the above.\n\nQuestion: Boats?\nAnswer:"
# The ends of RULER's prompts as lm-evaluation-harness writes them.
RULER = {
    "niah_single_1": "\nWhat is the special magic number for old-quay mentioned in the provided text?",
    "niah_multivalue": "\nWhat are all the special magic numbers for old-quay mentioned in the provided text?",
    "ruler_vt": "\nQuestion: Find all variables that are assigned the value 41 in the text above.",
    "ruler_cwe": "\nQuestion: What are the 10 most common words in the above list?",
    "ruler_fwe": "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three?",
    "ruler_qa_squad": "\n\nAnswer the question based on the given documents. Only give me it.\n\nQuestion: Boats?",
}


@pytest.mark.parametrize("task", ["longbench_qasper", "longbench_gov_report_e", "longbench2_academic_single"])
def test_longbench_has_its_context_in_a_field(task):
    told_by, end = Split().end(task, LONGBENCH, {"context": CONTEXT + "\n", "question": "Boats?"})
    assert told_by == "field" and LONGBENCH[end:].startswith("\n\nAnswer the question based on the above.")


@pytest.mark.parametrize("task", RULER)
def test_ruler_s_question_is_known_by_its_beginning(task):
    # What precedes the texts says the same, and an example with a question may stand before.
    prompt = f"Answer the question based on the given documents. {RULER[task]}\n{CONTEXT}{RULER[task]} Answer:"
    told_by, end = Split().end(task, prompt, {"input": prompt})
    assert told_by == "marker" and prompt[end:] == RULER[task] + " Answer:"


def test_what_is_asked_for_comes_before_what_is_known():
    document = {"context": CONTEXT, "question": "Boats?"}
    told_by, end = Split(field="question").end("longbench_qasper", LONGBENCH, document)
    assert told_by == "field" and LONGBENCH[end:] == "\nAnswer:"
    told_by, end = Split(marker=r"Question: \w+\?").end("longbench_qasper", LONGBENCH, document)
    assert told_by == "marker" and LONGBENCH[end:] == "Question: Boats?\nAnswer:"


def test_other_tasks_have_a_window():
    assert Split().end("hellaswag", LONGBENCH, {}) == ("window", None)


def test_what_cannot_be_told_apart_is_said():
    with pytest.raises(IntegrationError, match="no text in a field 'passage'; its fields are context, question"):
        Split(field="passage").end("squad", LONGBENCH, {"context": CONTEXT, "question": "Boats?"})
    with pytest.raises(IntegrationError, match="does not stand in the prompt as it is; give question_marker"):
        Split(field="context").end("squad", LONGBENCH, {"context": "other words"})
    with pytest.raises(IntegrationError, match="is not in the prompt; give context_field"):
        Split(marker="Frage:").end("squad", LONGBENCH, {})
    with pytest.raises(IntegrationError, match="give one"):
        Split(field="context", marker="Question")
    with pytest.raises(IntegrationError, match="no regular expression"):
        Split(marker="(")
    for window in (0, 1.5, "8"):
        with pytest.raises(IntegrationError, match="at least one token"):
            Split(window=window)


def test_ids_in_common():
    pairs = [([1, 2, 3], [1, 2]), ([1, 2], [1, 3]), ([], [1]), ([1], [1])]
    assert [shared_prefix(*pair) for pair in pairs] == [2, 1, 0, 1]
