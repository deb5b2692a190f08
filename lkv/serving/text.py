"""An answer's ids as text that grows."""

from typing import Any

_INCOMPLETE = "\ufffd"


class IncrementalDetokenizer:
    """The text of ids that come bit by bit: only what can no longer change is given out.

    The pieces together are the text that `Context.ask` gives: without white space at its ends, cut before the first of
    `stops`.
    """

    def __init__(self, tokenizer: Any, stops: list[str]):
        self._tokenizer, self._stops = tokenizer, stops
        self._given = 0
        self.stopped = False

    def more(self, ids: list[int], ended: bool) -> str:
        """What is new of the text of `ids`, all there are so far."""
        text = self._tokenizer.decode(ids, skip_special_tokens=True).lstrip()
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self.stopped, text = True, text[: min(starts)]
        text = text.rstrip() if ended or starts else text[: self._certain(text)]
        piece = text[self._given :]
        self._given += len(piece)
        return piece

    def _certain(self, text: str) -> int:
        """How much of `text` stays whatever follows: no half character, no white space at the end, no begun stop."""
        begun = (len(text) - size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return len(text[: min([len(text), *begun])].rstrip(_INCOMPLETE).rstrip())
