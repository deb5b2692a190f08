"""Which heads look far back: an estimate of DuoAttention's alphas without training."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lkv.errors import BudgetError, DataError, UnsupportedModelError
from lkv.integrations.transformers.attention import evaluation_mode, input_device, patch_attention
from lkv.integrations.transformers.prefill import LayerKV, read_prompt, to_fp32
from lkv.integrations.transformers.rotation import Rotation
from lkv.methods.budgets.duo import RECENT, SINKS

_ROWS = 256  # attention rows held at a time


@torch.no_grad()
def estimate_pattern(
    model: Any, texts: Sequence[list[int]], sinks: int = SINKS, recent: int = RECENT
) -> list[list[float]]:
    """Alphas [L][H] for `Duo`: the part of each KV head's attention that falls outside sinks and recent tokens.

    The mean over the query heads of a group, over all tokens of the `texts` (token ids) that such a window does not
    hold whole, and over the texts. Queries and keys are the ones that attention sees, after QK-norm and RoPE. The model
    must be whole in this process. Raises DataError where no text is longer than the window, and UnsupportedModelError.
    """
    if sinks < 0 or recent < 1:
        raise BudgetError(f"there is no window of {sinks} sinks and {recent} recent tokens; give >= 0 and >= 1.")
    long = [ids for ids in texts if len(ids) > sinks + recent]
    if not long:
        raise DataError(
            f"none of the {len(texts)} texts is longer than the {sinks} sinks and {recent} recent tokens of a streaming"
            " head, so none shows what it would miss; give longer texts, or a smaller window."
        )
    spec, device = patch_attention(model).spec, input_device(model)
    total = torch.zeros(spec.layers, spec.kv_heads, dtype=torch.float64, device="cpu")
    with evaluation_mode(model):
        for ids in long:
            prompt = read_prompt(model, torch.tensor([ids], device=device), queries=True)
            if prompt[0].key.shape[1] != spec.kv_heads:
                raise UnsupportedModelError(
                    "this process holds some of the model's heads only; estimate the pattern with the whole model."
                )
            total += torch.stack([_outside(layer, sinks, recent) for layer in prompt]).double().cpu()
    # Rounding can take a mean of probabilities a little past 1.
    return (total / len(long)).clamp(0, 1).tolist()


@torch.no_grad()
def estimate_mean_pattern(model: Any, texts: Sequence[list[int]], length: int = 500) -> list[list[float]]:
    """Alphas [L][H] for `Duo` by kvpress's quick estimate, which the LKV paper used for Qwen3 (App. D).

    Each head's mean query and mean key over a text (before RoPE, after QK-norm) stand at `length` positions; the score
    is the mean of the last one's attention, summed up from the first token: near 1 where old tokens draw it, near 0
    where recent ones do. The mean over the query heads of a group, and over the `texts` (token ids; kvpress takes 50
    chapters of BookSum). The model must be whole in this process. Raises DataError without a text, and
    UnsupportedModelError for a model whose rotation cannot be undone.
    """
    if not any(texts):
        raise DataError("there is no text to estimate retrieval heads on; give some.")
    spec, device = patch_attention(model).spec, input_device(model)
    rotation = Rotation(model)
    total = torch.zeros(spec.layers, spec.kv_heads, dtype=torch.float64, device="cpu")
    with evaluation_mode(model):
        for ids in filter(None, texts):
            prompt = read_prompt(model, torch.tensor([ids], device=device), queries=True)
            if prompt[0].key.shape[1] != spec.kv_heads:
                raise UnsupportedModelError(
                    "this process holds some of the model's heads only; estimate the pattern with the whole model."
                )
            total += torch.stack([_cumulated(layer, rotation, length) for layer in prompt]).double().cpu()
    return (total / sum(map(bool, texts))).clamp(0, 1).tolist()


def _cumulated(prompt: LayerKV, rotation: Rotation, length: int) -> Tensor:
    """The area under the cumulated attention between the mean query and the mean key at `length` positions, [H]."""
    heads = prompt.key.shape[1]
    query = rotation.unrotate(to_fp32(prompt.query)).mean(2, keepdim=True)
    key = rotation.unrotate(to_fp32(prompt.key)).mean(2, keepdim=True)
    keys = rotation.rotate(key.expand(-1, -1, length, -1))
    last = rotation.rotate(query.expand(-1, -1, length, -1))[:, :, -1:].unflatten(1, (heads, -1))
    logits = (last * prompt.scale @ keys[:, :, None].transpose(-1, -2))[0, :, :, 0]
    return torch.softmax(logits.float(), -1).cumsum(-1).mean(-1).mean(-1)


def _outside(prompt: LayerKV, sinks: int, recent: int) -> Tensor:
    """The mean attention outside sinks and recent tokens, [H]."""
    key, tokens = prompt.key, prompt.key.shape[2]
    query = prompt.grouped_query
    places = torch.arange(tokens, device=key.device)
    mass = torch.zeros(key.shape[1], device=key.device)
    first = sinks + recent  # the first row that sees a token outside
    for start in range(first, tokens, _ROWS):
        rows = places[start : start + _ROWS, None]
        logits = query[0, :, :, start : start + _ROWS] * prompt.scale @ key[0, :, None].transpose(-1, -2)
        attention = torch.softmax(logits.masked_fill(places > rows, -torch.inf).float(), -1)
        outside = (places >= sinks) & (places <= rows - recent)
        mass += (attention * outside).sum(-1).mean(1).sum(-1)
    return mass / (tokens - first)
