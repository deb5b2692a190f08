"""Answers by `model.generate` after a context: their options, their length, and their text as it is generated."""

import threading
from collections.abc import Callable, Iterator
from inspect import signature
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)

from lkv.cache.full_cache import FullCache
from lkv.errors import CacheError, PromptError, check_count
from lkv.hf.attention import input_device
from lkv.hf.cache_argument import NAMES, cache_argument
from lkv.hf.image_positions import following_positions
from lkv.hf.position_hook import has_image_positions
from lkv.hf.positions import frequency_change
from lkv.hf.spec import check_ids, max_positions, unwrap_model
from lkv.utils.cpu_threads import adapt_threads

_DEFAULT_LENGTH = 128  # new tokens
# Options of generate that `ask` sets itself, or that change the type of its result.
_RESERVED = [
    *"inputs input_ids inputs_embeds attention_mask position_ids return_dict_in_generate use_cache".split(),
    *("cache_implementation", "prefill_chunk_size", *NAMES),
]
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_NEUTRAL_SAMPLING = {"temperature": 0, "top_p": 1}  # values that ask for a greedy answer
_COUNTS = ("num_beams", "num_return_sequences")
# Options whose values transformers does not check: whether one can be used, and what to give.
_CHECKED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "streamer": (lambda value: hasattr(value, "put") and hasattr(value, "end"), "one such as TextStreamer(tokenizer)"),
    "stopping_criteria": (lambda value: _is_list(value, Callable), "a StoppingCriteriaList"),
    "logits_processor": (lambda value: _is_list(value, Callable), "a LogitsProcessorList"),
    "prefix_allowed_tokens_fn": (callable, "a function"),
    "assistant_model": (lambda value: isinstance(value, torch.nn.Module), "a model"),
    "stop_strings": (lambda value: isinstance(value, str) or _is_list(value, str), "a text or a list of texts"),
    "suppress_tokens": (lambda value: _is_list(value, Integral), "a list of ids"),
    "generation_config": (lambda value: isinstance(value, GenerationConfig), "a GenerationConfig of transformers"),
    "max_time": (lambda value: isinstance(value, Real), "a number of seconds"),
    "top_p": (lambda value: isinstance(value, Real) and 0 <= float(value) <= 1, "a number from 0 to 1"),
    **dict.fromkeys(
        ("eos_token_id", "pad_token_id"),
        (lambda value: isinstance(value, Integral | Tensor) or _is_list(value, Integral), "a token's id, or several"),
    ),
    **dict.fromkeys(
        ("min_new_tokens", "min_length", "prompt_lookup_num_tokens"),
        (lambda value: isinstance(value, Integral) and int(value) >= 0, "a whole number"),
    ),
}
_ASSISTED = ("prompt_lookup_num_tokens", "assistant_model", "assistant_early_exit", "use_mtp")


def check_options(model: PreTrainedModel, cache: object, options: dict[str, Any]) -> None:
    """Raise CacheError for unknown options of generate, and for options that contexts do not support."""
    if reserved := [name for name in _RESERVED if name in options]:
        raise CacheError(f"ask() sets {', '.join(reserved)} itself; leave that out, or use model.generate.")
    names = vars(GenerationConfig()).keys() | signature(unwrap_model(model).generate).parameters.keys()
    if unknown := sorted(set(options) - names):
        raise CacheError(f"model.generate has no option {', '.join(unknown)}; leave it out.")
    for name, (is_one, remedy) in _CHECKED.items():
        if options.get(name) is not None and not is_one(options[name]):
            raise CacheError(f"{name} is {options[name]!r}; give {remedy}, or leave it out.")
    temperature = requested_option(options, "temperature")
    is_positive = isinstance(temperature, Real) and float(temperature) > 0
    if requested_option(options, "do_sample") and temperature is not None and not is_positive:
        raise CacheError(
            f"temperature is {temperature!r}, but sampling divides by it: give one above 0, or leave do_sample out for "
            "the most probable answer."
        )
    ignored = [name for name in _SAMPLING if options.get(name) not in (None, _NEUTRAL_SAMPLING.get(name))]
    if ignored and requested_option(options, "do_sample") is None:
        raise CacheError(
            f"{' and '.join(ignored)} would change nothing, because answers are greedy by default: add do_sample=True, "
            f"or leave {'them' if ignored[1:] else 'it'} out."
        )
    problem = CacheError("ask() gives one answer by greedy decoding or sampling; for beams use model.generate.")
    for name in _COUNTS:
        if (count := requested_option(options, name)) is not None:
            check_count(count, problem, 1, 1)
    if isinstance(cache, FullCache) and is_assisted(model, options):
        raise CacheError(
            "transformers' assisted decoding fails on an uncompressed cache that holds a text; leave "
            f"{', '.join(_ASSISTED)} out, or use a method that compresses."
        )


