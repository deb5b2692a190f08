"""Questions about documents of everyday life: how many are answered right by the full cache, and after compression?

python -m experiments.questions [--model NAME]    (writes questions.json, or questions-NAME.json)

The documents in `examples/questions` were written for this, with 46 questions whose answers stand in one place each. An
answer is right if it holds one of the accepted forms. Every text is compressed before its questions are known.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.bootstrap import bootstrap
from experiments.common import SUBJECT, Subject, parse_options, run_samples, subject_of
from lkv.context.compression import compress
from lkv.methods.registry import FULL

FOLDER = Path(__file__).parents[1] / "examples" / "questions"
METHODS = ["lkv", "snapkv"]
LENGTH = 40  # new tokens of an answer
Sample = dict[str, Any]


def main() -> None:
    options = parse_options(__doc__, "questions", **SUBJECT, methods=METHODS, memory=[0.1, 0.05], seed=0, out=Path)
    subject = subject_of(options, "questions")
    rows = [(FULL, 1.0), *((method, memory) for memory in options.memory for method in options.methods)]
    cases = {name: (name, questions) for name, questions in json.loads((FOLDER / "questions.json").read_text()).items()}
    run_samples("questions", options, cases, lambda *case: measure(subject, rows, *case), summarise, subject, "")


def measure(subject: Subject, rows: list[tuple[str, float]], name: str, questions: Sequence[Any]) -> Sample:
    """The answers of each method and budget to the `questions` about a document, and which are right."""
    text, answers = (FOLDER / name).read_text(), []
    for method, memory in rows:
        budget: dict[str, Any] = {} if method == FULL else {"memory": memory, "policy": subject.policy}
        context = compress(subject.model, subject.tokenizer, text, method=method, **budget)
        answers.append([context.ask(question, LENGTH) for question, _ in questions])
    right = [[is_right(a, forms) for a, (_, forms) in zip(own, questions, strict=True)] for own in answers]
    return {"rows": rows, "tokens": context.tokens, "answers": answers, "right": right}


def is_right(answer: str, forms: Sequence[str]) -> bool:
    """Whether an answer holds one of the accepted forms, in lower case."""
    return any(form in answer.lower() for form in forms)


def summarise(samples: list[Sample]) -> list[dict]:
    """Rows by method and budget: the share of right answers, and how many that the full cache knew were lost."""
    rows = []
    for index, (method, memory) in enumerate(samples[0]["rows"]):
        share = bootstrap([[float(right)] for sample in samples for right in sample["right"][index]])
        pairs = [pair for s in samples for pair in zip(s["right"][0], s["right"][index], strict=True)]
        row: dict[str, Any] = {"method": method, "memory": memory, **share._asdict(), "unit": "share of right answers"}
        row |= {"right": sum(own for _, own in pairs), "lost": sum(full and not own for full, own in pairs)}
        rows.append(row)
        print(f"{method:12} memory {memory:5} right {row['right']:3} of {share.n} lost {row['lost']}")
    return rows


if __name__ == "__main__":
    main()
