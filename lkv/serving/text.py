"""The text of an answer while its ids are generated."""

from typing import Any

from tokenizers.decoders import DecodeStream

_INCOMPLETE = "\ufffd"


class IncrementalDetokenizer:
    """Decodes ids as they come and gives out only text that can no longer change.

    All pieces together are the text that `Context.ask` gives, without white space at its ends, cut before the first of
    `stops`. Each step reads the new tokens alone, with tokenizers' DecodeStream; a tokenizer that is not backed by it,
    or that cleans up spaces afterwards, decodes all ids again.
    """

    def __init__(self, tokenizer: Any, stops: list[str]):
        self._tokenizer, self._stops = tokenizer, stops
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):
            self._backend = None
        self._stream = DecodeStream(skip_special_tokens=True)
        self._longest = max(map(len, stops), default=0)
        self._text = ""
        self._read = self._sent = 0  # ids, characters
        self.is_stopped = False

    def push(self, ids: list[int], ended: bool) -> str:
        """The new text, given all ids so far."""
        text = self._decode(ids, ended).lstrip()
        start = max(0, self._sent - self._longest)
        places = [place for stop in self._stops if (place := text.find(stop, start)) >= 0]
        if places:
            self.is_stopped, text = True, text[: min(places)]
        text = text.rstrip() if ended or places else text[: self._certain(text)]
        piece = text[self._sent :]
        self._sent += len(piece)
        return piece

    def _decode(self, ids: list[int], ended: bool) -> str:
        if self._backend is None or ended:
            return self._tokenizer.decode(ids, skip_special_tokens=True)
        for token in ids[self._read :]:
            self._text += self._stream.step(self._backend, token) or ""
        self._read = len(ids)
        return self._text

    def _certain(self, text: str) -> int:
        """How many characters of `text` stay: all but half characters, trailing white space and a begun stop."""
        begun = (len(text) - size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return len(text[: min([len(text), *begun])].rstrip(_INCOMPLETE).rstrip())
