"""The full cache at its fastest on a GPU: transformers' StaticCache under FlashAttention or FlashInfer.

One decode step at a fixed length. Keys and values [B, H, T, d] are read where the cache has them; nothing is masked,
because one new token sees all entries.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel, StaticCache

from lkv.hf.model_spec import ModelSpec

# Attention of one new token: q [B, Hq, 1, d], keys, values [B, H, T, d] and the scale give [B, 1, Hq, d].
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
FLASH_MODULES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
ATTENTIONS = ("sdpa", *FLASH_MODULES, "flashinfer")
_FLASHINFER_WORKSPACE = 128 * 2**20


def static_cache(model: PreTrainedModel, spec: ModelSpec, batch: int, tokens: int, slots: int) -> StaticCache:
    """A cache of random k and v that has read `tokens` tokens, with `slots` free slots behind them."""
    cache = StaticCache(config=model.config, max_cache_len=tokens + slots)
    cache.early_initialization(batch, spec.kv_heads, spec.head_dim, model.dtype, model.device)
    layers: list[Any] = cache.layers
    for layer in layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(tokens)
    return cache


def attention_by(name: str, spec: ModelSpec, tokens: int, keys: Tensor) -> Attend:
    """The attention `name` over the first `tokens` entries of a cache with such `keys`.

    Raises ImportError where its package is missing.
    """
    if name == "sdpa":
        return partial(_attend_by_sdpa, tokens)
    if name == "flashinfer":
        return _flashinfer(spec, tokens, keys)
    lengths = torch.full((len(keys),), tokens, dtype=torch.int32, device=keys.device)
    return partial(_attend_by_flash, import_module(FLASH_MODULES[name]).flash_attn_with_kvcache, lengths)


def _attend_by_sdpa(tokens: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    k, v = k[:, :, :tokens], v[:, :, :tokens]
    return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True).transpose(1, 2)


def _attend_by_flash(operator: Any, lengths: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return operator(q, k, v, cache_seqlens=lengths, softmax_scale=scale)


def _flashinfer(spec: ModelSpec, tokens: int, keys: Tensor) -> Attend:
    """FlashInfer's decoding over pages: every row of the cache is one page, and the plan is made once."""
    wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
    rows, page = keys.shape[0], keys.shape[2]
    ends = torch.arange(rows + 1, dtype=torch.int32, device=keys.device)
    last = torch.full((rows,), tokens, dtype=torch.int32, device=keys.device)
    decode = wrapper(
        torch.empty(_FLASHINFER_WORKSPACE, dtype=torch.uint8, device=keys.device), "HND", use_cuda_graph=True,
        paged_kv_indptr_buffer=ends.clone(), paged_kv_indices_buffer=ends[:-1].clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )  # fmt: skip
    decode.plan(
        ends, ends[:-1], last, spec.heads, spec.kv_heads, spec.head_dim, page, q_data_type=keys.dtype,
        kv_data_type=keys.dtype, sm_scale=spec.head_dim**-0.5,
    )  # fmt: skip
    return lambda q, k, v, scale: decode.run(q[:, :, 0].contiguous(), (k, v))[:, None]


@contextmanager
def attention_replaced(model: PreTrainedModel, attend: Attend) -> Iterator[None]:
    """In the block the model computes attention by `attend`."""

    def function(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        return attend(query, key, value, options["scaling"]), None

    # Transformers makes no mask for an implementation that it does not know.
    AttentionInterface.register("static_cache_benchmark", function)
    config = model.config.get_text_config(decoder=True)
    own = config._attn_implementation
    config._attn_implementation_internal = "static_cache_benchmark"
    try:
        yield
    finally:
        config._attn_implementation_internal = own