def _is_list(value: object, kind: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, kind) for each in value)


def is_assisted(model: PreTrainedModel, options: dict[str, Any]) -> bool:
    """Return whether generate would use assisted decoding."""
    return any(effective_option(model, options, name) for name in _ASSISTED)


def answer_length(
    model: PreTrainedModel, tokens: int, max_new_tokens: int | None, options: dict[str, Any] | None = None
) -> int:
    """Return the number of new tokens to generate.

    Args:
        model: The model.
        tokens: Tokens before the answer.
        max_new_tokens: The requested number; None for the value in a generation_config option, else at most 128.
        options: Options of generate.

    Raises:
        PromptError: If the model has no positions for them.
    """
    if max_new_tokens is None:
        max_new_tokens = requested_option(options or {}, "max_new_tokens")
    if max_new_tokens is not None:
        problem = f"max_new_tokens is {max_new_tokens!r}; give a whole number of tokens, 1 or more."
        max_new_tokens = check_count(max_new_tokens, PromptError(problem))
    length, free = max_new_tokens or 1, longest_answer(model, tokens)
    if free < length:
        advice = f"ask for at most {free} new tokens" if free > 0 else "shorten the question or the text"
        limit, most = max_positions(model), tokens + free - 1
        cause = f"the model reads at most {limit}"
        if most < limit:
            cause = f"beyond {most} this model's rotary embedding (LongRoPE) changes"
        raise PromptError(
            f"text, question and {length} new tokens would reach {tokens + length - 1} tokens, but {cause}; {advice}."
        )
    return min(_DEFAULT_LENGTH, free) if max_new_tokens is None else max_new_tokens


def longest_answer(model: PreTrainedModel, tokens: int) -> int:
    """Return the most new tokens that the model can generate after `tokens` tokens; below 1 if none.

    The last new token needs no position. An answer also ends at the length at which LongRoPE switches frequencies.
    """
    change = frequency_change(model.config.get_text_config(decoder=True))
    limit = max_positions(model)
    return (limit if change is None or tokens > change else min(limit, change)) + 1 - tokens


@adapt_threads
def generate(model: Any, tokenizer: Any, rows: list[list[int]], padding_at: int, cache: Any, **options: Any) -> Tensor:
    """Return the new ids [B, n] that `model.generate` gives, greedy unless the options sample.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        rows: The ids [B][T] to continue. Shorter rows are padded.
        padding_at: Where to insert padding: after this many ids of a row, which are already in the cache.
        cache: The cache.
        **options: Options of generate.
    """
    for row in rows:
        check_ids(model, tokenizer, row[cache.get_seq_length() :])
    device = input_device(model)
    length = max(map(len, rows))
    # Pad with an id of the row itself, since repetition penalties also read the padding.
    padded = [row[:padding_at] + row[:1] * (length - len(row)) + row[padding_at:] for row in rows]
    positions = torch.arange(length, device=device)[None]
    missing = torch.tensor([[length - len(row)] for row in rows], device=device)
    mask = ((positions < padding_at) | (positions >= padding_at + missing)).long()
    settings = {
        # The model's generation_config may enable sampling; `ask` samples only on request.
        "do_sample": bool(requested_option(options, "do_sample")),
        **dict.fromkeys(_COUNTS, 1),
        "return_dict_in_generate": False,
        "pad_token_id": tokenizer.pad_token_id,
        # Without the cache, or (transformers 5.2) with chunked prefill, the text would be read again.
        "use_cache": True,
        "cache_implementation": None,
        "prefill_chunk_size": 1 if getattr(cache, "is_stepwise", False) else None,
    }
    if has_image_positions(model):
        # Otherwise transformers continues the text that the model read last, in any cache.
        settings["position_ids"] = following_positions(cache.image_offset, mask, 0, mask)
    if effective_option(model, options, "stop_strings"):
        settings["tokenizer"] = tokenizer
    # None means "not set" for counts.
    settings |= {name: value for name, value in options.items() if value is not None or name not in _COUNTS}
    ids = torch.tensor(padded, device=device)
    return model.generate(ids, attention_mask=mask, **cache_argument(cache), **settings)[:, length:]


