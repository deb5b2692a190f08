"""An example before its length is known, and the search for the length."""

from collections.abc import Callable
from typing import NamedTuple


class Draft(NamedTuple):
    """One example whose context can be made of any number of units (noise lines, words, documents).

    The same number always gives the same text, and more units give a longer one.
    """

    context: Callable[[int], str]
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    least: int
    most: int | None = None


class Fit(NamedTuple):
    """A number of units and the tokens that it takes."""

    units: int
    tokens: int


def largest(size: Callable[[int], int], limit: int, least: int, most: int | None = None) -> Fit:
    """The most units whose `size` (tokens, growing with the units) stays within `limit`.

    The search ends early once less than 1/256 of `limit` is left over. Where even `least` units exceed the limit, they
    are returned with their size. Two straight lines through known sizes and one bisection take turns, so a long text is
    measured about five times, and at worst three times as often as by bisection alone.
    """
    aim, enough = limit - limit // 512, limit - limit // 256
    low = first = Fit(least, size(least))
    high: Fit | None = None
    step = 0
    while low.tokens < enough and low.units != most and (high is None or high.units - low.units > 1):
        if high is None and low is first:
            guess = 2 * least + 16
        elif high is None:
            slope = max(1, low.tokens - first.tokens) / (low.units - first.units)
            guess = max(low.units + int((aim - low.tokens) / slope), low.units + 1)
            guess = 2 * low.units if step % 3 == 2 else min(guess, 64 * low.units)
        elif step % 3 == 2:
            guess = (low.units + high.units) // 2
        else:
            part = (aim - low.tokens) / max(1, high.tokens - low.tokens)
            guess = min(high.units - 1, max(low.units + 1, low.units + int(part * (high.units - low.units))))
        guess = guess if most is None else min(guess, most)
        tried = Fit(guess, size(guess))
        if tried.tokens <= limit:
            low = tried
        else:
            high = tried
        step += 1
    return low
