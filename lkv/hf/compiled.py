"""LKV caches inside `torch.compile`: one opaque operator a layer.

The counters of a cache change with every token and would trigger recompilation if they were traced. So the traced
model calls `lkv::extend` with the new q, k and v and a tensor that names the cache; growth and eviction happen inside.
A prompt is one graph and a decode step another, for any number of layers and caches.
"""

import torch
from torch import Tensor

from lkv.hf.masks import attend_prompt
from lkv.hf.state import registered_cache


@torch.library.custom_op("lkv::extend", mutates_args=("name",))
def extend(
    name: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    model_output: Tensor | None,
    scale: float,
    layer: int,
) -> Tensor:
    """Pass new k and v to a layer and compute attention for q: `BaseCache.compute_layer` [B, T, Hq, dv].

    `name` comes from `register_cache`; it is declared as mutated because it stands for the layer's stored entries.
    `model_output` is the model's own attention [B, T, Hq, dv] during prefill; None if `attend_prompt` computes it.
    """

    def model_attention() -> Tensor:
        return attend_prompt(query, key, value, mask, scale) if model_output is None else model_output

    out: Tensor = registered_cache(name).compute_layer(layer, query, key, value, mask, scale, model_attention)
    # An operator may not return one of its inputs.
    result = out.clone() if model_output is not None and out is model_output else out
    return result.to(value.dtype).contiguous()


@extend.register_fake
def _(name: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: object) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return value.new_empty((batch, tokens, heads, value.shape[-1]))


@torch.library.custom_op("lkv::count_tokens", mutates_args=())
def count_tokens(name: Tensor, layer: int) -> Tensor:
    """Return the number of tokens a layer has read, as a tensor []; `name` as in `extend`."""
    return torch.tensor(registered_cache(name).layers[layer].get_seq_length(), device="cpu")


@count_tokens.register_fake
def _(name: Tensor, layer: int) -> Tensor:
    return name.new_empty((), dtype=torch.long)