def without_padding(model: PreTrainedModel, tokenizer: Any, ids: list[int], options: dict[str, Any]) -> list[int]:
    """Cut off the padding that follows an answer.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        ids: A row of the result of `generate`.
        options: Options of generate.

    Returns:
        The ids up to and including the end token, or up to a stop string.
    """
    ends = end_tokens(model, options)
    end = next((index for index, token in enumerate(ids) if token in ends), None)
    if end is None:
        pad = requested_option(options, "pad_token_id")
        pad = tokenizer.pad_token_id if pad is None else pad
        return ids[: max((index + 1 for index, token in enumerate(ids) if token != pad), default=0)]
    stops = effective_option(model, options, "stop_strings") or ()
    answer = tokenizer.decode(ids[:end])
    # Many models pad with their end token.
    is_stopped = any(stop in answer for stop in ((stops,) if isinstance(stops, str) else stops))
    return ids[: end if is_stopped else end + 1]


def end_tokens(model: PreTrainedModel, options: dict[str, Any]) -> set[int]:
    """Return the ids that end an answer generated with `options`."""
    ends = effective_option(model, options, "eos_token_id")
    ends = ends.tolist() if isinstance(ends, Tensor) else ends
    return {ends} if isinstance(ends, int) else set(ends or ())


def is_truncated(model: PreTrainedModel, answer: list[int], length: int, options: dict[str, Any]) -> bool:
    """Return whether an answer ended only because it reached its longest length.

    Args:
        model: The model.
        answer: The answer's ids.
        length: Its longest length in tokens.
        options: Options of generate.
    """
    return len(answer) >= length and answer[-1] not in end_tokens(model, options)


def requested_option(options: dict[str, Any], name: str) -> Any:
    """Return the value of `name` in the caller's options, or in a generation_config among them."""
    return options[name] if name in options else getattr(options.get("generation_config"), name, None)


def effective_option(model: PreTrainedModel, options: dict[str, Any], name: str) -> Any:
    """Return the effective value of `name` in generate: the caller's, None included, else the model's."""
    value = requested_option(options, name)
    return value if value is not None or name in options else getattr(model.generation_config, name, None)


def check_not_set(call: str, options: dict[str, Any], *names: str) -> None:
    """Raise CacheError if the caller's options of generate have any of `names`, which `call` sets itself."""
    if reserved := sorted(set(names) & options.keys()):
        raise CacheError(f"{call} sets {', '.join(reserved)} itself; leave that out, or use ask() without stream=True.")


def printed(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> dict[str, Any]:
    """Return options of generate that stream the answer to stdout. Raises CacheError for a caller's streamer."""
    check_not_set("ask(stream=True)", options, "streamer")
    return options | {"streamer": TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)}


def decode_answer(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Return the text of an answer."""
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


def stream_text(tokenizer: PreTrainedTokenizerBase, answer: Callable[..., Any]) -> Iterator[str]:
    """Return the text that `answer(**options of generate)` generates in another thread, piece by piece.

    White space at its ends is left out, as in `decode_answer`.

    The thread has ended when the iterator is exhausted or closed; its exceptions are raised here.
    """
    texts = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    stop, problems = _StopOnRequest(), []

    def work() -> None:
        try:
            answer(streamer=texts, stopping_criteria=StoppingCriteriaList([stop]))
        except BaseException as error:  # re-raised in the consumer's thread
            problems.append(error)
        finally:
            texts.text_queue.put(texts.stop_signal)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        held = ""  # white space that ends the text so far
        is_begun = False
        for piece in texts:
            text = held + piece if is_begun else piece.lstrip()
            is_begun = is_begun or bool(text)
            held = text[len(text.rstrip()) :]
            if words := text.rstrip():
                yield words
    finally:
        stop.requested.set()
        thread.join()
    if problems:
        raise problems[0]


class _StopOnRequest(StoppingCriteria):
    """Ends a generation after the current token once `requested` is set."""

    def __init__(self) -> None:
        self.requested = threading.Event()

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Any:
        return torch.full((len(input_ids),), self.requested.is_set(), dtype=torch.bool, device=input_ids.device)
