"""The content term for inference: one batched product a block of tokens; beside the scores memory does not grow."""

import torch
from torch import Tensor
from torch.nn.functional import silu

_BLOCK = 2048


@torch.no_grad()
def content(
    key: Tensor, value: Tensor, mean: Tensor, std: Tensor, hidden: Tensor, bias: Tensor, output: Tensor
) -> Tensor:
    """As `reference.content`: products in bfloat16 where k and v are, in float32 otherwise; the rest in float32."""
    batch, heads, tokens, _ = key.shape
    # Not float16: divided by a small deviation a weight may be too large for it.
    dtype = torch.bfloat16 if key.dtype == torch.bfloat16 else torch.float32
    hidden, std, mean, bias, output = (x.float() for x in (hidden, std, mean, bias, output))
    weight = (hidden / std[..., None]).to(dtype)
    # The mean is taken off through the weight as it was rounded, and within the product, which adds up in float32:
    # however large the mean, only what differs from it is rounded. What rounding takes from the bias comes after.
    bias = (bias - (mean[..., None, :] @ weight.float()).squeeze(-2))[:, None]
    inside = bias.to(dtype)
    after = bias - inside.float()
    weight, inside = weight.repeat(batch, 1, 1), inside.repeat(batch, 1, 1)
    products = _apart if dtype == torch.float32 else _together
    scores = torch.empty(batch, heads, tokens, device=key.device)
    for start in range(0, tokens, _BLOCK):
        block = slice(start, start + _BLOCK)
        k, v = (x[:, :, block].to(dtype).flatten(0, 1) for x in (key, value))
        units = products(inside, k, v, weight).unflatten(0, (batch, heads))
        units = silu(units if dtype == torch.float32 else units.float().add_(after), inplace=True)
        # On a CPU a sum of products is several times faster than a product with one column.
        scores[:, :, block] = units.mul_(output[:, None]).sum(-1)
    return scores


def _apart(inside: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """inside + [k; v] weight without a copy of k and v."""
    dim = key.shape[-1]
    return torch.baddbmm(inside, key, weight[:, :dim]).baddbmm_(value, weight[:, dim:])


def _together(inside: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """As `_apart` in one product, where what is between two would be rounded."""
    return torch.baddbmm(inside, torch.cat([key, value], -1), weight)
