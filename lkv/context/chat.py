"""A chat about a compressed text: questions that follow one another."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from lkv.context.context import Context, check_text
from lkv.context.generation import answer_length, check_options, ends_of, generated, is_cut_off, streamed
from lkv.errors import CacheError
from lkv.integrations.transformers.cache_layers import crop_to
from lkv.utils.prompts import encode_next_question, encode_question


class Turn(NamedTuple):
    """A question and its answer; `start`: tokens before it, the text's included."""

    question: str
    answer: str
    start: int


class Chat:
    """Turns about one compressed text. They stay in the cache, a copy of the context's, until they are cut back.

    Every question is read after all turns before it, so "and the second one?" works. Use it from one thread.
    """

    def __init__(self, context: Context):
        """Raises CacheError for a context that is not compressed, or that cannot be cut back (sliding layers,
        decode_eviction)."""
        self._context = context.fork()
        self._model, self._tokenizer, self._ids = context.model, context.tokenizer, list(context.ids)
        self.cache = self._context.cache
        if not getattr(self.cache, "is_rewindable", False):
            raise CacheError("turns about this context could not be cut back; ask it with ask(), one by one.")
        self.turns: list[Turn] = []
        self.answer_tokens, self.is_truncated = 0, False  # of the last answer, as a Context tells

    def ask(self, question: str, max_new_tokens: int | None = None, **generation: Any) -> str:
        """The answer to `question` after all turns so far; arguments and errors as in `Context.ask`.

        Where it fails, the turns are as they were.
        """
        ids, options = self._prepared(question, max_new_tokens, generation)
        return self._answer(question, ids, **options)

    def stream(self, question: str, max_new_tokens: int | None = None, **generation: Any) -> Iterator[str]:
        """As `ask`, in pieces. Closing the iterator ends the answer; what came of it stays as the turn's answer."""
        ids, options = self._prepared(question, max_new_tokens, generation)

        def answer(**more: Any) -> None:
            self._answer(question, ids, **options | more)

        return streamed(self._tokenizer, answer)

    def undo(self, turns: int = 1) -> None:
        """Forget the last `turns` turns. Raises CacheError where there are not so many."""
        if type(turns) is not int or not 0 <= turns <= len(self.turns):
            raise CacheError(f"{turns!r} turns cannot be taken back: there are {len(self.turns)}; give 0 to that.")
        if turns:
            start = self.turns[-turns].start
            del self.turns[-turns:], self._ids[start:]
            crop_to(self.cache, start)

    def nbytes(self) -> int:
        """Bytes of k and v held for the text and all turns."""
        return self._context.nbytes()

    def _prepared(self, question: str, asked: int | None, options: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """Ids of everything up to the answer, and the options of generate; raises for what cannot be asked."""
        check_text(question, "the question", "ask something about the text")
        check_options(self._model, self.cache, options)
        tail = (encode_next_question if self.turns else encode_question)(self._tokenizer, question)
        ids = self._ids + tail
        return ids, {"max_new_tokens": answer_length(self._model, len(ids), asked, options), **options}

    def _answer(self, question: str, ids: list[int], **options: Any) -> str:
        start, held = len(self._ids), self.cache.get_seq_length()
        try:
            answer = generated(self._model, self._tokenizer, [ids], 0, self.cache, **options)[0].tolist()
        except BaseException:
            crop_to(self.cache, held)
            raise
        self.answer_tokens = len(answer)
        self.is_truncated = is_cut_off(self._model, answer, options["max_new_tokens"], options)
        text = self._tokenizer.decode(answer, skip_special_tokens=True).strip()
        # The last token was never read. One that ends the answer is written by the template of the next turn.
        self._ids = ids + (answer[:-1] if answer[-1] in ends_of(self._model, options) else answer)
        self.turns.append(Turn(question, text, start))
        return text

    def __repr__(self) -> str:
        return f"<Chat of {len(self.turns)} turns, {len(self._ids):,} tokens, about {self._context!r}>"
