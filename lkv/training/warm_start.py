"""What a policy learns to imitate before the distillation: an earlier policy of other inputs, or KVzip's scores."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lkv.integrations.transformers.prefill import read_prompt
from lkv.methods.budgets.global_topk import GlobalTopKBudget
from lkv.methods.kvzip import replay_scores
from lkv.policy.policy import HeadScores, Policy
from lkv.training.cost import START_TOKENS
from lkv.training.data.sample import TokenizedSample

_CONTEXTS, _STEPS = 80, 4  # texts, and steps on each
_TOKENS = 768  # drawn of a text for one step
_RATE = 3e-3
_DEVIATION = 2.0  # of the content term afterwards, about the noise that training adds to scores
_RETENTIONS = (0.05, 0.15, 0.3)  # at which the heads' shares are counted
_LEAST = 1e-6  # attention below this counts as this much
_HEAD_STEPS, _HEAD_RATE = 400, 1e-2


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
    for number in tqdm(range(contexts), desc="imitating the earlier policy", leave=False):
        ids = samples(number).context[:START_TOKENS]
        prompt = read_prompt(model, torch.tensor([ids], device=policy.tokens.mean.device))
        with torch.no_grad():
            target = _together([earlier.tokens(part, layer) for layer, part in enumerate(prompt)], policy)
            target = _standard(target)
        for group in optimizer.param_groups:
            group["lr"] = _RATE * (1 - number / contexts)
        for _ in range(_STEPS):
            chosen = torch.randperm(len(ids), generator=generator, device="cpu")[:_TOKENS].to(target.device)
            optimizer.zero_grad()
            scores = _together([policy.tokens.content(p, i, chosen) for i, p in enumerate(prompt)], policy)
            wanted = target[..., chosen] * _DEVIATION
            loss = (scores - scores.mean(-1, keepdim=True) - wanted + wanted.mean(-1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
        error = float(loss.detach()) / _DEVIATION**2
    return error


def imitate_kvzip(
    model: Any,
    tokenizer: Any,
    policy: Policy,
    samples: Callable[[int], TokenizedSample],
    contexts: int,
    accelerator: Any = None,
) -> float:
    """Fit LKV-T to the logarithm of KVzip's scores, head by head and up to a shift and scale a text, and LKV-H to the
    shares that the heads get in KVzip's contest, over `contexts` texts that the processes share out.

    KVzip reads a text twice and the policy once: what it measures is here to be learned from. Returns the share of the
    variance of the last text's scores that stays unexplained.
    """
    index, count = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    device = policy.tokens.mean.device
    optimizer = torch.optim.Adam(policy.tokens.parameters(), lr=_RATE)
    shares = torch.zeros(len(_RETENTIONS), policy.spec.layers, policy.spec.kv_heads, device=device)
    turns, error = max(1, contexts // count), 1.0
    for turn in tqdm(range(turns), desc="imitating KVzip", leave=False, disable=index > 0):
        ids = samples(turn * count + index).context[:START_TOKENS]
        prompt = read_prompt(model, torch.tensor([ids], device=device))
        table = replay_scores(model, tokenizer, ids, prompt).to(device)
        for number, retention in enumerate(_RETENTIONS):
            budget = GlobalTopKBudget.from_scores(table, retention)
            counts = [budget.counts(layer, table)[0] for layer in range(len(prompt))]
            shares[number] += torch.tensor(counts, device=device) / len(ids) / turns
        target = _standard(table[:, 0].clamp(min=_LEAST).log()) * _DEVIATION
        for group in optimizer.param_groups:
            group["lr"] = _RATE * (1 - turn / turns)
        for _ in range(_STEPS):
            optimizer.zero_grad()
            scores = _together([policy.tokens(part, layer) for layer, part in enumerate(prompt)], policy)
            loss = (scores - scores.mean(-1, keepdim=True) - target).square().mean()
            loss.backward()
            _average(accelerator, [parameter.grad for parameter in policy.tokens.parameters()])
            optimizer.step()
        error = float(loss.detach()) / _DEVIATION**2
    _average(accelerator, [shares])
    _fit_heads(policy.heads, shares, policy)
    return error


def _average(accelerator: Any, tensors: list[Tensor | None]) -> None:
    for tensor in tensors:
        if accelerator is not None and tensor is not None:
            tensor.copy_(accelerator.reduce(tensor, reduction="mean"))


def _fit_heads(heads: HeadScores, shares: Tensor, policy: Policy) -> None:
    """Give LKV-H scores whose ratios at `_RETENTIONS` come close to `shares` [n, L, H]."""
    optimizer = torch.optim.Adam(heads.parameters(), lr=_HEAD_RATE)
    retentions = torch.tensor(_RETENTIONS, device=shares.device)
    wanted = shares.clamp(1e-4, 1 - 1e-4)
    for _ in range(_HEAD_STEPS):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy(policy.ratios(retentions).clamp(1e-6, 1 - 1e-6), wanted).backward()
        optimizer.step()


def _together(parts: list[Tensor], policy: Policy) -> Tensor:
    """What the layers gave, each on its own device, where the policy lies."""
    return torch.cat([part.to(policy.tokens.mean.device) for part in parts])


def _standard(scores: Tensor) -> Tensor:
    return (scores - scores.mean(-1, keepdim=True)) / scores.std(-1, keepdim=True).clamp(min=1e-6)
