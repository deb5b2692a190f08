"""LKV-T (Sec. 3.4)."""

import warnings

import torch
from torch import Tensor
from torch.nn.functional import silu

from lkv.methods.selection.base import Selector
from lkv.policy import Policy

_LONGER = 1.2  # than in training: up to there it chooses as well, as measured


class LearnedScores(Selector):
    """LKV-T: the policy's MLP over [k; v]; no query is read (Sec. 3.4).

    All heads go through one batched product, in bfloat16 where k and v are, else in float32; what follows it is float32
    anyway. Works in blocks of tokens: beside the scores its memory does not grow with the prompt. Warns where a text is
    much longer than those of the training.
    """

    _BLOCK = 2048
    local = True

    def __init__(self, policy: Policy, heads: slice = slice(None)):
        """`heads`: the KV heads that this process computes."""
        self._tokens, self._heads, self._trained_tokens = policy.tokens, heads, policy.trained_tokens

    @torch.no_grad()
    def scores(self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> Tensor:
        batch, heads, tokens, _ = key.shape
        if layer == 0 and self._trained_tokens is not None and tokens > _LONGER * self._trained_tokens:
            warnings.warn(
                f"this policy was trained on texts of up to {self._trained_tokens:,} tokens and may keep the wrong "
                "ones of a much longer one; compare with another method (snapkv), or train it on longer texts.",
                stacklevel=2,
            )
        mean, std, weight, bias, output = (
            getattr(self._tokens, name)[layer, self._heads].to(key.device, torch.float32)
            for name in ("mean", "std", "hidden", "bias", "output")
        )
        # Not float16: divided by a small deviation a weight may be too large for it.
        dtype = torch.bfloat16 if key.dtype == torch.bfloat16 else torch.float32
        weight = (weight / std[..., None]).to(dtype)
        # The mean is taken off through the weight as it was rounded, and within the product, which adds up in float32:
        # however large the mean, only what differs from it is rounded. What rounding takes from the bias comes after.
        bias = (bias - (mean[..., None, :] @ weight.float()).squeeze(-2))[:, None]
        inside = bias.to(dtype)
        after = bias - inside.float()
        weight, inside = weight.repeat(batch, 1, 1), inside.repeat(batch, 1, 1)
        found = torch.empty(batch, heads, tokens, device=key.device)
        for start in range(0, tokens, self._BLOCK):
            block = slice(start, start + self._BLOCK)
            entries = torch.cat([key[:, :, block], value[:, :, block]], -1).to(dtype).flatten(0, 1)
            hidden = torch.baddbmm(inside, entries, weight)
            hidden = silu(hidden.float().unflatten(0, (batch, heads)).add_(after), inplace=True)
            # On a CPU a sum of products is several times faster than a product with one column.
            found[:, :, block] = hidden.mul_(output[:, None]).sum(-1)
        return found
