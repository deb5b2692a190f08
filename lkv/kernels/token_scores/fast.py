"""Inference, a block of tokens at a time: it stays in the processor's caches from term to term, and beside the scores
memory does not grow."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu


def blocks(tokens: int, device: torch.device) -> Iterator[slice]:
    """The blocks of `tokens` tokens; larger where every product has to be launched."""
    size = 2048 if device.type == "cpu" else 16_384
    return (slice(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size))


def content(
    like: Tensor, mean: Tensor, std: Tensor, hidden: Tensor, bias: Tensor, output: Tensor
) -> Callable[[Tensor, Tensor], Tensor]:
    """`reference.content` as a function of one block's k and v [B, H, n, d], which are as `like` [B, H, T, d] is.

    Products are in bfloat16 where k and v are, in float32 otherwise; the rest is in float32.
    """
    batch = like.shape[0]
    # Not float16: divided by a small deviation a weight may be too large for it.
    dtype = torch.bfloat16 if like.dtype == torch.bfloat16 else torch.float32
    hidden, std, mean, bias, output = (x.float() for x in (hidden, std, mean, bias, output))
    weight = (hidden / std[..., None]).to(dtype)
    # The mean is taken off through the weight as it was rounded, and within the product, which adds up in float32:
    # however large the mean, only what differs from it is rounded. What rounding takes from the bias comes after.
    bias = (bias - (mean[..., None, :] @ weight.float()).squeeze(-2))[:, None]
    inside = bias.to(dtype)
    after = bias - inside.float()
    weight, inside = weight.repeat(batch, 1, 1), inside.repeat(batch, 1, 1)
    products = _apart if dtype == torch.float32 else _together

    def scores(key: Tensor, value: Tensor) -> Tensor:
        k, v = (x.to(dtype).flatten(0, 1) for x in (key, value))
        units = products(inside, k, v, weight).unflatten(0, (batch, -1))
        units = silu(units if dtype == torch.float32 else units.float().add_(after), inplace=True)
        # On a CPU a sum of products is several times faster than a product with one column.
        return units.mul_(output[:, None]).sum(-1)

    return scores


def _apart(inside: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """inside + [k; v] weight without a copy of k and v."""
    dim = key.shape[-1]
    return torch.baddbmm(inside, key, weight[:, :dim]).baddbmm_(value, weight[:, dim:])


def _together(inside: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """As `_apart` in one product, where what is between two would be rounded."""
    return torch.baddbmm(inside, torch.cat([key, value], -1), weight)
