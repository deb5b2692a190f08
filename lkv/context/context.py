"""Compress a text once, ask questions about it many times."""

import copy
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lkv.cache.full_cache import FullCache
from lkv.cache.ragged_cache import RaggedCache
from lkv.cache.shared_cache import SharedCache
from lkv.context import saved_context
from lkv.context.generation import (
    answer_length,
    check_not_set,
    check_options,
    decode_answer,
    generate,
    is_assisted,
    is_truncated,
    longest_answer,
    printed,
    stream_text,
    without_padding,
)
from lkv.context.images import text_tokenizer
from lkv.context.input_checks import check_model_and_tokenizer, check_text
from lkv.errors import CacheError, ContextFileError, PromptError
from lkv.hf.attention import input_device
from lkv.hf.cache_argument import passes
from lkv.hf.cache_layers import crop_to
from lkv.hf.fingerprint import check_same_adapters, read_adapters
from lkv.hf.positions import check_frequencies
from lkv.hf.spec import check_ids, max_positions, unwrap_model
from lkv.methods.registry import FULL
from lkv.policy.policy import Policy
from lkv.utils.cpu_threads import adapted_threads
from lkv.utils.files import as_path
from lkv.utils.prompts import ContextKind, decode_tail, encode_continuation, encode_question


class Context:
    """A compressed text. Every question starts from the same KV cache and sees no other question.

    Create it with `lkv.compress` or `Context.load`. It is thread-safe, but answers one question at a time. For
    parallel answers, give each thread a `fork()`.

    Attributes:
        model: The model that read the text.
        tokenizer: Its tokenizer.
        ids: Token ids of the text, the chat template before it included.
        cache: The RaggedCache, or the FullCache of an uncompressed context.
        metadata: How the text was compressed; saved with the context. An uncompressed context has only `kind`.
        answer_tokens: Tokens of the last answer, or of all answers of a batch.
        is_truncated: Whether the last answer, or one of a batch, was cut off at its maximum length.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        ids: list[int],
        cache: RaggedCache | FullCache,
        metadata: dict[str, Any] | None = None,
    ):
        self.model, self.tokenizer, self.ids = model, text_tokenizer(tokenizer), ids
        self.cache: RaggedCache | FullCache = cache
        self.metadata = metadata or {}
        self.answer_tokens = 0
        self.is_truncated = False
        self._lock, self._is_answering = threading.RLock(), False
        self._adapters = cache.adapters

    @property
    def tokens(self) -> int:
        """The number of tokens of the context, including the chat template."""
        return len(self.ids)

    @property
    def kind(self) -> ContextKind:
        """Whether it is a text or a conversation."""
        return self.metadata.get("kind", "text")

    def nbytes(self) -> int:
        """Return the bytes of the k and v tensors, free slots, windows and states included."""
        return self.cache.nbytes()

    def full_nbytes(self) -> int:
        """Return the bytes of k and v of an uncompressed cache for the same tokens."""
        return self.cache.full_nbytes()

    def realised_retention(self) -> float:
        """Return the share of KV entries that were actually kept."""
        return self.cache.realised_retention()

    def rewind(self) -> None:
        """Remove all tokens after the text from the cache; `ask` does this itself."""
        with self._exclusive():
            self._rewind()

    def ask(self, question: str, max_new_tokens: int | None = None, stream: bool = False, **generation: object) -> str:
        """Answer a question about the text.

        Args:
            question: The question, without any chat template; white space around it is left out.
            max_new_tokens: The maximum number of new tokens. Defaults to that of a `generation_config` that you pass,
                else to 128 or, if fewer fit into the model's context, to what fits.
            stream: Print the answer while it is generated.
            **generation: Options of `model.generate`; greedy decoding by default.

        Returns:
            The answer's text.

        Raises:
            PromptError: For an empty question, and if text, question and answer exceed the model's context length.
            CacheError: For unknown or unsupported options.
        """
        options = printed(self.tokenizer, generation) if stream else generation
        ids = self._encode_question(question, options)
        return decode_answer(self.tokenizer, self.complete(ids, max_new_tokens, **options))

    def stream(self, question: str, max_new_tokens: int | None = None, **generation: Any) -> Iterator[str]:
        """Answer a question piece by piece; closing the iterator ends the answer. Arguments and errors as in `ask`."""
        check_not_set("stream()", generation, "streamer", "stopping_criteria")
        ids = self._encode_question(question, generation)
        length = answer_length(self.model, self.tokens + len(ids), max_new_tokens, generation)
        return stream_text(self.tokenizer, partial(self.complete, ids, length, **generation))

    def batch_ask(self, questions: Iterable[str], max_new_tokens: int | None = None, **generation: object) -> list[str]:
        """Answer several questions in one batch, with the same answers as `ask`; arguments and errors as in `ask`.

        All rows share one copy of the compressed text. Questions are answered one at a time if the context is
        uncompressed, the model has sliding-window or recurrent layers, or `decode_eviction` or assisted decoding is on.
        """
        if isinstance(questions, str) or not isinstance(questions, Iterable) or not (questions := list(questions)):
            raise PromptError("batch_ask takes a list of questions, at least one; for a single one use ask().")
        encoded = [self._encode_question(question, generation) for question in questions]
        answers = self.batch_complete(encoded, max_new_tokens, **generation)
        return [decode_answer(self.tokenizer, answer) for answer in answers]

    def batch_complete(
        self, questions: list[list[int]], max_new_tokens: int | None = None, **generation: Any
    ) -> list[list[int]]:
        """Generate the ids that follow the context and each of `questions`: `batch_ask` on token ids."""
        check_options(self.model, self.cache, generation)
        if "streamer" in generation:
            raise CacheError("a streamer shows one answer alone; leave it out, or use ask() or stream().")
        # Assisted decoding supports only one row.
        if not self.cache.is_shareable or is_assisted(self.model, generation):
            answers, truncated = [], False
            for ids in questions:
                answers.append(self.complete(ids, max_new_tokens, **generation))
                truncated = truncated or self.is_truncated
            self.answer_tokens, self.is_truncated = sum(map(len, answers)), truncated
            return answers
        rows = [self.ids + ids for ids in questions]
        limiting_length = min(map(len, rows), key=partial(longest_answer, self.model))
        length = answer_length(self.model, limiting_length, max_new_tokens, generation)
        options = {"max_new_tokens": length, **generation}
        with self._exclusive():
            out = generate(
                self.model, self.tokenizer, rows, self.tokens, SharedCache(self._require_compressed()), **options
            )
        answers = [without_padding(self.model, self.tokenizer, answer, generation) for answer in out.tolist()]
        self._record(answers, length, generation)
        return answers

    def complete(
        self, ids: list[int], max_new_tokens: int | None = None, *, keeps_slots: bool = True, **generation: object
    ) -> list[int]:
        """Generate the ids that follow the context and `ids`: `ask` on token ids.

        Args:
            ids: The question's ids.
            max_new_tokens: As for `ask`.
            keeps_slots: As for `working_cache`.
            generation: As for `ask`.
        """
        check_options(self.model, self.cache, generation)
        row = self.ids + ids
        length = answer_length(self.model, len(row), max_new_tokens, generation)
        with self.working_cache(keeps_slots) as cache:
            # generate() expects the ids of all tokens in the cache; only the new ones pass through the model.
            out = generate(self.model, self.tokenizer, [row], 0, cache, max_new_tokens=length, **generation)
        answer: list[int] = out[0].tolist()
        self._record([answer], length, generation)
        return answer

    @torch.no_grad()
    def predict(self, question: str, answer: str) -> tuple[Tensor, Tensor]:
        """Compute the logits of a given answer.

        Args:
            question: The question about the text.
            answer: The answer whose n tokens are predicted.

        Returns:
            Logits [n, V] for the answer's tokens, and the ids [n] of those tokens.

        Raises:
            PromptError: For an empty question or answer, and if they exceed the model's context length or cross
                the length at which LongRoPE switches frequencies.
        """
        check_text(question, "the question", "ask something about the text")
        check_text(answer, "the answer", "give some text")
        prefix = encode_question(self.tokenizer, question, decode_tail(self.tokenizer, self.ids), self.kind)
        target = encode_continuation(self.tokenizer, answer, decode_tail(self.tokenizer, prefix))
        check_ids(self.model, self.tokenizer, prefix + target)
        total, limit = self.tokens + len(prefix + target), max_positions(self.model)
        if total > limit:
            raise PromptError(
                f"text, question and answer would reach {total} tokens, but the model reads at most {limit}; shorten "
                "one of them."
            )
        check_frequencies(self.model.config.get_text_config(decoder=True), self.tokens, total)
        ids = torch.tensor([prefix + target], device=input_device(self.model))
        with adapted_threads(self.model.device), self.working_cache() as cache:
            read = [self.model(input_ids=part, **arguments).logits[0] for part, arguments in passes(cache, ids)]
        return torch.cat(read)[len(prefix) - 1 : -1], ids[0, len(prefix) :]

    @contextmanager
    def working_cache(self, keeps_slots: bool = True) -> Iterator[RaggedCache | FullCache]:
        """Yield a cache of the text only, for model(...) or model.generate(...) in the block.

        It is the context's own cache, cropped to the text before and after, or a copy if it cannot be cropped.

        Args:
            keeps_slots: Whether slots allocated in the block stay allocated after it.
        """
        with self._exclusive():
            if not self.cache.is_rewindable:
                yield self.cache.fork()
                return
            self._rewind()
            with nullcontext() if keeps_slots else self.cache.temporary_slots():
                try:
                    yield self.cache
                finally:
                    self._rewind()

    def _rewind(self) -> None:
        if isinstance(self.cache, RaggedCache):
            self.cache.rewind()
        else:
            crop_to(self.cache, self.tokens)

    def fork(self) -> "Context":
        """Copy the context with its own cache; `copy.deepcopy` does the same, also for uncompressed contexts.

        Raises:
            CacheError: For an uncompressed context.
        """
        self._require_compressed()
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Context":
        # The model and the lock are not copied.
        with self._lock:
            cache = self.cache.fork()
        return Context(self.model, self.tokenizer, list(self.ids), cache, dict(self.metadata))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the compressed context to one safetensors file, atomically.

        Raises:
            ContextFileError: If the file cannot be written, or is not a saved context; it is then unchanged.
            CacheError: For an uncompressed context.
        """
        path, cache = as_path(path, ContextFileError, "the context's path"), self._require_compressed()
        with self._lock:
            tensors = saved_context.context_tensors(cache, self.ids)
        saved_context.save(path, tensors, cache, self.tokenizer, self.metadata)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy: Policy | None = None,
    ) -> "Context":
        """Load a saved context for the model that compressed it, in the model's dtype and on its device.

        Args:
            path: A file that `save` wrote.
            model: The model that compressed the text.
            tokenizer: Its tokenizer.
            policy: Optional; if given, it must be the policy that compressed the text.

        Raises:
            ContextFileError: For a missing, invalid or damaged file, for one of another model, tokenizer or policy, and
                if it does not fit into memory.
        """
        check_model_and_tokenizer(model, tokenizer)
        path = as_path(path, ContextFileError, "the context's path")
        ids, cache, metadata = saved_context.load(path, model, text_tokenizer(tokenizer), policy)
        return cls(model, tokenizer, ids, cache, metadata)

    def __repr__(self) -> str:
        size, full = (f"{count / 1e6:.3g}" for count in (self.nbytes(), self.full_nbytes()))
        method = f"{self.metadata.get('method', FULL)}: {self.realised_retention():.1%} of the entries kept"
        return f"<Context of {self.tokens:,} tokens, {method}, {size} of {full} MB held, {type(self.model).__name__}>"

    def _record(self, answers: list[list[int]], length: int, generation: dict[str, Any]) -> None:
        self.answer_tokens = sum(map(len, answers))
        self.is_truncated = any(is_truncated(self.model, answer, length, generation) for answer in answers)

    def _encode_question(self, question: str, generation: dict[str, Any]) -> list[int]:
        check_text(question, "the question", "ask something about the text")
        check_options(self.model, self.cache, generation)
        return encode_question(self.tokenizer, question, decode_tail(self.tokenizer, self.ids), self.kind)

    def _require_compressed(self) -> RaggedCache:
        if not isinstance(self.cache, RaggedCache):
            raise CacheError("this context is not compressed: forking and saving work with every method but 'full'.")
        return self.cache

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Allow one thread at a time; raise CacheError for a nested use by the same thread."""
        with self._lock:
            if self._is_answering:
                raise CacheError(
                    "this context is already generating an answer. To ask from within a callback, use context.fork()."
                )
            check_same_adapters(self._adapters, read_adapters(unwrap_model(self.model)))
            self._is_answering = True
            try:
                yield
            finally:
                self._is_answering = False
