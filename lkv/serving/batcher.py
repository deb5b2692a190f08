"""The thread that answers requests: those about one context in one batch, for one turn."""

import logging
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from lkv.context.generation import end_tokens, generate, longest_answer
from lkv.serving.answer import Answer
from lkv.serving.answer_queue import AnswerQueue
from lkv.utils.fair_lock import FairLock

# Tokens that a batch generates before it makes way for requests that wait, and those that it reads again afterwards for
# each of them at most.
TURN_TOKENS, _READ_AGAIN = 32, 8
# Settings of a model's generation_config that depend on the whole of one answer, or on the ids before it.
_UNBATCHED = (
    "bad_words_ids suppress_tokens begin_suppress_tokens sequence_bias min_length min_new_tokens forced_bos_token_id "
    "forced_eos_token_id exponential_decay_length_penalty encoder_repetition_penalty encoder_no_repeat_ngram_size "
    "guidance_scale watermarking_config stop_strings no_repeat_ngram_size max_time"
).split()
_LOG = logging.getLogger(__name__)


class AnswerWorker(AnswerQueue):
    """Answers requests about contexts of one model in a thread of its own. It may be used from several threads.

    Requests about one context are generated in one batch, which reads the model's weights and the context once a step.
    While others wait, a batch makes way after `TURN_TOKENS` tokens, or more where its questions are long, and goes on
    when its context has the next turn; its questions, and the answers so far, are then read again.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        requests: int = 64,
        rows: int = 16,
        memory_bytes: int = 2**40,
    ):
        """Start the thread; the arguments are those of `AnswerQueue`."""
        names = [name for name in _UNBATCHED if getattr(model.generation_config, name, None)]
        if names:
            _LOG.warning("requests are answered one by one: generation_config sets %s.", ", ".join(names))
        super().__init__(model, tokenizer, requests, 1 if names else rows, memory_bytes)
        # Held while the model runs, because a pass changes such a model's rotations for all threads.
        self.passes: AbstractContextManager[Any] = FairLock() if self._is_rope_by_length else nullcontext()
        self._can_pause = not names
        self.tokens = self.failures = 0  # generated tokens, batches that raised
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are still being answered."""
        return self._thread.is_alive()

    def stop(self, seconds: float = 30.0) -> None:
        """Take no more requests, finish the open ones for up to `seconds`, then end the rest."""
        self.close()
        deadline = time.monotonic() + seconds
        while self.open and time.monotonic() < deadline and self.is_alive:
            time.sleep(0.01)
        self.drop_all()
        self._thread.join(30)

    def _work(self) -> None:
        while batch := self.next_batch():
            self._answer(batch)
            del batch  # contexts that no request follows any more are released

    def _answer(self, batch: list[Answer]) -> None:
        """Answer a batch for one turn. After an exception, its requests are retried one by one."""
        try:
            with self.passes:
                self._generate(batch)
        except BaseException as error:
            self.failures += 1
            _LOG.warning("%d requests could not be answered: %s", len(batch), error)
            for answer in batch:
                if len(batch) == 1:
                    answer.fail(error)
                answer.is_retried = True
        self.put_back(batch)

    def _generate(self, batch: list[Answer]) -> None:
        context = batch[0].context
        rows = [answer.row for answer in batch]
        before, longest = 0 if context is None else context.tokens, max(map(len, rows))
        length = min(
            longest_answer(self.model, before + longest), max(answer.length - len(answer.ids) for answer in batch)
        )
        turn = _Turn(self, batch, before + longest)
        options: dict[str, Any] = {
            "max_new_tokens": length,
            "stopping_criteria": StoppingCriteriaList([turn]),
            "prompt_lookup_num_tokens": None,
        }
        if any(answer.sampler for answer in batch):
            options["logits_processor"] = LogitsProcessorList([_Sampling(batch)])
        if context is None:
            generate(self.model, self.tokenizer, rows, 0, DynamicCache(config=self.model.config), **options)
        elif len(rows) == 1:
            # The answer is appended to the context's own cache, whose size counts while it stays in memory.
            context.complete(rows[0], keeps_slots=False, **options)
        else:
            context.batch_complete(rows, **options)
        if not turn.is_paused and turn.tokens < length:
            for answer in batch:
                answer.finish("stop")  # by the model's own settings

    def should_pause(self, tokens: int, least_tokens: int) -> bool:
        """Return whether a batch that has generated `tokens` makes way for requests that wait."""
        return self._is_stopped or (self._can_pause and tokens >= least_tokens and bool(self._waiting))


class _Turn(StoppingCriteria):
    """Passes the new tokens of a batch on, and ends rows that are done, or all rows when the turn is over."""

    def __init__(self, worker: AnswerWorker, batch: list[Answer], length: int):
        self._worker, self._batch, self._length = worker, batch, length
        self._least_tokens = max(TURN_TOKENS, max(len(answer.row) for answer in batch) // _READ_AGAIN)
        self._ends = end_tokens(worker.model, {})
        self.tokens, self.is_paused = 0, False

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        """Return which rows end [B], given all ids [B, T]."""
        new = input_ids[:, self._length :].tolist()
        self._length = input_ids.shape[1]
        self.tokens += len(new[0])
        for answer, tokens in zip(self._batch, new, strict=True):
            for token in tokens:
                if not answer.done.is_set():
                    self._worker.tokens += 1  # before the answer may end: who has it finds its tokens counted
                    answer.push(token, token in self._ends)
        self.is_paused = self._worker.should_pause(self.tokens, self._least_tokens)
        ended = [self.is_paused or answer.done.is_set() for answer in self._batch]
        return torch.tensor(ended, device=input_ids.device)


class _Sampling(LogitsProcessor):
    """Leaves of each row that samples only the token that it has drawn."""

    def __init__(self, batch: list[Answer]):
        self._batch = batch

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [B, V], with all tokens but the drawn ones at -inf."""
        scores = scores.clone()
        for row, answer in enumerate(self._batch):
            if answer.sampler is None or answer.done.is_set():
                continue
            try:
                token = answer.sampler(scores[row])
            except Exception as error:  # ends this request alone
                answer.fail(error)
                continue
            scores[row] = -torch.inf
            scores[row, token] = 0.0
        return scores
