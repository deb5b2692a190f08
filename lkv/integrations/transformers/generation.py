"""What `generate` is about to feed to a model: the only place where a cache can learn the ids of its tokens."""

from functools import wraps
from types import MethodType
from typing import Any

from torch import Tensor

from lkv.errors import CacheError
from lkv.integrations.transformers.cache_layers import BaseCache

_MARK = "_lkv_announces"


def announce_ids(model: Any) -> None:
    """Let `model.generate` tell LKV caches what it feeds them (`BaseCache.expect`); other caches behave as before.

    The method of this one model object is wrapped, its class stays as it is. Idempotent.
    """
    inner = model.prepare_inputs_for_generation
    if getattr(inner, _MARK, False):
        return
    function = getattr(inner, "__func__", None)
    if function is None:  # replaced by another library, bound in a way of its own
        return

    @wraps(function)
    def prepare_inputs_for_generation(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if isinstance(cache, BaseCache) and kwargs.get("inputs_embeds") is None:
            _announce(cache, input_ids, kwargs)
        return function(self, input_ids, *args, **kwargs)

    setattr(prepare_inputs_for_generation, _MARK, True)
    model.prepare_inputs_for_generation = MethodType(prepare_inputs_for_generation, model)


def _announce(cache: BaseCache, ids: Tensor, kwargs: dict[str, Any]) -> None:
    held, tokens = cache.get_seq_length(), ids.shape[-1]
    if kwargs.get("use_cache") is False:
        raise CacheError(
            "generate was told use_cache=False, in an option or a configuration, and would feed this cache what it has "
            "read; give use_cache=True, or leave past_key_values out."
        )
    part = _is_part(tokens, held, kwargs)
    mask, fed = kwargs.get("attention_mask"), kwargs.get("next_sequence_length")
    # Where there is no mask, one of nothing but ones may have been dropped.
    if mask is not None:
        whole = mask.shape[-1] == tokens
    elif fed is not None:
        whole = tokens == held + fed
    else:
        whole = not held or (cache.assisted and tokens > held)
    if whole:
        cache.expect(ids, True, bool(kwargs.get("is_first_iteration")) or tokens - held > 1, part)
    else:
        cache.expect(ids[:, -fed:] if fed else ids, False, False, part)
    # Assisted decoding begins by feeding all ids, whatever the cache holds of them already.
    if whole and held and fed is None and "next_sequence_length" in kwargs:
        kwargs["next_sequence_length"] = tokens - held


def _is_part(tokens: int, held: int, kwargs: dict[str, Any]) -> bool:
    """Whether `tokens` ids are one of the parts in which `generate` reads a prompt (`prefill_chunk_size`).

    Raises CacheError where it begins with what the cache, after `held` tokens, has read: before transformers 5.4.
    """
    positions = kwargs.get("cache_position")
    if positions is None:
        return "next_sequence_length" not in kwargs
    if "next_sequence_length" in kwargs or "is_first_iteration" in kwargs or len(positions) != tokens:
        return False
    if int(positions[0]) != held:
        raise CacheError(
            "this version of transformers would read a text in parts from its first token on, though this cache holds "
            "some of it; leave prefill_chunk_size out, or install a newer one."
        )
    return True
