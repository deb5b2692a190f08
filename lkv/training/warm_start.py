"""A policy that reads other inputs than an earlier one first learns to choose as that one does."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lkv.policy import Policy
from lkv.prefill import read_prompt
from lkv.training.data.sample import TokenizedSample

_CONTEXTS, _STEPS = 80, 4  # texts, and steps on each
_LONGEST, _TOKENS = 2000, 768  # of a text, and drawn of it for one step
_RATE = 3e-3
_DEVIATION = 2.0  # of the content term afterwards, about the noise that training adds to scores


def carry_over(
    model: Any, earlier: Policy, policy: Policy, samples: Callable[[int], TokenizedSample], contexts: int = _CONTEXTS
) -> float:
    """Fit the content term of `policy` to the content of `earlier`, head by head and up to a shift and scale a text.

    Only short texts serve, which the earlier policy knows. Returns the share of the variance that stays unexplained.
    """
    names = ("hidden", "bias", "output")
    parameters = [getattr(policy.tokens, name) for name in names]
    earlier = earlier.to(policy.tokens.mean.device)
    optimizer = torch.optim.Adam(parameters, lr=_RATE)
    generator = torch.Generator("cpu").manual_seed(0)
    error = 1.0
    for number in range(contexts):
        ids = samples(number).context[:_LONGEST]
        prompt = read_prompt(model, torch.tensor([ids], device=policy.tokens.mean.device))
        with torch.no_grad():
            target = torch.cat([earlier.tokens(part, layer) for layer, part in enumerate(prompt)])
            target = _standard(target)
        for group in optimizer.param_groups:
            group["lr"] = _RATE * (1 - number / contexts)
        for _ in range(_STEPS):
            chosen = torch.randperm(len(ids), generator=generator, device="cpu")[:_TOKENS].to(target.device)
            optimizer.zero_grad()
            found = torch.cat([policy.tokens.content(part, layer, chosen) for layer, part in enumerate(prompt)])
            wanted = target[..., chosen] * _DEVIATION
            loss = (found - found.mean(-1, keepdim=True) - wanted + wanted.mean(-1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
        error = float(loss.detach()) / _DEVIATION**2
    return error


def _standard(scores: Tensor) -> Tensor:
    return (scores - scores.mean(-1, keepdim=True)) / scores.std(-1, keepdim=True).clamp(min=1e-6)
