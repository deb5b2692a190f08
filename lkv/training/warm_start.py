"""What is measured and fitted before the first step."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lkv.integrations.transformers.prefill import LayerKV, read_prompt, to_fp32
from lkv.kernels.token_scores import expected_attention_scores
from lkv.methods.budgets.global_topk import GlobalTopKBudget
from lkv.methods.kvzip import replay_scores
from lkv.policy.policy import FUTURE, HeadScores, Policy
from lkv.training.cost import START_TOKENS
from lkv.training.data.samples import TokenizedSample

_SINKS = 4  # the first tokens draw attention whatever they say: left out of the statistics of queries
_DEVIATION = 2.0  # of the attention term at the start, about the noise that training adds to scores


@torch.no_grad()
def calibrate(model: Any, policy: Policy, texts: Sequence[list[int]]) -> None:
    """Measure on `texts` (token ids) the mean and deviation of each head's k and v and, where the policy has a term for
    the attention to expect, the statistics of its queries; they are stored in the policy."""
    tokens = policy.tokens
    learned = tokens.inputs.attention == "learned"
    layers = policy.spec.layers
    inputs, queries = [_Moments() for _ in range(layers)], [_Moments() for _ in range(layers)]
    for prompt in _prompts(model, policy, texts, learned):
        for layer, part in enumerate(prompt):
            inputs[layer].add(torch.cat([tokens.read_key(part), part.value], -1)[0], square=False)
            if learned:
                queries[layer].add(part.required_rotation.unrotate(to_fp32(part.query))[0, :, _SINKS:], square=True)
    tokens.mean.copy_(torch.stack([moments.mean.to(tokens.mean) for moments in inputs]))
    tokens.std.copy_(torch.stack([moments.variance.clamp(min=1e-6).sqrt().to(tokens.std) for moments in inputs]))
    if learned:
        for layer, moments in enumerate(queries):
            group = (policy.spec.kv_heads, -1)
            tokens.query_mean[layer] = moments.mean.unflatten(0, group).to(tokens.query_mean)
            pooled = moments.covariance.unflatten(0, group).mean(1)
            tokens.query_spread[layer] = _factor(pooled, tokens.query_spread.shape[-1]).to(tokens.query_spread)
        _scale_attention(model, policy, texts[: len(texts) // 2 + 1])


class _Moments:
    """Sums of x and x^2 (or x x^T) over tokens, in float64; one layer of one prompt at a time is widened."""

    def __init__(self) -> None:
        self._count, self._sum, self._second = 0, torch.zeros((), device="cpu"), torch.zeros((), device="cpu")

    def add(self, x: Tensor, square: bool) -> None:
        """`x` [H, T, d]; `square` for whole matrices of second moments."""
        x = x.double()
        self._count += x.shape[1]
        self._sum = self._sum + x.sum(1)
        self._second = self._second + (x.transpose(-1, -2) @ x if square else x.square().sum(1))

    @property
    def mean(self) -> Tensor:
        return self._sum / self._count

    @property
    def variance(self) -> Tensor:
        return self._second / self._count - self.mean.square()

    @property
    def covariance(self) -> Tensor:
        return self._second / self._count - self.mean[..., None] * self.mean[..., None, :]


def _prompts(model: Any, policy: Policy, texts: Sequence[list[int]], queries: bool):
    device = policy.tokens.mean.device
    for ids in texts:
        yield read_prompt(model, torch.tensor([ids], device=device), queries=queries)


def _factor(covariance: Tensor, columns: int) -> Tensor:
    """F [H, d, r] with F F^T the best approximation of rank r to `covariance` [H, d, d]."""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors[..., -columns:] * values[..., None, -columns:].clamp(min=0).sqrt()


def _scale_attention(model: Any, policy: Policy, texts: Sequence[list[int]]) -> None:
    """Set each query head's normaliser, then weights that give the attention term the deviation `_DEVIATION`."""
    tokens = policy.tokens
    tokens.attention_weight.fill_(1.0)
    sums, spreads = torch.zeros_like(tokens.normaliser), torch.zeros_like(tokens.attention_weight)
    for prompt in _prompts(model, policy, texts, False):
        for layer, part in enumerate(prompt):
            ahead = part.required_rotation.mean_rotation(to_fp32(part.key), part.end, part.end + FUTURE)
            sums[layer] += _log_denominators(policy, layer, part, ahead).to(sums) / len(texts)
    tokens.normaliser.copy_(sums)
    for prompt in _prompts(model, policy, texts, False):
        for layer, part in enumerate(prompt):
            term = tokens.scorer(layer, device=part.key.device).attention
            assert term is not None
            ahead = part.required_rotation.mean_rotation(to_fp32(part.key), part.end, part.end + FUTURE)
            scores = expected_attention_scores(term, part.key, part.value, ahead, part.scale)
            spreads[layer] += scores[0, :, _SINKS:].std(-1).to(spreads) / len(texts)
    tokens.attention_weight.copy_(_DEVIATION / spreads.clamp(min=1e-3))


def _log_denominators(policy: Policy, layer: int, part: LayerKV, ahead: Tensor) -> Tensor:
    """log of the mean over tokens of E[exp(q k)], [H, G]: the softmax's denominator a token."""
    term = policy.tokens.scorer(layer, device=part.key.device).attention
    assert term is not None
    mean = term.mean @ ahead * part.scale
    spread = ahead.T @ term.spread * part.scale
    key = to_fp32(part.key)[0, :, _SINKS:]
    logits = key @ mean.transpose(-1, -2) + (key @ spread).square().sum(-1, keepdim=True) / 2
    return logits.logsumexp(1) - math.log(key.shape[1])


_CONTEXTS, _STEPS = 80, 4  # texts, and steps on each
_TOKENS = 768  # drawn of a text for one step
_RATE = 3e-3
_DEVIATION = 2.0  # of the content term afterwards, about the noise that training adds to scores
_RETENTIONS = (0.05, 0.15, 0.3)  # at which the heads' shares are counted
_LEAST = 1e-6  # attention below this counts as this much
_HEAD_STEPS, _HEAD_RATE = 400, 1e-2


def warm_start_from_policy(
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


def warm_start_from_kvzip(
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
            counts = [GlobalTopKBudget(table, retention).counts(layer, table)[0] for layer in range(len(prompt))]
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
