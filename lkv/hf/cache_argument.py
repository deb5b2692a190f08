"""The name of a model's cache argument: `cache` since transformers 5.24, `past_key_values` before."""

from collections.abc import Iterator
from inspect import signature
from typing import Any

from torch import Tensor
from transformers import GenerationMixin

from lkv.hf.image_positions import following_positions

NAMES = _NEW, _OLD = ("cache", "past_key_values")
_NAME = _NEW if _NEW in signature(GenerationMixin.prepare_inputs_for_generation).parameters else _OLD


def cache_argument(cache: object) -> dict[str, Any]:
    """Return `cache` as a keyword argument of `model(...)` and `model.generate(...)`."""
    return {_NAME: cache}


def pass_arguments(cache: Any, ids: Tensor, is_explicit: bool = False) -> dict[str, Any]:
    """Return the arguments of a pass of `ids` [B, T]: `cache`, and positions if it has already read tokens.

    Without explicit positions some models count from 0 in every pass. With `is_explicit` the first pass has them, too:
    in models with multimodal RoPE older versions of transformers shift those of a text as for the images read last.
    """
    start, offset = cache.get_seq_length(), getattr(cache, "image_offset", None)
    positions = {"position_ids": following_positions(offset, None, start, ids)} if start or is_explicit else {}
    return cache_argument(cache) | positions | {"use_cache": True}


def passes(cache: Any, ids: Tensor) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield `ids` [B, T] and the arguments of their pass after a text.

    Models whose code reads several tokens after a text wrongly get one a pass.
    """
    for part in ids.split(1 if cache.is_stepwise else max(1, ids.shape[1]), 1):
        yield part, pass_arguments(cache, part)


def find_cache(arguments: dict[str, Any]) -> Any:
    """Return the cache among keyword arguments, by either name; None without one."""
    return next((arguments[name] for name in NAMES if arguments.get(name) is not None), None)
