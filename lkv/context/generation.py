"""What an answer by `model.generate` needs beside the cache: its options, its length, its text as it comes."""

import threading
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import CacheError, PromptError
from lkv.integrations.transformers.attention import input_device
from lkv.integrations.transformers.spec import max_positions

_LENGTH = 128  # tokens of an answer at most, unless said otherwise
# What an answer's caller itself gives to generate, or reads of what that returns.
_OWN_INPUTS = (
    "inputs", "input_ids", "inputs_embeds", "attention_mask", "past_key_values", "return_dict_in_generate", "use_cache",
    "cache_implementation", "prefill_chunk_size",
)  # fmt: skip
_COUNTS = ("num_beams", "num_return_sequences")
_ASSISTED = ("prompt_lookup_num_tokens", "assistant_model")


def check_options(model: Any, cache: Any, generation: dict[str, Any]) -> None:
    """Raise CacheError for options of generate that a question to a context does not know or cannot serve."""
    if reserved := [name for name in _OWN_INPUTS if name in generation]:
        raise CacheError(f"ask() itself sees to {', '.join(reserved)}; leave that out, or use model.generate.")
    known = vars(GenerationConfig()).keys() | signature(model.generate).parameters.keys()
    if unknown := sorted(set(generation) - known):
        raise CacheError(f"model.generate has no option {', '.join(unknown)}; leave it out.")
    given = generation.get("generation_config")
    if given is not None and not isinstance(given, GenerationConfig):
        raise CacheError(
            f"generation_config is a {type(given).__name__}; give a GenerationConfig of transformers, or options alone."
        )
    temperature = _asked(generation, "temperature")
    positive = isinstance(temperature, int | float) and temperature > 0
    if _asked(generation, "do_sample") and temperature is not None and not positive:
        raise CacheError(
            f"temperature is {temperature!r}, but sampling divides by it: give one above 0, or leave do_sample out for "
            "the most probable answer."
        )
    several = [_asked(generation, name) for name in _COUNTS]
    if any(count is not None and (type(count) is not int or count != 1) for count in several):
        raise CacheError("ask() gives one answer by greedy decoding or sampling; for beams use model.generate.")
    if not isinstance(cache, RaggedCache) and is_assisted(model, generation):
        raise CacheError(
            "transformers' assisted decoding goes wrong on a cache of its own that holds a text; leave "
            f"{' and '.join(_ASSISTED)} out, or use a method that compresses."
        )


def is_assisted(model: Any, options: dict[str, Any]) -> bool:
    """Whether answers of `model`, generated with `options`, come by assisted decoding."""
    return any(_setting(model, options, name) for name in _ASSISTED)


def answer_length(model: Any, tokens: int, asked: int | None, options: dict[str, Any] | None = None) -> int:
    """New tokens to generate after `tokens`: `asked`, or what a configuration among `options` of generate says, or 128
    at most. PromptError where the model has no positions for them."""
    if asked is None:
        asked = _asked(options or {}, "max_new_tokens")
    limit = max_positions(model)
    # The last token of an answer is never read.
    room = limit + 1 - tokens
    if asked is not None and (not isinstance(asked, int) or isinstance(asked, bool) or asked < 1):
        raise PromptError(f"max_new_tokens is {asked!r}, but an answer has a whole number of tokens: give 1 or more.")
    if room < (asked or 1):
        raise PromptError(
            f"text, question and {asked or 1} new tokens would reach {tokens + (asked or 1) - 1} tokens, but the "
            f"model reads at most {limit}; "
            + (f"ask for at most {room} new tokens." if room > 0 else "shorten the question or the text.")
        )
    return min(_LENGTH, room) if asked is None else asked


def generated(model: Any, tokenizer: Any, rows: list[list[int]], padding: int, cache: Any, **options: Any) -> Tensor:
    """What `model.generate` gives for `rows` of ids [B][T], greedy unless `options` say otherwise, without those ids:
    [B, n]. Each row has its padding behind its first `padding` ids, as many as it is shorter than the longest."""
    device = input_device(model)
    length = max(map(len, rows))
    pad = tokenizer.pad_token_id
    filled = [row[:padding] + [pad or 0] * (length - len(row)) + row[padding:] for row in rows]
    ids = torch.tensor(filled, device=device)
    positions = torch.arange(length, device=device)[None]
    missing = torch.tensor([[length - len(row)] for row in rows], device=device)
    mask = ((positions < padding) | (positions >= padding + missing)).long()
    # Greedy where neither an option nor a configuration of the caller's says otherwise, whatever the model's says.
    sampled = bool(_asked(options, "do_sample"))
    settings = {"do_sample": sampled, "num_beams": 1, "return_dict_in_generate": False, "pad_token_id": pad}
    # Whatever configurations say: without the cache, or in parts in transformers 5.2, the text would be read again.
    settings |= {"use_cache": True, "cache_implementation": None, "prefill_chunk_size": None}
    if _setting(model, options, "stop_strings"):
        settings["tokenizer"] = tokenizer
    # None is how a configuration says that a count is not set.
    settings |= {name: value for name, value in options.items() if value is not None or name not in _COUNTS}
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, **settings)
    return out[:, length:]


def ended(model: Any, ids: list[int], options: dict[str, Any]) -> list[int]:
    """`ids` up to and with the first that ends an answer: what follows it in a batch is padding."""
    ends = ends_of(model, options)
    return next((ids[: number + 1] for number, token in enumerate(ids) if token in ends), ids)


def ends_of(model: Any, options: dict[str, Any]) -> set[int]:
    """The ids that end an answer of `model`, generated with `options`."""
    ends = _setting(model, options, "eos_token_id")
    ends = ends.tolist() if isinstance(ends, Tensor) else ends
    return {ends} if isinstance(ends, int) else set(ends or ())


def _asked(options: dict[str, Any], name: str) -> Any:
    """What the caller's options say of the setting `name`, or a configuration among them."""
    return options[name] if name in options else getattr(options.get("generation_config"), name, None)


def _setting(model: Any, options: dict[str, Any], name: str) -> Any:
    """What generate takes for the setting `name`: what is asked for, else the model's own."""
    value = _asked(options, name)
    # None among the options themselves is an answer, too.
    return value if value is not None or name in options else getattr(model.generation_config, name, None)


def is_cut_off(model: Any, answer: list[int], length: int, options: dict[str, Any]) -> bool:
    """Whether the ids of an answer of at most `length` tokens stop there, and not at one that ends it."""
    return len(answer) >= length and answer[-1] not in ends_of(model, options)


def streamed(tokenizer: Any, answer: Callable[..., Any]) -> Iterator[str]:
    """The text that `answer(**options of generate)` makes, as it is made, in another thread.

    The thread has ended when the iterator has, however that comes about; what it raises is raised here.
    """
    texts = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    stop, problems = Stop(), []

    def work() -> None:
        try:
            answer(streamer=texts, stopping_criteria=StoppingCriteriaList([stop]))
        except BaseException as error:  # raised where the text is read
            problems.append(error)
        finally:
            texts.text_queue.put(texts.stop_signal)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield from filter(None, texts)
    finally:
        stop.asked.set()
        thread.join()
    if problems:
        raise problems[0]


class Stop(StoppingCriteria):
    """Ends a generation after the token at hand, once it is asked to."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Any:
        return torch.full((len(input_ids),), self.asked.is_set(), dtype=torch.bool, device=input_ids.device)
