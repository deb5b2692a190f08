"""The official metrics of LongBench (THUDM/LongBench, metrics.py and eval.py) and RULER (NVIDIA/RULER, scripts/eval).

Each value of `METRICS` maps (answer, true answers, classes) to a score in 0..100.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any

from lkv.errors import DataError
from lkv.evaluation.example import Example
from lkv.utils.extras import optional_import

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(example: Example, answer: str) -> float:
    """Score `answer` to `example`, in 0..100. Raises DataError for an unknown metric."""
    if example.metric not in METRICS:
        raise DataError(f"there is no metric {example.metric!r}; use one of {', '.join(METRICS)}.")
    if example.first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    return METRICS[example.metric](answer, example.answers, example.classes)


def require_rouge() -> Any:
    """Import the package of ROUGE-L. Raises MissingPackageError if it is missing."""
    with optional_import("evals", "ROUGE-L"):
        from rouge import Rouge
    return Rouge


def _qa_f1(answer: str, truth: str, classes: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over the words, ignoring their order."""
    answer_words, true_words = _words(answer), _words(truth)
    common = (answer_words & true_words).total()
    return 2 * common / (answer_words.total() + true_words.total()) if common else 0.0


def _words(text: str) -> Counter[str]:
    """Return the words in lower case without ASCII punctuation and English articles."""
    return Counter(re.sub(r"\b(?:a|an|the)\b", " ", text.lower().translate(_NO_PUNCTUATION)).split())


def _rouge_l(answer: str, truth: str, classes: Sequence[str]) -> float:
    """Compute summary-level ROUGE-L F1 with the package `rouge` (others, such as rouge-score, differ)."""
    rouge = require_rouge()
    try:
        return rouge(metrics=["rouge-l"]).get_scores(answer, truth)[0]["rouge-l"]["f"]
    except (ValueError, RecursionError):
        # The official score of what the package refuses: texts without words, sentences too long for its recursion.
        return 0.0


def _classification(answer: str, truth: str, classes: Sequence[str]) -> float:
    """1 / (number of classes in the answer) if the true one is among them; parts of the true one's name do not count.

    The official loop removes from the list that it iterates over, and so skips the class after a removed one.
    """
    named = [name for name in classes if name in answer]
    index = 0
    while index < len(named):
        if named[index] in truth and named[index] != truth:
            named.remove(named[index])
        index += 1
    return 1 / len(named) if truth in named else 0.0


def _count(answer: str, truth: str, classes: Sequence[str]) -> float:
    """Return the share of the numbers in the answer that equal the true one."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(truth) / len(numbers) if numbers else 0.0


def _retrieval(answer: str, truth: str, classes: Sequence[str]) -> float:
    """Return the share of the numbers in the answer that equal the true paragraph's."""
    match = re.search(r"Paragraph (\d+)", truth)
    if match is None:
        raise DataError(f"the true answer {truth!r} names no paragraph; it must contain 'Paragraph' and a number.")
    return _count(answer, match[1], classes)


def _code_sim(answer: str, truth: str, classes: Sequence[str]) -> float:
    """Return the edit similarity, in whole per cent, of the first line without a backtick, `#` or `//`.

    The official script uses fuzzywuzzy's ratio, which is difflib's without python-Levenshtein, and LongBench does not
    require that. Faster libraries measure another distance, which differs by several points.
    """
    lines = answer.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, code, truth).ratio()) / 100


def _contained(answer: str, truths: Sequence[str]) -> list[bool]:
    """Return whether the answer contains each true one, ignoring case; control characters are line breaks (RULER)."""
    text = re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()
    return [truth.lower() in text for truth in truths]


def _string_match_all(answer: str, truths: Sequence[str], classes: Sequence[str]) -> float:
    """Return the share of the true answers that the answer contains."""
    matches = _contained(answer, truths)
    return 100 * sum(matches) / len(matches)


def _best(metric: Callable[[str, str, Sequence[str]], float]) -> Callable[[str, Sequence[str], Sequence[str]], float]:
    """Return the highest score over the true answers of a metric in 0..1 that takes one of them."""
    return lambda answer, truths, classes: 100 * max(metric(answer, truth, classes) for truth in truths)


METRICS: dict[str, Callable[[str, Sequence[str], Sequence[str]], float]] = {
    "qa_f1": _best(_qa_f1),
    "rouge_l": _best(_rouge_l),
    "classification": _best(_classification),
    "count": _best(_count),
    "retrieval": _best(_retrieval),
    "code_sim": _best(_code_sim),
    "string_match_all": _string_match_all,
    "string_match_part": lambda answer, truths, classes: 100.0 * any(_contained(answer, truths)),
}
