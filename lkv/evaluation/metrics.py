"""The official metrics of LongBench and RULER, in 0..100.

LongBench's are those of THUDM/LongBench (metrics.py, eval.py), RULER's those of NVIDIA/RULER (scripts/eval). Each value
of `METRICS` maps (answer, true answers, classes) to a score; `score` also applies the rule of the first line.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any

from lkv.errors import DataError, IntegrationError
from lkv.evaluation.example import Example

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(example: Example, answer: str) -> float:
    """The score of `answer` to `example`, in 0..100. Raises DataError for an unknown metric."""
    if example.metric not in METRICS:
        raise DataError(f"there is no metric {example.metric!r}; use one of {', '.join(METRICS)}.")
    if example.first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    return METRICS[example.metric](answer, example.answers, example.classes)


def require_rouge() -> Any:
    """The class behind ROUGE-L. Raises IntegrationError if its package is missing."""
    try:
        from rouge import Rouge
    except ImportError as error:
        raise IntegrationError(
            f"ROUGE-L needs the package rouge ({error}); run `pip install 'lkv-cache[evals]'`."
        ) from error
    return Rouge


def _qa_f1(answer: str, truth: str, classes: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over the words, whatever their order."""
    given, true = _words(answer), _words(truth)
    common = (given & true).total()
    return 2 * common / (given.total() + true.total()) if common else 0.0


def _words(text: str) -> Counter[str]:
    """Words in lower case without ASCII punctuation and English articles."""
    return Counter(re.sub(r"\b(?:a|an|the)\b", " ", text.lower().translate(_NO_PUNCTUATION)).split())


def _rouge_l(answer: str, truth: str, classes: Sequence[str]) -> float:
    """Summary-level ROUGE-L F1 of the package `rouge` (others, rouge-score among them, give other numbers)."""
    rouge = require_rouge()
    try:
        return rouge(metrics=["rouge-l"]).get_scores(answer, truth)[0]["rouge-l"]["f"]
    except (ValueError, RecursionError):
        # The official score of what the package refuses: texts without a word, sentences too long for its recursion.
        return 0.0


def _classification(answer: str, truth: str, classes: Sequence[str]) -> float:
    """1 / (classes named) if the true one is among them; a class within the true one's name does not count as named.

    The official loop removes from the list that it walks, and so overlooks the class after a removed one.
    """
    named = [name for name in classes if name in answer]
    index = 0
    while index < len(named):
        if named[index] in truth and named[index] != truth:
            named.remove(named[index])
        index += 1
    return 1 / len(named) if truth in named else 0.0


def _count(answer: str, truth: str, classes: Sequence[str]) -> float:
    """Share of the answer's numbers that equal the true one."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(truth) / len(numbers) if numbers else 0.0


def _retrieval(answer: str, truth: str, classes: Sequence[str]) -> float:
    """Share of the answer's numbers that equal that of the true paragraph."""
    match = re.search(r"Paragraph (\d+)", truth)
    if match is None:
        raise DataError(f"the true answer {truth!r} names no paragraph; it must contain 'Paragraph' and a number.")
    return _count(answer, match[1], classes)


def _code_sim(answer: str, truth: str, classes: Sequence[str]) -> float:
    """Edit similarity, in whole per cent, of the first line that holds no backtick, `#` or `//`.

    The official script takes fuzzywuzzy's ratio, which is difflib's wherever python-Levenshtein is not installed, and
    LongBench's requirements do not name it. Faster libraries measure another distance, and differ by several points.
    """
    lines = answer.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, code, truth).ratio()) / 100


def _contained(answer: str, truths: Sequence[str]) -> list[bool]:
    """Whether each true answer is contained, in any case; control characters count as line breaks, as in RULER."""
    text = re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()
    return [truth.lower() in text for truth in truths]


def _string_match_all(answer: str, truths: Sequence[str], classes: Sequence[str]) -> float:
    """Share of the true answers that are contained."""
    matches = _contained(answer, truths)
    return 100 * sum(matches) / len(matches)


def _string_match_part(answer: str, truths: Sequence[str], classes: Sequence[str]) -> float:
    """100 if any of the true answers is contained."""
    return 100.0 * any(_contained(answer, truths))


def _best(pair: Callable[[str, str, Sequence[str]], float]) -> Callable[[str, Sequence[str], Sequence[str]], float]:
    """The best over the true answers of a metric in 0..1 that takes one of them."""

    def best(answer: str, truths: Sequence[str], classes: Sequence[str]) -> float:
        return 100 * max(pair(answer, truth, classes) for truth in truths)

    return best


METRICS: dict[str, Callable[[str, Sequence[str], Sequence[str]], float]] = {
    "qa_f1": _best(_qa_f1),
    "rouge_l": _best(_rouge_l),
    "classification": _best(_classification),
    "count": _best(_count),
    "retrieval": _best(_retrieval),
    "code_sim": _best(_code_sim),
    "string_match_all": _string_match_all,
    "string_match_part": _string_match_part,
}
