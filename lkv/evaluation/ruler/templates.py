"""RULER's 13 tasks as the benchmark defines them (Hsieh et al. 2024; templates: NVIDIA/RULER, Apache-2.0)."""

import re
from dataclasses import dataclass
from typing import NamedTuple

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
# From this length on, the common words task uses its full frequencies.
FULL_WORD_LIST = 4096


@dataclass(frozen=True)
class PromptTemplate:
    """The prompt that tasks of one kind share.

    The question begins where `question_starts` matches last in `template`, as kvpress cuts it; the text before it is
    context.
    """

    template: str
    answer_prefix: str
    question_starts: str
    max_new_tokens: int
    metric: str

    @property
    def context(self) -> str:
        """The part before the question, with the field {context} for the text."""
        return self.template[: self._question_start()]

    @property
    def question(self) -> str:
        """The question, with the space that the answer prefix begins with."""
        return self.template[self._question_start() :] + " " * self.answer_prefix.startswith(" ")

    @property
    def prefix(self) -> str:
        """The beginning of the answer."""
        return self.answer_prefix.removeprefix(" ")

    def _question_start(self) -> int:
        return [match.start() for match in re.finditer(self.question_starts, self.template)][-1]


NIAH = PromptTemplate(
    template="Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the "
    "provided text?",
    answer_prefix=" The special magic {kind} for {query} mentioned in the provided text are",
    question_starts=r"What (?:is|are all) the special magic",
    max_new_tokens=128,
    metric="string_match_all",
)
VARIABLE_TRACKING = PromptTemplate(
    template="Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above.",
    answer_prefix=" Answer: According to the chain(s) of variable assignment in the text above, {count} variables are "
    "assigned the value {query}, they are: ",
    question_starts="Question: Find all variables that are assigned the value",
    max_new_tokens=30,
    metric="string_match_all",
)
COMMON_WORDS = PromptTemplate(
    template="Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
    "that appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?",
    answer_prefix=" Answer: The top 10 words that appear most often in the list are:",
    question_starts=r"Question: What are the 10 most common words in the above list\?",
    max_new_tokens=120,
    metric="string_match_all",
)
FREQUENT_WORDS = PromptTemplate(
    template="Read the following coded text and track the frequency of each coded word. Find the three most frequently "
    "appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What "
    "are the three most frequently appeared words in the above coded text?",
    answer_prefix=" Answer: According to the coded text above, the three most frequently appeared words are:",
    question_starts=r"Question: Do not provide any explanation\.",
    max_new_tokens=50,
    metric="string_match_all",
)
QUESTIONS = PromptTemplate(
    template="Answer the question based on the given documents. Only give me the answer and do not output any other "
    "words.\n\nThe following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. "
    "Only give me the answer and do not output any other words.\n\nQuestion: {query}",
    answer_prefix=" Answer:",
    question_starts=r"Answer the question based on the given documents\.",
    max_new_tokens=32,
    metric="string_match_part",
)


class NeedleTask(NamedTuple):
    """The haystack and the needles of a task."""

    haystack: str  # "noise", "essay", "needle"
    key_kind: str  # "words", "uuids"
    value_kind: str  # "numbers", "uuids"
    keys: int = 1
    values: int = 1  # of each key
    queries: int = 1  # keys to ask for


NEEDLE_TASKS = {
    "niah_single_1": NeedleTask("noise", "words", "numbers"),
    "niah_single_2": NeedleTask("essay", "words", "numbers"),
    "niah_single_3": NeedleTask("essay", "words", "uuids"),
    "niah_multikey_1": NeedleTask("essay", "words", "numbers", keys=4),
    "niah_multikey_2": NeedleTask("needle", "words", "numbers"),
    "niah_multikey_3": NeedleTask("needle", "uuids", "uuids"),
    "niah_multivalue": NeedleTask("essay", "words", "numbers", values=4),
    "niah_multiquery": NeedleTask("essay", "words", "numbers", keys=4, queries=4),
}
QUESTION_TASKS = {"qa_1": "squad", "qa_2": "hotpot"}
TASKS = (*NEEDLE_TASKS, "vt", "cwe", "fwe", *QUESTION_TASKS)
