"""What precedes the distillation: input statistics are measured and LKV-T is fitted to KVzip's scores."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from lkv.integrations.transformers.prefill import read_prompt, to_fp32
from lkv.methods.budgets import GlobalTopKBudget
from lkv.methods.selectors.kvzip import replay_scores
from lkv.policy.policy import Policy
from lkv.policy.token_scores import FUTURE, expected_attention_scores
from lkv.training.cost import WARM_START_TOKENS, WARM_START_UPDATES
from lkv.training.data.samples import TokenizedSample
from lkv.training.processes import all_reduce, average_gradients
from lkv.utils.devices import distributed_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SINK_TOKENS = 4  # the first tokens draw attention whatever they say: left out of the statistics of queries
_SCORE_STD = 2.0  # of LKV-T's terms at the start, about that of the noise that training adds to scores

_LR = 3e-3
_RETENTIONS = (0.05, 0.15, 0.3)  # at which the heads' shares are counted
_MIN_ATTENTION = 1e-6  # lower scores of KVzip count as this
_HEAD_UPDATES, _HEAD_LR = 400, 1e-2


@torch.no_grad()
def calibrate(model: "PreTrainedModel", policy: Policy, texts: Sequence[list[int]]) -> None:
    """Measure on `texts` (token ids) the statistics in `policy`: of k and v and, for expected attention, of queries."""
    tokens = policy.tokens
    is_learned = tokens.inputs.attention == "learned"
    layers, device = policy.spec.layers, tokens.mean.device
    inputs, queries = [_Moments() for _ in range(layers)], [_Moments() for _ in range(layers)]
    for ids in texts:
        for layer, part in enumerate(read_prompt(model, torch.tensor([ids], device=device), queries=is_learned)):
            inputs[layer].add(torch.cat([tokens.read_key(part), part.value], -1)[0], outer=False)
            if is_learned:
                unrotated = part.required_rotation.unrotate(to_fp32(part.query))
                queries[layer].add(unrotated[0, :, _SINK_TOKENS:], outer=True)
    for layer, moments in enumerate(inputs):
        mean, variance = moments.mean_and_covariance()
        tokens.mean[layer], tokens.std[layer] = mean, variance.clamp(min=1e-6).sqrt()
    if is_learned:
        for layer, moments in enumerate(queries):
            mean, covariance = (x.unflatten(0, (policy.spec.kv_heads, -1)) for x in moments.mean_and_covariance())
            tokens.query_mean[layer] = mean
            pooled = covariance.mean(1)
            # F [H, d, r] with F F^T the best approximation of rank r to the covariance.
            values, vectors = torch.linalg.eigh(pooled)
            rank = tokens.query_spread.shape[-1]
            tokens.query_spread[layer] = vectors[..., -rank:] * values[..., None, -rank:].clamp(min=0).sqrt()
        _scale_attention_term(model, policy, texts[: len(texts) // 2 + 1])


class _Moments:
    """Mean and second central moments of x over tokens, from sums in float64."""

    def __init__(self) -> None:
        self._count, self._sum, self._second = 0, torch.zeros((), device="cpu"), torch.zeros((), device="cpu")

    def add(self, x: Tensor, outer: bool) -> None:
        """Add `x` [H, T, d]; with `outer`, whole matrices of second moments."""
        x = x.double()
        self._count += x.shape[1]
        self._sum = self._sum + x.sum(1)
        self._second = self._second + (x.transpose(-1, -2) @ x if outer else x.square().sum(1))

    def mean_and_covariance(self) -> tuple[Tensor, Tensor]:
        """The mean [H, d], and the covariance [H, d, d] or, without `outer`, the variance [H, d]."""
        mean = self._sum / self._count
        is_outer = self._second.ndim > mean.ndim
        return mean, self._second / self._count - (mean[..., None] * mean[..., None, :] if is_outer else mean.square())


def _scale_attention_term(model: "PreTrainedModel", policy: Policy, texts: Sequence[list[int]]) -> None:
    """Set each query head's normaliser, then weights that give the expected-attention term the deviation `_SCORE_STD`.

    The normaliser is the log of the mean over tokens of E[exp(q k)]: the softmax's denominator a token.
    """
    tokens = policy.tokens
    tokens.attention_weight.fill_(1.0)
    sums, deviations = torch.zeros_like(tokens.normaliser), torch.zeros_like(tokens.attention_weight)
    for is_scaled in (False, True):
        for ids in texts:
            for layer, part in enumerate(read_prompt(model, torch.tensor([ids], device=tokens.mean.device))):
                term = tokens.weights(layer, device=part.key.device).attention
                assert term is not None
                key = to_fp32(part.key)
                future = part.required_rotation.mean_rotation(key, part.end, part.end + FUTURE)
                if is_scaled:
                    scores = expected_attention_scores(term, part.key, part.value, future, part.scale)
                    deviations[layer] += scores[0, :, _SINK_TOKENS:].std(-1).to(deviations) / len(texts)
                else:
                    mean, spread = term.mean @ future * part.scale, future.T @ term.spread * part.scale
                    key = key[0, :, _SINK_TOKENS:]
                    logits = key @ mean.transpose(-1, -2) + (key @ spread).square().sum(-1, keepdim=True) / 2
                    sums[layer] += (logits.logsumexp(1) - math.log(key.shape[1])).to(sums) / len(texts)
        tokens.normaliser.copy_(sums)
    tokens.attention_weight.copy_(_SCORE_STD / deviations.clamp(min=1e-3))


def warm_start_from_kvzip(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    policy: Policy,
    samples: Callable[[int], TokenizedSample],
    contexts: int,
) -> float:
    """Fit LKV-T to the logarithm of KVzip's scores, up to a shift and scale a text, and LKV-H to the heads' shares.

    All processes share the `contexts`. Returns the unexplained share of the variance of the last text's scores.
    """
    state = distributed_state("train", "training")
    index, count = state.process_index, state.num_processes
    optimizer = torch.optim.Adam(policy.tokens.parameters(), lr=_LR)
    shares = torch.zeros((), device=policy.tokens.mean.device)
    rounds, error = max(1, contexts // count), 1.0
    for number in tqdm(range(rounds), desc="KVzip warm start", leave=False, disable=index > 0):
        for group in optimizer.param_groups:
            group["lr"] = _LR * (1 - number / rounds)
        ids = samples(number * count + index).context[:WARM_START_TOKENS]
        own_shares, error = fit_to_kvzip(model, tokenizer, policy, optimizer, ids, is_shared=count > 1)
        shares = shares + own_shares / rounds
    # LKV-H's ratios come close to the heads' shares.
    target = all_reduce(shares, "mean").clamp(1e-4, 1 - 1e-4)
    retentions = torch.tensor(_RETENTIONS, device=target.device)
    optimizer = torch.optim.Adam(policy.heads.parameters(), lr=_HEAD_LR)
    for _ in range(_HEAD_UPDATES):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy(policy.ratios(retentions).clamp(1e-6, 1 - 1e-6), target).backward()
        optimizer.step()
    return error


def fit_to_kvzip(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    ids: list[int],
    is_shared: bool = False,
) -> tuple[Tensor, float]:
    """Fit LKV-T to one text; returns the heads' shares [n, L, H] of KVzip's budget and the unexplained variance."""
    device = policy.tokens.mean.device
    prompt = read_prompt(model, torch.tensor([ids], device=device))
    table = replay_scores(model, tokenizer, ids, prompt).to(device)
    counts = [
        [GlobalTopKBudget.from_scores(table, retention).counts(layer, table)[0] for layer in range(len(prompt))]
        for retention in _RETENTIONS
    ]
    target = table[:, 0].clamp(min=_MIN_ATTENTION).log()
    std = target.std(-1, keepdim=True).clamp(min=1e-6)
    target = (target - target.mean(-1, keepdim=True)) / std * _SCORE_STD
    for _ in range(WARM_START_UPDATES):
        optimizer.zero_grad()
        # Each layer may lie on a device of its own.
        scores = torch.cat([policy.tokens(part, layer).to(device) for layer, part in enumerate(prompt)])
        loss = (scores - scores.mean(-1, keepdim=True) - target).square().mean()
        loss.backward()
        if is_shared:
            average_gradients(policy.tokens.parameters(), "mean")
        optimizer.step()
    return torch.tensor(counts, device=device) / len(ids), float(loss.detach()) / _SCORE_STD**2
