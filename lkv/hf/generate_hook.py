"""A hook into `generate` that announces upcoming token ids to the cache, which transformers does not pass them to."""

from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lkv.errors import CacheError
from lkv.hf.base_cache import BaseCache
from lkv.hf.cache_argument import cache_argument, find_cache
from lkv.hf.fingerprint import read_adapters
from lkv.hf.image_positions import following_positions
from lkv.hf.position_hook import has_image_positions
from lkv.hf.state import get_patch

NO_WEIGHTS = (
    "LKV's caches return no attention weights; leave output_attentions out, in the call and in the model's "
    "configuration, or use a cache of transformers."
)
_IMAGES = ("pixel_values", "pixel_values_videos")
_IS_WRAPPER = "_is_lkv_wrapper"


def wrap_generation(model_class: Any) -> None:
    """Make `generate` of patched models announce token ids to LKV caches (`BaseCache.announce_inputs`). Idempotent.

    The method is wrapped in the class, since instance attributes would be saved with the model. Other caches and
    unpatched models are unaffected. PEFT's `generate` eventually calls the `generate` of the wrapped model.
    """
    function: Any = model_class.prepare_inputs_for_generation
    if hasattr(function, _IS_WRAPPER):
        return

    @wraps(function)
    def prepare_inputs_for_generation(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = find_cache(kwargs)
        # A parent class's wrapper called from a child's wrapper leaves the announcement to the child.
        is_outermost = type(self).prepare_inputs_for_generation is prepare_inputs_for_generation
        if not isinstance(cache, BaseCache) or not is_outermost or get_patch(self) is None:
            return function(self, input_ids, *args, **kwargs)
        if kwargs.get("output_attentions"):
            raise CacheError(NO_WEIGHTS)
        if kwargs.get("inputs_embeds") is None:
            _announce_inputs(self, cache, input_ids, kwargs)
        inputs = function(self, input_ids, *args, **kwargs)
        if cache.get_seq_length():
            _continue_images(self, cache, inputs, kwargs.get("attention_mask"))
        if find_cache(inputs) is not cache:
            # Models with LongRoPE, such as Phi-3, drop it where their frequencies change.
            if cache.get_seq_length():
                raise CacheError(
                    f"with {input_ids.shape[-1]} tokens this model's rotary embedding changes, and it would read all "
                    "of them again without this cache; compress a text that is longer than that by itself, or ask for "
                    "fewer new tokens."
                )
            inputs |= cache_argument(cache)
        if cache.reads_all_queries and isinstance(inputs.get("logits_to_keep"), int):
            # Given as a tensor, models do not leave out other tokens in layers that share keys and values.
            inputs["logits_to_keep"] = torch.arange(-inputs["logits_to_keep"], 0)
        return inputs

    setattr(prepare_inputs_for_generation, _IS_WRAPPER, True)
    model_class.prepare_inputs_for_generation = prepare_inputs_for_generation


def _continue_images(model: PreTrainedModel, cache: BaseCache, inputs: dict[str, Any], mask: Tensor | None) -> None:
    """Give new tokens the positions that follow the prompt in `cache`, in a model with multimodal RoPE.

    transformers computes them from the text that the model read last, in any cache. Raises CacheError for images.
    """
    if any(inputs.get(name) is not None for name in _IMAGES) or inputs.get("mm_encoder_outputs"):
        raise CacheError(
            "this cache has read tokens already, and images must be in the first pass of a prompt: leave pixel_values "
            "out of later turns, prefill_chunk_size out of the first, or make a new cache for a prompt with all images."
        )
    ids = inputs.get("input_ids")
    if has_image_positions(model) and ids is not None:
        inputs["position_ids"] = following_positions(cache.image_offset, mask, cache.get_seq_length(), ids)


def _announce_inputs(model: PreTrainedModel, cache: BaseCache, ids: Tensor, kwargs: dict[str, Any]) -> None:
    """Announce `ids` [B, T], the first argument of `prepare_inputs_for_generation`, and the adapters to the cache."""
    length, tokens = cache.get_seq_length(), ids.shape[-1]
    if kwargs.get("use_cache") is False:
        raise CacheError(
            "generate was called with use_cache=False, in an option or a configuration, and would feed this cache "
            "tokens that it has read already; give use_cache=True, or leave the cache out."
        )
    is_chunk = _is_chunk(tokens, length, kwargs)
    if not length or kwargs.get("is_first_iteration", tokens - length > 1):
        cache.announce_adapters(read_adapters(model))
    mask, new_tokens = kwargs.get("attention_mask"), kwargs.get("next_sequence_length")
    # An all-ones mask may have been dropped before this call.
    if mask is not None:
        is_full = mask.shape[-1] == tokens
    elif new_tokens is not None:
        is_full = tokens == length + new_tokens
    else:
        is_full = not length or (cache.is_assisted and tokens > length)
    if is_full:
        is_first_step = bool(kwargs.get("is_first_iteration")) or tokens - length > 1
        cache.announce_inputs(ids, True, is_first_step, is_chunk)
    else:
        cache.announce_inputs(ids[:, -new_tokens:] if new_tokens else ids, False, False, is_chunk)
    # Assisted decoding first feeds all ids, including those that the cache has read.
    if is_full and length and new_tokens is None and "next_sequence_length" in kwargs:
        kwargs["next_sequence_length"] = tokens - length


def _is_chunk(tokens: int, length: int, kwargs: dict[str, Any]) -> bool:
    """Return whether `tokens` ids are one of the chunks in which `generate` reads a prompt (`prefill_chunk_size`).

    Raises CacheError if they include the `length` tokens that the cache has read, as before transformers 5.4.
    """
    positions = kwargs.get("cache_position")
    if positions is None:
        return "next_sequence_length" not in kwargs
    if "next_sequence_length" in kwargs or "is_first_iteration" in kwargs or len(positions) != tokens:
        return False
    if int(positions[0]) != length:
        raise CacheError(
            "this version of transformers would read a text in chunks from its first token on, though this cache has "
            "read some of it; leave prefill_chunk_size out, or install a newer one."
        )
    return True
