"""A multi-turn chat about a compressed text."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from lkv.context.context import Context
from lkv.context.generation import (
    answer_length,
    check_not_set,
    check_options,
    decode_answer,
    end_tokens,
    generate,
    is_truncated,
    printed,
    stream_text,
)
from lkv.context.input_checks import check_text
from lkv.errors import CacheError, check_count
from lkv.hf.cache_layers import crop_to
from lkv.utils.prompts import decode_tail, encode_next_question, encode_question


class Turn(NamedTuple):
    """A question and its answer; `start` is the number of tokens before it, the text's included."""

    question: str
    answer: str
    start: int


class Chat:
    """A conversation about one compressed text: every question sees all earlier turns.

    The turns are appended to a copy of the context's cache until `undo` removes them; `copy.deepcopy` branches off. If
    the context has `decode_eviction`, turns are evicted from as well, and none of them can be removed. A chat is
    thread-safe: a question waits until the answer that is being generated ends, and follows it.

    Attributes:
        turns: The turns so far.
        cache: The cache of text and turns.
        answer_tokens: Tokens of the last answer.
        is_truncated: Whether the last answer was cut off at its maximum length.
    """

    def __init__(self, context: Context):
        """Start a chat about a context, without changing the context.

        Raises:
            CacheError: For anything but a compressed context.
        """
        if not isinstance(context, Context):
            raise CacheError(f"a chat is about a Context, not a {type(context).__name__}; make one with lkv.compress.")
        self._context = context.fork()
        self._model, self._tokenizer, self._ids = context.model, context.tokenizer, list(context.ids)
        self.cache = self._context.cache
        self.turns: list[Turn] = []
        self._is_interrupted = False  # whether the cache has tokens of an answer that failed
        self.answer_tokens, self.is_truncated = 0, False

    def ask(self, question: str, max_new_tokens: int | None = None, stream: bool = False, **generation: object) -> str:
        """Answer a question after all turns so far; arguments and errors as in `Context.ask`.

        If it fails, the turns are unchanged. With `decode_eviction`, an answer that fails midway ends the chat.
        """
        options = printed(self._tokenizer, generation) if stream else generation
        return self._answer(question, max_new_tokens, **options)

    def stream(self, question: str, max_new_tokens: int | None = None, **generation: object) -> Iterator[str]:
        """Answer a question piece by piece.

        Closing the iterator ends the answer; its pieces so far stay as the turn's answer.
        """
        check_not_set("stream()", generation, "streamer", "stopping_criteria")
        self._prepare(question, max_new_tokens, generation)  # raises errors here
        return stream_text(self._tokenizer, partial(self._answer, question, max_new_tokens, **generation))

    def undo(self, turns: int = 1) -> None:
        """Remove the last `turns` turns.

        In models with sliding-window or recurrent layers, the next answer reads the turns before them again.

        Raises:
            CacheError: If there are fewer, or the cache evicts from turns.
        """
        with self._context._exclusive():
            problem = f"{turns!r} turns cannot be undone: there are {len(self.turns)}; give 0 to that."
            turns = check_count(turns, CacheError(problem), 0, len(self.turns))
            if turns and not self.cache.is_rewindable:
                raise CacheError(
                    "decode_eviction has evicted from text and turns together, so no turn can be removed; go back to a "
                    "copy.deepcopy() of the chat made before, or compress without decode_eviction."
                )
            if turns:
                start = self.turns[-turns].start
                del self.turns[-turns:], self._ids[start:]
                self._crop(start)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Chat":
        # Another branch of the conversation; the model is not copied.
        with self._context._exclusive():
            chat = Chat(self._context)
            chat.turns, chat._ids = list(self.turns), list(self._ids)
        return chat

    def nbytes(self) -> int:
        """Return the bytes of k and v of the text and all turns."""
        return self._context.nbytes()

    def _prepare(self, question: str, length: int | None, options: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """Return the ids of everything up to the answer, and the options of generate."""
        check_text(question, "the question", "ask something about the text")
        check_options(self._model, self.cache, options)
        if self._is_interrupted:
            raise CacheError(
                "an earlier answer failed midway, and with decode_eviction its tokens cannot be removed; make a new "
                "Chat of the context."
            )
        encode = encode_next_question if self.turns else partial(encode_question, kind=self._context.kind)
        ids = self._ids + encode(self._tokenizer, question, decode_tail(self._tokenizer, self._ids))
        return ids, {"max_new_tokens": answer_length(self._model, len(ids), length, options), **options}

    def _answer(self, question: str, max_new_tokens: int | None, **generation: Any) -> str:
        with self._context._exclusive():
            ids, options = self._prepare(question, max_new_tokens, generation)
            start, length = len(self._ids), self.cache.get_seq_length()
            try:
                answer = generate(self._model, self._tokenizer, [ids], 0, self.cache, **options)[0].tolist()
            except BaseException:
                self._crop(length)
                raise
            self.answer_tokens = len(answer)
            self.is_truncated = is_truncated(self._model, answer, options["max_new_tokens"], options)
            text = decode_answer(self._tokenizer, answer)
            # The answer's last token is not in the cache. If it is an end token, the next turn's template contains it.
            self._ids = ids + (answer[:-1] if answer[-1] in end_tokens(self._model, options) else answer)
            self.turns.append(Turn(question, text, start))
            return text

    def _crop(self, length: int) -> None:
        """Remove all tokens after the first `length`; windows and states cannot be cropped, only restored."""
        if self.cache.is_shareable:
            crop_to(self.cache, length)
        elif not self.cache.is_rewindable:
            self._is_interrupted = self.cache.get_seq_length() > length
        else:
            self._context._rewind()

    def __repr__(self) -> str:
        return f"<Chat of {len(self.turns)} turns, {len(self._ids):,} tokens, about {self._context!r}>"
