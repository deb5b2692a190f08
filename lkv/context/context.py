"""Compress once, ask many times, today or tomorrow."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, TextStreamer

from lkv.cache.ragged_cache import RaggedCache, SharedCache
from lkv.config import asdict
from lkv.context import saved_context
from lkv.context.generation import answer_length, check_options, ended, generated, is_assisted, is_cut_off, streamed
from lkv.errors import CacheError, ContextFileError, PromptError
from lkv.integrations.transformers.attention import input_device, patch_attention
from lkv.integrations.transformers.cache_layers import crop_to, kv_nbytes
from lkv.integrations.transformers.prefill import read_prompt
from lkv.integrations.transformers.progress import report_progress
from lkv.integrations.transformers.spec import max_positions
from lkv.methods.budgets import RetentionTarget
from lkv.methods.method import Method, resolve_method
from lkv.methods.registry import FULL
from lkv.policy.policy import Policy
from lkv.utils.deprecation import positional_keywords
from lkv.utils.files import as_path
from lkv.utils.prompts import encode, encode_context, encode_question


class Context:
    """A text read once into a compressed cache. Every question starts from the same cache.

    It may be asked from several threads: they take turns. To answer at the same time, give each thread a `fork()`.
    """

    def __init__(self, model: Any, tokenizer: Any, ids: list[int], cache: Cache, about: dict[str, Any] | None = None):
        """`ids` of the text; `about` tells how it was compressed, and is saved with the context."""
        self.model, self.tokenizer, self.ids = model, tokenizer, ids
        self.cache = cache
        self.metadata = about or {}
        self.answer_tokens = 0  # length of the last answer, or of all of a batch
        self.is_truncated = False  # whether the last answer, or one of a batch, ended only because it was long enough
        self._turn, self._busy = threading.RLock(), False

    @property
    def tokens(self) -> int:
        """Tokens of the context, those of the chat template included."""
        return len(self.ids)

    def nbytes(self) -> int:
        """Bytes of k and v really held, slack included."""
        return self.cache.nbytes() if isinstance(self.cache, RaggedCache) else kv_nbytes(self.cache)

    def full_nbytes(self) -> int:
        """Bytes that an uncompressed cache holds for the same text."""
        return self.cache.full_nbytes() if isinstance(self.cache, RaggedCache) else kv_nbytes(self.cache)

    def realised_retention(self) -> float:
        """Entries held of the context divided by all of them: what the retention asked for came to."""
        return self.cache.realised_retention() if isinstance(self.cache, RaggedCache) else 1.0

    def rewind(self) -> None:
        """Forget what was asked and answered; `ask` does so by itself."""
        with self._own_turn():
            crop_to(self.cache, self.tokens)

    @torch.no_grad()
    def predict(self, question: str, answer: str) -> tuple[Tensor, Tensor]:
        """Logits [n, V] for the n tokens of `answer` given after `question`, and the ids [n] of those tokens.

        Raises PromptError for what is empty or no text, or together longer than the model reads.
        """
        check_text(question, "the question", "ask something about the text")
        check_text(answer, "the answer", "give some text")
        prefix, target = encode_question(self.tokenizer, question), encode(self.tokenizer, answer)
        device = input_device(self.model)
        total, limit = self.tokens + len(prefix + target), max_positions(self.model)
        if total > limit:
            raise PromptError(
                f"text, question and answer would reach {total} tokens, but the model reads at most {limit}; shorten "
                "one of them."
            )
        ids = torch.tensor([prefix + target], device=device)
        with self.working_cache() as cache:
            logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0]
        return logits[len(prefix) - 1 : -1], ids[0, len(prefix) :]

    def ask(self, question: str, max_new_tokens: int | None = None, stream: bool = False, **generation: Any) -> str:
        """Answer `question` from the compressed context; greedy unless `generation` (as of model.generate) says so.

        `max_new_tokens` is 128 unless given, also in a `generation_config`, or what the model's positions leave.
        `stream` prints the answer as it comes. Raises PromptError for an empty question, and before anything is
        generated where text, question and answer would not fit; CacheError for options that do not belong here.
        """
        tail = self._question(question, generation)
        if stream:
            generation["streamer"] = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        return self._text(self.complete(tail, max_new_tokens, **generation))

    def stream(self, question: str, max_new_tokens: int | None = None, **generation: Any) -> Iterator[str]:
        """As `ask`, which see, but the answer's text comes in pieces. Closing the iterator ends the answer."""
        tail = self._question(question, generation)
        if given := {"streamer", "stopping_criteria"} & generation.keys():
            raise CacheError(f"stream() itself sees to {', '.join(sorted(given))}; leave that out, or use ask().")
        length = answer_length(self.model, self.tokens + len(tail), max_new_tokens, generation)
        return streamed(self.tokenizer, partial(self.complete, tail, length, **generation))

    def batch_ask(self, questions: Iterable[str], max_new_tokens: int | None = None, **generation: Any) -> list[str]:
        """The answers to `questions`, generated side by side; each as `ask` gives it, in which see the arguments.

        The compressed text is read by all rows and held once. An uncompressed context, or one of a model with sliding
        layers or with decode_eviction, is asked one question after another.
        """
        tails = [self._question(question, generation) for question in listed(questions)]
        if "streamer" in generation:
            raise CacheError("a streamer shows one answer alone; leave it out, or use ask() or stream().")
        apart = is_assisted(self.model, generation)  # assisted decoding takes one row at a time
        if apart or not isinstance(self.cache, RaggedCache) or not self.cache.is_rewindable:
            return self._one_by_one(tails, max_new_tokens, generation)
        rows = [self.ids + tail for tail in tails]
        length = answer_length(self.model, max(map(len, rows)), max_new_tokens, generation)
        with self._own_turn():
            shared = SharedCache(self.cache)
            options = {"max_new_tokens": length, **generation}
            answers = generated(self.model, self.tokenizer, rows, self.tokens, shared, **options)
        ids = [ended(self.model, answer, generation) for answer in answers.tolist()]
        self._note(ids, length, generation)
        return [self._text(answer) for answer in ids]

    def _one_by_one(self, tails: list[list[int]], max_new_tokens: int | None, generation: dict[str, Any]) -> list[str]:
        """As `batch_ask`, which see, for the ids of the questions."""
        texts, tokens, is_truncated = [], 0, False
        for tail in tails:
            texts.append(self._text(self.complete(tail, max_new_tokens, **generation)))
            tokens, is_truncated = tokens + self.answer_tokens, is_truncated or self.is_truncated
        self.answer_tokens, self.is_truncated = tokens, is_truncated
        return texts

    def complete(self, ids: list[int], max_new_tokens: int | None = None, **generation: Any) -> list[int]:
        """Ids that follow the context and `ids`; what `ask` does between encoding and decoding, which see."""
        check_options(self.model, self.cache, generation)
        row = self.ids + ids
        length = answer_length(self.model, len(row), max_new_tokens, generation)
        with self.working_cache() as cache:
            # generate() wants the ids of everything the cache has seen; it feeds only the new ones to the model.
            out = generated(self.model, self.tokenizer, [row], 0, cache, max_new_tokens=length, **generation)
        answer: list[int] = out[0].tolist()
        self._note([answer], length, generation)
        return answer

    def _note(self, answers: list[list[int]], length: int, generation: dict[str, Any]) -> None:
        """Keep what is told of the last answers, of at most `length` tokens each."""
        self.answer_tokens = sum(map(len, answers))
        self.is_truncated = any(is_cut_off(self.model, answer, length, generation) for answer in answers)

    def _question(self, question: str, generation: dict[str, Any]) -> list[int]:
        """Ids of a question; raises for one, or for options, that cannot be."""
        check_text(question, "the question", "ask something about the text")
        check_options(self.model, self.cache, generation)
        return encode_question(self.tokenizer, question)

    def _text(self, answer: list[int]) -> str:
        return self.tokenizer.decode(answer, skip_special_tokens=True).strip()

    def __repr__(self) -> str:
        held, full = (f"{count / 1e6:.3g}" for count in (self.nbytes(), self.full_nbytes()))
        kept = f"{self.metadata.get('method', FULL)}: {self.realised_retention():.1%} of the entries kept"
        return f"<Context of {self.tokens:,} tokens, {kept}, {held} of {full} MB held, {type(self.model).__name__}>"

    @contextmanager
    def _own_turn(self) -> Iterator[None]:
        """One thread at a time; CacheError for a second use by the thread whose turn it is."""
        with self._turn:
            if self._busy:
                raise CacheError("this context is answering already; ask a fork() of it from within an answer.")
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    @contextmanager
    def working_cache(self) -> Iterator[Cache]:
        """A cache that holds the text alone, for model(...) or model.generate(...).

        The context's own where that can be cut back, as it is first and afterwards; else a copy.
        """
        with self._own_turn():
            if isinstance(self.cache, RaggedCache) and not self.cache.is_rewindable:
                yield self.cache.fork()
                return
            crop_to(self.cache, self.tokens)
            try:
                yield self.cache
            finally:
                crop_to(self.cache, self.tokens)

    def _ragged(self) -> RaggedCache:
        if not isinstance(self.cache, RaggedCache):
            raise CacheError("this context is not compressed: forking and saving work with every method but 'full'.")
        return self.cache

    def fork(self) -> "Context":
        """A copy with a cache of its own."""
        with self._turn:
            cache = self._ragged().fork()
        return Context(self.model, self.tokenizer, list(self.ids), cache, dict(self.metadata))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the compressed context to one safetensors file. Raises ContextFileError if that fails; an older file
        at `path` then stays as it was."""
        path, cache = as_path(path, ContextFileError, "the context's place"), self._ragged()
        with self._turn:
            tensors = saved_context.tensors_of(cache, self.ids)
        saved_context.write_context_file(
            path, tensors, {"model": asdict(cache.spec), "adapters": cache.adapters, **self.metadata}
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any, tokenizer: Any, policy: Policy | None = None) -> "Context":
        """A saved context, to be asked again by the same model; in the model's dtype, on its device.

        `policy` is not needed; where it is given it must be the one the text was compressed with. Raises
        ContextFileError for a missing, foreign or damaged file, another model or another policy.
        """
        check_model_and_tokenizer(model, tokenizer)
        path = as_path(path, ContextFileError, "the context's place")
        ids, cache, about = saved_context.restored(path, model, policy)
        return cls(model, tokenizer, ids, cache, about)


def _asked(target: RetentionTarget | None) -> dict[str, Any]:
    """How much was asked for, as it is saved with a context; nothing for a method with a budget rule of its own."""
    if target is None:
        return {"retention": None, "budget_tokens": None}
    return {"retention": target.retention if target.tokens is None else None, "budget_tokens": target.tokens}


def check_model_and_tokenizer(model: Any, tokenizer: Any) -> None:
    """Raise PromptError unless these can be a model and its tokenizer."""
    if not isinstance(model, torch.nn.Module):
        raise PromptError(f"the model is a {type(model).__name__}; give one as AutoModelForCausalLM loads it.")
    if isinstance(tokenizer, torch.nn.Module) or not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise PromptError(
            f"the tokenizer is a {type(tokenizer).__name__}; give the model's own, as AutoTokenizer loads it."
        )


def listed(questions: Any) -> list[Any]:
    """Questions as a list. Raises PromptError for what is none, or none at all."""
    several = isinstance(questions, Iterable) and not isinstance(questions, str)
    if not several or not (questions := list(questions)):
        raise PromptError("batch_ask takes a list of questions, at least one; for a single one use ask().")
    return questions


def check_text(text: Any, name: str, advice: str) -> None:
    """Raise PromptError unless `text` is a text with something in it that a tokenizer can read."""
    if not isinstance(text, str):
        raise PromptError(f"{name} is a {type(text).__name__}, but it must be one text (str); {advice}.")
    if not text.strip():
        raise PromptError(f"{name} is empty; {advice}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{name} is no valid Unicode text ({error.reason} at {error.start}); give UTF-8.") from error


def _check_no_file_name(text: str) -> None:
    """Raise PromptError for a text that is the name of an existing file."""
    if len(text) < 1000 and os.path.isfile(text):
        raise PromptError(
            f"the text is {text!r}, the name of a file, and would itself be compressed; read the file first: "
            f"lkv.compress(model, tokenizer, lkv.read_document({text!r}), ...)."
        )


def _check_arguments(method: Any, retention: Any, options: dict[str, Any]) -> None:
    """Raise PromptError or CacheError for what `compress` cannot make sense of, before anything is read."""
    if not isinstance(method, str | Method):
        raise CacheError(
            f"method is {method!r}; give a name that `lkv methods` lists or a Method of your own, and how much is kept "
            "as retention=0.15."
        )
    if "prompt_tokens" in options:
        raise PromptError("the whole text is the prompt here: leave prompt_tokens out, or use RaggedCache itself.")
    if "compression_ratio" in options:
        raise CacheError(
            "compress has no option compression_ratio: it takes the share to keep; instead of compression_ratio=0.85 "
            "give retention=0.15."
        )
    named = ("model", "retention", "method", "policy")
    known = [name for name in signature(RaggedCache).parameters if name not in (*named, "prompt_tokens")]
    if unknown := sorted(set(options) - set(known)):
        raise CacheError(f"compress has no option {', '.join(unknown)}; it takes {', '.join(known)} and chunk.")
    if method == FULL and options:
        raise CacheError(f"the uncompressed cache of {FULL!r} has no options; leave {', '.join(sorted(options))} out.")
    if method == FULL and retention not in (None, 1):
        raise CacheError(f"{FULL!r} keeps everything, not {retention!r}; leave retention out, or use another method.")


def _check_parts(chunk: Any, streaming: bool) -> None:
    """Raise PromptError for parts that a text cannot be read in."""
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise PromptError(f"chunk is {chunk!r}, but a part of the text has at least one token.")
    if streaming and chunk is None:
        raise PromptError("streaming reads the text in parts; give their size in tokens as chunk, for example 1024.")


@positional_keywords("method", "retention", "policy")
@torch.no_grad()
def compress(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    retention: float | None = None,
    method: str | Method = "lkv",
    policy: Policy | str | os.PathLike[str] | None = None,
    chunk: int | None = None,
    system: str | None = None,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> Context:
    """Read `text` as the context of a chat and keep `retention` (0.15 unless given) of its k and v; no question is
    known yet.

    `method` is a name that `lkv methods` lists, a `Method` of your own, or "full" for the uncompressed cache. `chunk`
    reads the text in parts of that many tokens. `system` is a system prompt before the text, compressed with it.
    `progress` is called with the share of the text's layers that are read; what it raises ends the reading.
    `options` go to RaggedCache: budget_tokens, streaming, bits, ...

    Raises PromptError for a text that is empty, too short to keep anything of, or beyond the model's positions, and
    what RaggedCache raises.
    """
    check_model_and_tokenizer(model, tokenizer)
    check_text(text, "the text", "give some text to compress, or a file's with lkv.read_document")
    _check_no_file_name(text)
    if system is not None:
        check_text(system, "the system prompt", "give some text, or leave it out")
    ids = encode_context(tokenizer, text, system)
    return compress_ids(
        model, tokenizer, ids, retention=retention, method=method, policy=policy, chunk=chunk, progress=progress,
        text=text, **options,
    )  # fmt: skip


@torch.no_grad()
def compress_ids(
    model: Any,
    tokenizer: Any,
    ids: list[int],
    *,
    retention: float | None = None,
    method: str | Method = "lkv",
    policy: Policy | str | os.PathLike[str] | None = None,
    chunk: int | None = None,
    progress: Callable[[float], None] | None = None,
    text: str | None = None,
    **options: Any,
) -> Context:
    """As `compress`, which see, for `ids` just as the model is to read them: no chat template is put around them.

    `text`: what they say, for the digest that is saved with the context; decoded from them unless given.
    """
    _check_arguments(method, retention, options)
    _check_parts(chunk, bool(options.get("streaming")))
    limit = patch_attention(model).spec.max_positions
    if len(ids) >= limit:
        raise PromptError(
            f"the text has {len(ids)} tokens, but the model reads at most {limit}, question and answer included; "
            "shorten it."
        )
    if method == FULL:
        full = DynamicCache()
        with _layer_by_layer(model, progress, len(ids)):
            _read(model, full, ids, chunk)
        return Context(model, tokenizer, ids, full)
    if chunk is not None:
        options["prompt_tokens"] = len(ids)
    of_method = {name: options.pop(name, None) for name in ("budget_tokens", "pattern")}
    chosen = resolve_method(method, model, retention=retention, policy=policy, tokenizer=tokenizer, **of_method)
    if chosen.needs_whole_prompt:
        cache = _read_whole(model, chosen, ids, chunk, options, progress)
    else:
        cache = RaggedCache(model, method=chosen, **options)
        _read(model, cache, ids, chunk, progress)
    cache.ids = torch.tensor([ids], device=input_device(model))
    about = {
        "method": cache.plan.method.name,
        **_asked(cache.target),
        "bits": options.get("bits"),
        "policy": cache.policy.digest() if cache.policy is not None else None,
        "text_sha256": hashlib.sha256((tokenizer.decode(ids) if text is None else text).encode()).hexdigest(),
    }
    return Context(model, tokenizer, ids, cache, about)


def _read(
    model: Any, cache: Cache, ids: list[int], chunk: int | None, progress: Callable[[float], None] | None = None
) -> None:
    """Read `ids` into `cache`, in parts of `chunk` tokens; `progress` as in `compress`."""
    parts = torch.tensor([ids], device=input_device(model)).split(min(chunk or len(ids), len(ids)), 1)
    for number, part in enumerate(parts):
        if progress is not None and isinstance(cache, RaggedCache):
            cache.on_layer_start = partial(_tell, progress, number, len(parts), len(cache.layers))
        model.base_model(input_ids=part, past_key_values=cache, use_cache=True)
    if isinstance(cache, RaggedCache):
        cache.on_layer_start = None


def _read_whole(
    model: Any,
    chosen: Method,
    ids: list[int],
    chunk: int | None,
    options: dict[str, Any],
    progress: Callable[[float], None] | None,
) -> RaggedCache:
    """A cache evicted from by a method that must see all layers of a text before the first."""
    if chunk is not None:
        raise PromptError(f"{chosen.name!r} needs the whole text at once; leave chunk out, or use another one.")
    # A second pass repeats the text.
    with _layer_by_layer(model, progress, len(ids) * (1 + chosen.selector.has_second_pass)):
        prompt = read_prompt(model, torch.tensor([ids], device=input_device(model)), chosen.reads_queries)
        cache = RaggedCache(model, method=chosen.for_prompt(ids, prompt), **options)
    cache.fill(prompt)
    return cache


@contextmanager
def _layer_by_layer(model: Any, progress: Callable[[float], None] | None, tokens: int) -> Iterator[None]:
    """In the block, `progress` is told of each decoder layer that is read, of `tokens` in all."""
    if progress is None:
        yield
        return
    read = 0.0

    def passed(more: float) -> None:
        nonlocal read
        read += more
        progress(min(1.0, read / tokens))

    with report_progress(model, passed):
        yield


def _tell(progress: Callable[[float], None], part: int, parts: int, layers: int, layer: int) -> None:
    progress((part + layer / layers) / parts)
