"""Least-squares compensation: change the kept values so that attention gives the output of the full cache.

Beyond the paper; without training and at no extra memory. Future queries are approximated by reference queries: the
prompt's own, rotated to the positions after the text. Their attention over the kept entries is computed with k as it
will be restored from its bits.

Changes that fit the reference queries need not fit other queries. So the queries of each half of the positions are
fitted separately (ridge regression), and each fit is judged by the queries of the other half: each head gets that part
of the mean of both changes which explains most of what the other half lacks. No value changes by more than a share of
its norm: a query that attends to one entry alone would get the change in full.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lkv.hf.prompt_kv import LayerKV, to_fp32
from lkv.utils.devices import full_precision

QUERIES = 256  # reference queries per KV head, over its query heads
RIDGE = 0.1  # relative to the mean squared norm of an attention row
LARGEST_CHANGE = 0.25  # of a value, relative to its norm
_TINY = 1e-8  # for heads whose sinks take nearly all attention


def reference_queries(prompt: LayerKV) -> Tensor:
    """Return evenly spaced queries of the prompt's second half, rotated to positions after it: [B, H, G, n, d].

    There is an even number of positions n, none for a prompt of less than three tokens. Raises UnsupportedModelError if
    queries cannot be rotated back, and CacheError if the prompt has none.
    """
    tokens, heads, rotation = prompt.key.shape[2], prompt.key.shape[1], prompt.required_rotation
    second = min(prompt.query.shape[2], tokens - tokens // 2)
    count = min(max(2, QUERIES * heads // prompt.query.shape[1]), second) // 2 * 2
    # Of equal steps, so that they are a view; the last one is the prompt's last.
    step = max(1, (second - 1) // max(1, count - 1))
    span = (count - 1) * step + 1
    with full_precision(prompt.key.device):
        chosen = to_fp32(prompt.query[:, :, prompt.query.shape[2] - span :: step])
        positions = range(tokens - span, tokens, step)
        future = rotation.rerotate(chosen, positions, rotation.future_start(prompt.end, count))
    return future.unflatten(1, (heads, -1))


def select_heads(prompt: LayerKV, heads: slice) -> LayerKV:
    """Return some of the KV heads of a prompt, without its queries."""
    sinks = prompt.sinks
    if sinks is not None:
        sinks = sinks.view(prompt.key.shape[1], -1)[heads].flatten()
    return replace(prompt, key=prompt.key[:, heads], value=prompt.value[:, heads], queries=None, sinks=sinks)


@torch.no_grad()
def fit_values(
    prompt: LayerKV, query: Tensor, kept_key: Tensor, kept_value: Tensor, lens: Tensor | None = None
) -> Tensor:
    """Compute new values for the kept entries of each head.

    Args:
        prompt: The whole prompt.
        query: Its reference queries, [B, H, G, n, d].
        kept_key: k of the kept entries as attention will read it, [B, H, m, d].
        kept_value: v of the kept entries, [B, H, m, dv].
        lens: The number of entries that each head keeps, [B, H]; later ones in `kept_key` and `kept_value` are ignored.
            None if all keep m.

    Returns:
        The new values, [B, H, m, dv], in at least float32.
    """
    with full_precision(prompt.key.device):
        value, heads = to_fp32(kept_value), query.shape[1]
        # By half of the positions, [B, H, 2 G, n / 2, d]; attention has q = G n / 2 queries a half.
        query = query.unflatten(3, (2, -1)).transpose(2, 3).flatten(2, 3)
        if prompt.sinks is not None:
            prompt = replace(prompt, sinks=prompt.sinks.view(heads, 1, -1).expand(-1, 2, -1).flatten())
        attention = _attention(prompt, query, to_fp32(kept_key), lens)
        missing = (_target(prompt, query) - attention @ value).unflatten(2, (2, -1))
        attention = attention.unflatten(2, (2, -1))
        # In the dual form, whose size depends on the queries alone, heads of different lengths are one batch.
        products = attention @ attention.mT
        diagonal = products.diagonal(dim1=-2, dim2=-1)
        diagonal += (RIDGE * diagonal.mean((2, 3), keepdim=True)).clamp(min=_TINY)
        changes = attention.mT @ torch.cholesky_solve(missing, torch.linalg.cholesky_ex(products).L)
        predicted = attention @ changes.flip(2)
        agreement = (missing * predicted).sum((2, 3, 4)) / predicted.square().sum((2, 3, 4)).clamp(min=1e-30)
        change = changes.sum(2) * (agreement.clamp(0, 1)[..., None, None] / 2)
        norm, limit = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (change, value))
        return value.addcmul(change, (LARGEST_CHANGE * limit / norm.clamp(min=1e-30)).clamp(max=1))


def _target(prompt: LayerKV, query: Tensor) -> Tensor:
    """Return the attention output of queries [B, H, G, n, d] over the whole prompt, [B, H, G n, dv]."""
    key, value = to_fp32(prompt.key), to_fp32(prompt.value)
    if prompt.sinks is not None or prompt.softcap is not None:
        return _attention(prompt, query, key) @ value
    return scaled_dot_product_attention(query.flatten(2, 3), key, value, scale=prompt.scale)


def _attention(prompt: LayerKV, query: Tensor, key: Tensor, lens: Tensor | None = None) -> Tensor:
    """Return attention weights [B, H, G n, m] of queries [B, H, G, n, d] over the first `lens` keys of a head."""
    logits = prompt.logits(query.flatten(2, 3), key)
    if lens is not None:
        is_free = torch.arange(key.shape[2], device=key.device) >= lens[..., None, None]
        logits = logits.masked_fill_(is_free, torch.finfo(logits.dtype).min)
    return prompt.softmax(logits.unflatten(2, query.shape[2:4])).flatten(2, 3)
