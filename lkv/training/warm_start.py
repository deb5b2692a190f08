"""What precedes the distillation: input statistics are measured and LKV-T is fitted to KVzip or an earlier policy."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from lkv.integrations.transformers.prefill import LayerKV, read_prompt, to_fp32
from lkv.methods.budgets import GlobalTopKBudget
from lkv.methods.selectors.kvzip import replay_scores
from lkv.policy.policy import HeadScores, Policy
from lkv.policy.token_scores import FUTURE, expected_attention_scores
from lkv.training.cost import WARM_START_TOKENS, WARM_START_UPDATES
from lkv.training.data.samples import TokenizedSample
from lkv.training.processes import all_reduce, average_gradients

if TYPE_CHECKING:
    from accelerate import PartialState
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SINK_TOKENS = 4  # the first tokens draw attention whatever they say: left out of the statistics of queries
_SCORE_STD = 2.0  # of LKV-T's terms at the start, about that of the noise that training adds to scores

_POLICY_CONTEXTS = 80  # texts on which LKV-T is fitted to an earlier policy
_POLICY_TOKENS = 768  # drawn of such a text for one update
_LR = 3e-3
_RETENTIONS = (0.05, 0.15, 0.3)  # at which the heads' shares are counted
_MIN_ATTENTION = 1e-6  # lower scores of KVzip count as this
_HEAD_UPDATES, _HEAD_LR = 400, 1e-2


@torch.no_grad()
def calibrate(model: "PreTrainedModel", policy: Policy, texts: Sequence[list[int]]) -> None:
    """Measure on `texts` (token ids) the statistics in `policy`: of k and v and, for expected attention, of queries."""
    tokens = policy.tokens
    is_learned = tokens.inputs.attention == "learned"
    layers = policy.spec.layers
    inputs, queries = [_Moments() for _ in range(layers)], [_Moments() for _ in range(layers)]
    for prompt in _read_prompts(model, policy, texts, queries=is_learned):
        for layer, part in enumerate(prompt):
            inputs[layer].add(torch.cat([tokens.read_key(part), part.value], -1)[0], outer=False)
            if is_learned:
                unrotated = part.required_rotation.unrotate(to_fp32(part.query))
                queries[layer].add(unrotated[0, :, _SINK_TOKENS:], outer=True)
    tokens.mean.copy_(torch.stack([moments.mean.to(tokens.mean) for moments in inputs]))
    tokens.std.copy_(torch.stack([moments.variance.clamp(min=1e-6).sqrt().to(tokens.std) for moments in inputs]))
    if is_learned:
        for layer, moments in enumerate(queries):
            group = (policy.spec.kv_heads, -1)
            tokens.query_mean[layer] = moments.mean.unflatten(0, group).to(tokens.query_mean)
            pooled = moments.covariance.unflatten(0, group).mean(1)
            # F [H, d, r] with F F^T the best approximation of rank r to the covariance.
            values, vectors = torch.linalg.eigh(pooled)
            rank = tokens.query_spread.shape[-1]
            factor = vectors[..., -rank:] * values[..., None, -rank:].clamp(min=0).sqrt()
            tokens.query_spread[layer] = factor.to(tokens.query_spread)
        _scale_attention_term(model, policy, texts[: len(texts) // 2 + 1])


class _Moments:
    """Sums of x and x^2, or x x^T, over tokens in float64."""

    def __init__(self) -> None:
        self._count, self._sum, self._second = 0, torch.zeros((), device="cpu"), torch.zeros((), device="cpu")

    def add(self, x: Tensor, outer: bool) -> None:
        """Add `x` [H, T, d]; with `outer`, whole matrices of second moments."""
        x = x.double()
        self._count += x.shape[1]
        self._sum = self._sum + x.sum(1)
        self._second = self._second + (x.transpose(-1, -2) @ x if outer else x.square().sum(1))

    @property
    def mean(self) -> Tensor:
        return self._sum / self._count

    @property
    def variance(self) -> Tensor:
        return self._second / self._count - self.mean.square()

    @property
    def covariance(self) -> Tensor:
        return self._second / self._count - self.mean[..., None] * self.mean[..., None, :]


def _read_prompts(
    model: "PreTrainedModel", policy: Policy, texts: Sequence[list[int]], queries: bool = False
) -> Iterator[Sequence[LayerKV]]:
    device = policy.tokens.mean.device
    for ids in texts:
        yield read_prompt(model, torch.tensor([ids], device=device), queries=queries)


def _scale_attention_term(model: "PreTrainedModel", policy: Policy, texts: Sequence[list[int]]) -> None:
    """Set each query head's normaliser, then weights that give the expected-attention term the deviation `_SCORE_STD`.

    The normaliser is the log of the mean over tokens of E[exp(q k)]: the softmax's denominator a token.
    """
    tokens = policy.tokens
    tokens.attention_weight.fill_(1.0)
    sums, deviations = torch.zeros_like(tokens.normaliser), torch.zeros_like(tokens.attention_weight)
    for prompt in _read_prompts(model, policy, texts):
        for layer, part in enumerate(prompt):
            term = tokens.weights(layer, device=part.key.device).attention
            assert term is not None
            future = part.required_rotation.mean_rotation(to_fp32(part.key), part.end, part.end + FUTURE)
            mean = term.mean @ future * part.scale
            spread = future.T @ term.spread * part.scale
            key = to_fp32(part.key)[0, :, _SINK_TOKENS:]
            logits = key @ mean.transpose(-1, -2) + (key @ spread).square().sum(-1, keepdim=True) / 2
            sums[layer] += (logits.logsumexp(1) - math.log(key.shape[1])).to(sums) / len(texts)
    tokens.normaliser.copy_(sums)
    for prompt in _read_prompts(model, policy, texts):
        for layer, part in enumerate(prompt):
            term = tokens.weights(layer, device=part.key.device).attention
            assert term is not None
            future = part.required_rotation.mean_rotation(to_fp32(part.key), part.end, part.end + FUTURE)
            scores = expected_attention_scores(term, part.key, part.value, future, part.scale)
            deviations[layer] += scores[0, :, _SINK_TOKENS:].std(-1).to(deviations) / len(texts)
    tokens.attention_weight.copy_(_SCORE_STD / deviations.clamp(min=1e-3))


def warm_start_from_policy(
    model: "PreTrainedModel",
    earlier: Policy,
    policy: Policy,
    samples: Callable[[int], TokenizedSample],
    contexts: int = _POLICY_CONTEXTS,
) -> float:
    """Fit the content term of LKV-T to that of an earlier policy with other inputs, up to a shift and scale a text.

    `samples` gives a training sample by its number; contexts are cut to lengths that the earlier policy knows. Returns
    the unexplained share of the variance of the last text's scores.
    """
    device = policy.tokens.mean.device
    earlier = earlier.to(device)
    optimizer = torch.optim.Adam([getattr(policy.tokens, name) for name in ("hidden", "bias", "output")], lr=_LR)
    generator = torch.Generator("cpu").manual_seed(0)
    error = 1.0
    for number in tqdm(range(contexts), desc="warm start from the earlier policy", leave=False):
        ids = samples(number).context[:WARM_START_TOKENS]
        prompt = read_prompt(model, torch.tensor([ids], device=device))
        with torch.no_grad():
            target = _standardize(_stack([earlier.tokens(part, layer) for layer, part in enumerate(prompt)], device))
        for group in optimizer.param_groups:
            group["lr"] = _LR * (1 - number / contexts)
        for _ in range(WARM_START_UPDATES):
            drawn = torch.randperm(len(ids), generator=generator, device="cpu")[:_POLICY_TOKENS].to(device)
            optimizer.zero_grad()
            scores = _stack([policy.tokens.content(part, i, drawn) for i, part in enumerate(prompt)], device)
            aim = target[..., drawn] * _SCORE_STD
            loss = (scores - scores.mean(-1, keepdim=True) - aim + aim.mean(-1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
        error = float(loss.detach()) / _SCORE_STD**2
    return error


def warm_start_from_kvzip(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    policy: Policy,
    samples: Callable[[int], TokenizedSample],
    contexts: int,
    state: "PartialState | None" = None,
) -> float:
    """Fit LKV-T to the logarithm of KVzip's scores, up to a shift and scale a text, and LKV-H to the heads' shares.

    KVzip reads a text twice and the policy once: what the second reading measures is learned here. `samples` gives a
    training sample by its number; the processes of `state` (None: this one alone) share `contexts` of them. Returns the
    unexplained share of the variance of the last text's scores.
    """
    index, count = (state.process_index, state.num_processes) if state else (0, 1)
    optimizer = torch.optim.Adam(policy.tokens.parameters(), lr=_LR)
    shares = torch.zeros((), device=policy.tokens.mean.device)
    rounds, error = max(1, contexts // count), 1.0
    for number in tqdm(range(rounds), desc="KVzip warm start", leave=False, disable=index > 0):
        for group in optimizer.param_groups:
            group["lr"] = _LR * (1 - number / rounds)
        ids = samples(number * count + index).context[:WARM_START_TOKENS]
        own_shares, error = fit_to_kvzip(model, tokenizer, policy, optimizer, ids, is_shared=count > 1)
        shares = shares + own_shares / rounds
    _fit_heads(policy.heads, all_reduce(shares, "mean") if count > 1 else shares, policy)
    return error


def fit_to_kvzip(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    ids: list[int],
    is_shared: bool = False,
) -> tuple[Tensor, float]:
    """Fit LKV-T to KVzip's scores of one text; gradients are averaged over all processes if `is_shared`.

    Returns the heads' shares of KVzip's global budget [n, L, H], and the unexplained share of the variance.
    """
    device = policy.tokens.mean.device
    prompt = read_prompt(model, torch.tensor([ids], device=device))
    table = replay_scores(model, tokenizer, ids, prompt).to(device)
    counts = [
        [GlobalTopKBudget.from_scores(table, retention).counts(layer, table)[0] for layer in range(len(prompt))]
        for retention in _RETENTIONS
    ]
    target = _standardize(table[:, 0].clamp(min=_MIN_ATTENTION).log()) * _SCORE_STD
    for _ in range(WARM_START_UPDATES):
        optimizer.zero_grad()
        scores = _stack([policy.tokens(part, layer) for layer, part in enumerate(prompt)], device)
        loss = (scores - scores.mean(-1, keepdim=True) - target).square().mean()
        loss.backward()
        if is_shared:
            average_gradients(policy.tokens.parameters(), "mean")
        optimizer.step()
    return torch.tensor(counts, device=device) / len(ids), float(loss.detach()) / _SCORE_STD**2


def _fit_heads(heads: HeadScores, shares: Tensor, policy: Policy) -> None:
    """Fit LKV-H so that its ratios at `_RETENTIONS` come close to `shares` [n, L, H]."""
    optimizer = torch.optim.Adam(heads.parameters(), lr=_HEAD_LR)
    retentions = torch.tensor(_RETENTIONS, device=shares.device)
    target = shares.clamp(1e-4, 1 - 1e-4)
    for _ in range(_HEAD_UPDATES):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy(policy.ratios(retentions).clamp(1e-6, 1 - 1e-6), target).backward()
        optimizer.step()


def _stack(layers: list[Tensor], device: torch.device) -> Tensor:
    """Scores [L, H, T] of all layers, each of which may lie on a device of its own."""
    return torch.cat([scores.to(device) for scores in layers])


def _standardize(scores: Tensor) -> Tensor:
    return (scores - scores.mean(-1, keepdim=True)) / scores.std(-1, keepdim=True).clamp(min=1e-6)
