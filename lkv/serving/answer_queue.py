"""The request queue of a server: limits on open requests, and the selection of batches."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lkv.context.context import Context
from lkv.context.generation import answer_length
from lkv.errors import BusyError
from lkv.hf.attention import has_length_dependent_rope
from lkv.hf.positions import check_frequencies
from lkv.serving.answer import Answer, SamplingParams

# Rows of a batch times the square of its longest question: attention over questions takes memory in proportion.
_MAX_SCORES = 2**22


class AnswerQueue:
    """Return requests about contexts of one model. Contexts take turns. It may be used from several threads."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, requests: int, rows: int, memory_bytes: int
    ):
        """Create an empty queue.

        Args:
            model: The model that answers.
            tokenizer: Its tokenizer.
            requests: The maximum number of open requests.
            rows: The maximum number of requests in a batch.
            memory_bytes: Memory of the contexts of open requests; one context may take more.
        """
        self.model, self.tokenizer = model, tokenizer
        self._is_rope_by_length = has_length_dependent_rope(model)
        self._requests, self._rows, self._memory = requests, rows, memory_bytes
        self._changed = threading.Condition()
        self._waiting: OrderedDict[Context | None, deque[Answer]] = OrderedDict()
        self._open: set[Answer] = set()
        self._is_stopping = self._is_stopped = False

    @property
    def open(self) -> int:
        """Requests that are being answered or wait."""
        with self._changed:
            self._open = {answer for answer in self._open if not answer.done.is_set()}
            return len(self._open)

    def submit(
        self,
        question: list[int],
        context: Context | None = None,
        params: SamplingParams | None = None,
        notify: Callable[[], None] | None = None,
    ) -> Answer:
        """Queue a question.

        Args:
            question: Its ids.
            context: What it is about, if anything.
            params: How the answer is generated, greedily by default.
            notify: Called after every change of the answer, in the worker's thread.

        Raises:
            PromptError: If question and answer do not fit.
            BusyError: If too many requests are open, their contexts take too much memory, or the worker is stopping.
        """
        read = 0 if context is None else context.tokens
        check_frequencies(self.model.config.get_text_config(decoder=True), read, read + len(question))
        params = params or SamplingParams()
        length = answer_length(self.model, read + len(question), params.max_tokens)
        answer = Answer(self.tokenizer, question, context, params._replace(max_tokens=length), notify)
        with self._changed:
            self.check_capacity()
            contexts = {other.context for other in (*self._open, answer) if other.context is not None}
            if len(contexts) > 1 and sum(context.nbytes() for context in contexts) > self._memory:
                raise BusyError("the contexts of open requests fill the memory for contexts; ask again later.")
            self._open.add(answer)
            self._enqueue(answer)
        return answer

    def check_capacity(self) -> None:
        """Raise BusyError if as many requests are open as are allowed, or the worker is stopping."""
        with self._changed:
            if self._is_stopping:
                raise BusyError("the server is stopping; ask again when it runs.")
            if self.open >= self._requests:
                raise BusyError(f"{self.open} requests are open, as many as are allowed; ask again later.")

    def cancel(self, answer: Answer) -> None:
        """End an answer with its current text; its row leaves the batch with the current token."""
        answer.finish("cancelled")
        with self._changed:
            self._open.discard(answer)
            waiting = self._waiting.get(answer.context)
            if waiting is not None and answer in waiting:
                waiting.remove(answer)
                if not waiting:
                    del self._waiting[answer.context]

    def close(self) -> None:
        """Take no more requests."""
        with self._changed:
            self._is_stopping = True

    def drop_all(self) -> None:
        """End all requests with the text that they have, and make `next_batch` return none."""
        with self._changed:
            self._is_stopped = True
            rest = list(self._open)
            self._waiting.clear()
            self._changed.notify_all()
        for answer in rest:
            answer.finish("length", "the server was stopped before this answer was complete; ask again when it runs.")

    def put_back(self, batch: list[Answer]) -> None:
        """Close the requests of a batch that are answered, and queue the others again."""
        with self._changed:
            for answer in batch:
                if answer.done.is_set():
                    self._open.discard(answer)
                elif not self._is_stopped:
                    self._enqueue(answer)

    def _enqueue(self, answer: Answer) -> None:
        self._waiting.setdefault(answer.context, deque()).append(answer)
        self._changed.notify_all()

    def next_batch(self) -> list[Answer]:
        """Return requests about the next context in turn; none if the worker is stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_stopped)
            if self._is_stopped:
                return []
            context, waiting = self._waiting.popitem(last=False)
            batch, rows = [waiting.popleft()], self._rows
            cache = None if context is None else context.cache
            if cache is None:
                # Without a context a short conversation would get the rotations of a long one.
                rows = 1 if self._is_rope_by_length else rows
            elif not cache.is_shareable:
                rows = 1
            longest = len(batch[0].row)
            while waiting and len(batch) < rows and not (batch[0].is_retried or waiting[0].is_retried):
                longest = max(longest, len(waiting[0].row))
                if (len(batch) + 1) * longest**2 > _MAX_SCORES:
                    break
                batch.append(waiting.popleft())
            if waiting:
                self._waiting[context] = waiting
            return batch
