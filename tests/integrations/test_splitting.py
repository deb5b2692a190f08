"""The context of a prompt ends where a field of the document ends, the question begins, or a window begins."""

import pytest

from lkv.errors import IntegrationError
from lkv.integrations.splitting import ContextSplit, common_prefix_length

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
def test_longbench_context_is_a_field(task):
    split_by, end = ContextSplit().context_end(task, LONGBENCH, {"context": CONTEXT + "\n", "question": "Boats?"})
    assert split_by == "field" and LONGBENCH[end:].startswith("\n\nAnswer the question based on the above.")


@pytest.mark.parametrize("task", RULER)
def test_ruler_question_is_found_by_its_marker(task):
    # The instruction before the texts uses the same words, and a solved example may come first.
    prompt = f"Answer the question based on the given documents. {RULER[task]}\n{CONTEXT}{RULER[task]} Answer:"
    split_by, end = ContextSplit().context_end(task, prompt, {"input": prompt})
    assert split_by == "marker" and prompt[end:] == RULER[task] + " Answer:"


def test_options_take_precedence_over_known_tasks_and_others_use_the_window():
    document = {"context": CONTEXT, "question": "Boats?"}
    for options, by, rest in (
        ({"context_field": "question"}, "field", "\nAnswer:"),
        ({"question_marker": r"Question: \w+\?"}, "marker", "Question: Boats?\nAnswer:"),
    ):
        split_by, end = ContextSplit(**options).context_end("longbench_qasper", LONGBENCH, document)
        assert split_by == by and LONGBENCH[end:] == rest
    assert ContextSplit().context_end("hellaswag", LONGBENCH, {}) == ("window", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_field": "passage"}, "no text in a field 'passage'; its fields are context, question"),
        ({"context_field": "context"}, "text of the field 'context' unchanged; give question_marker"),
        ({"question_marker": "Frage:"}, "is not in the prompt; give context_field"),
        ({"context_field": "context", "question_marker": "Question"}, "give one"),
        ({"question_marker": "("}, "no regular expression"),
        *(({"window": window}, "at least one token") for window in (0, 1.5, "8")),
    ],
)
def test_wrong_splits_are_refused(options, message):
    with pytest.raises(IntegrationError, match=message):
        ContextSplit(**options).context_end("squad", LONGBENCH, {"context": "other words", "question": "Boats?"})


def test_common_prefix_length():
    pairs = [([1, 2, 3], [1, 2]), ([1, 2], [1, 3]), ([], [1]), ([1], [1])]
    assert [common_prefix_length(*pair) for pair in pairs] == [2, 1, 0, 1]
