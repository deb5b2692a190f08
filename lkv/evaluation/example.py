"""One item of a benchmark, whatever the benchmark: what is compressed, what is asked, what counts as right."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A context that is compressed before its question is known."""

    suite: str  # "ruler", "longbench"
    task: str
    number: int  # within the task, stable: the key by which runs resume and methods are paired
    context: str
    question: str
    answer_prefix: str  # what the answer begins with; given to the model, not scored
    answers: tuple[str, ...]
    max_new_tokens: int
    metric: str  # a name in scores.METRICS
    length: int | None = None  # tokens asked for, where the benchmark is made to measure
    classes: tuple[str, ...] = ()  # every label, for classification
    first_line: bool = False  # only the first line of the answer is scored
    stop_at_newline: bool = False
    chat: bool = True  # whether the official script of the benchmark puts this task into the chat template
