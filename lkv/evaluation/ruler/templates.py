"""RULER's 13 tasks as the benchmark defines them (Hsieh et al. 2024; templates: NVIDIA/RULER, Apache-2.0)."""

from typing import NamedTuple

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
# From this length on, the common words task uses its full frequencies.
FULL_WORD_LIST = 4096


class PromptTemplate(NamedTuple):
    """The prompt that tasks of one kind share, cut as kvpress cuts it."""

    context: str  # with the field {context} for the text
    question: str  # with the space that follows it
    prefix: str  # the beginning of the answer
    max_new_tokens: int
    metric: str = "string_match_all"


NIAH = PromptTemplate(
    context="Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {kind} afterwards.\n{context}\n",
    question="What are all the special magic {kind} for {query} mentioned in the provided text? ",
    prefix="The special magic {kind} for {query} mentioned in the provided text are",
    max_new_tokens=128,
)
VARIABLE_TRACKING = PromptTemplate(
    context="Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n",
    question="Question: Find all variables that are assigned the value {query} in the text above. ",
    prefix="Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned "
    "the value {query}, they are: ",
    max_new_tokens=30,
)
COMMON_WORDS = PromptTemplate(
    context="Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
    "that appear most often.\n{context}\n",
    question="Question: What are the 10 most common words in the above list? ",
    prefix="Answer: The top 10 words that appear most often in the list are:",
    max_new_tokens=120,
)
FREQUENT_WORDS = PromptTemplate(
    context="Read the following coded text and track the frequency of each coded word. Find the three most frequently "
    "appeared coded words. {context}\n",
    question="Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
    "frequently appeared words in the above coded text? ",
    prefix="Answer: According to the coded text above, the three most frequently appeared words are:",
    max_new_tokens=50,
)
QUESTIONS = PromptTemplate(
    context="Answer the question based on the given documents. Only give me the answer and do not output any other "
    "words.\n\nThe following are given documents.\n\n{context}\n\n",
    question="Answer the question based on the given documents. Only give me the answer and do not output any other "
    "words.\n\nQuestion: {query} ",
    prefix="Answer:",
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
