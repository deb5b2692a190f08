"""Variable tracking: one chain of assignments in noise, after a worked example."""

import random
import string
from itertools import pairwise

from lkv.evaluation.ruler.definitions import NOISE, VARIABLE_TRACKING
from lkv.evaluation.ruler.draft import Draft
from lkv.evaluation.ruler.words import distinct

_HOPS = 4
_LETTERS, _EXAMPLE_LETTERS = 5, 3
# The worked example alone, up to its answer, may take this many tokens.
EXAMPLE_TOKENS = 500
# Each assignment has a line of its own to stand before.
LEAST_LINES = _HOPS + 1


def draft(seed: str, example_lines: int) -> Draft:
    """A chain of four hops behind a worked example of `example_lines` noise lines. One unit is a noise line."""
    rng = random.Random(seed)
    # No variable may be named like the keyword, and the two values must differ.
    taken = {"VAR"}
    shown = _text(rng, example_lines, *_chain(rng, _EXAMPLE_LETTERS, taken))
    names, value = _chain(rng, _LETTERS, taken)
    question, prefix = _question(value)
    return Draft(
        context=lambda units: shown + _context(random.Random(f"{seed}-places"), units, names, value),
        question=question,
        answer_prefix=prefix,
        answers=tuple(names),
        least=LEAST_LINES,
    )


def example(lines: int) -> str:
    """A worked example of so many noise lines up to its answer; all have about the same number of tokens."""
    rng = random.Random("example")
    names, value = _chain(rng, _EXAMPLE_LETTERS, {"VAR"})
    return _context(rng, lines, names, value) + "".join(_question(value))


def _text(rng: random.Random, lines: int, names: list[str], value: str) -> str:
    return _context(rng, lines, names, value) + "".join(_question(value)) + " " + " ".join(names) + "\n\n"


def _chain(rng: random.Random, letters: int, taken: set[str]) -> tuple[list[str], str]:
    names = distinct(rng, string.ascii_uppercase, letters, _HOPS + 1, taken)
    while (value := str(rng.randrange(10_000, 99_999))) in taken:
        pass
    taken.add(value)
    return names, value


def _context(rng: random.Random, lines: int, names: list[str], value: str) -> str:
    # The space after each hop is the benchmark's own.
    hops = [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]
    text = [NOISE] * lines
    for i, line in enumerate(sorted(rng.sample(range(lines), len(names)))):
        text.insert(line + i, [f"VAR {names[0]} = {value}", *hops][i])
    return VARIABLE_TRACKING.before_question.format(context="\n".join(text))


def _question(value: str) -> tuple[str, str]:
    fields = {"query": value, "count": _HOPS + 1}
    return VARIABLE_TRACKING.question.format(**fields), VARIABLE_TRACKING.prefix.format(**fields)
