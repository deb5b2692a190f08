"""Warm start before distillation: measure the input statistics, and fit LKV-T and LKV-H to eviction errors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import LayerKV, read_prompt, to_fp32
from lkv.kernels.softcap import log_expected_exp
from lkv.methods.budgets import GlobalTopKBudget
from lkv.methods.selectors.kvzip import REQUEST
from lkv.policy.policy import Policy
from lkv.policy.score_formula import ContentWeights, content_formula, expected_attention_scores, interpolate_knots
from lkv.policy.token_scores import FUTURE
from lkv.training.data.samples import TokenizedSample
from lkv.training.eviction_errors import measure_eviction_errors
from lkv.training.processes import all_reduce, average_gradients
from lkv.utils.devices import distributed_state, has_float64
from lkv.utils.progress import ProgressBar
from lkv.utils.prompts import encode_question

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CALIBRATION_SAMPLES = 8  # texts whose k, v and queries are measured before the first step
WARM_START_TOKENS = 2000  # the most tokens of a text read for statistics or eviction errors
WARM_START_UPDATES = 16  # updates of LKV-T per text
_SAMPLED_TOKENS = 512  # tokens per text that LKV-T is fitted to, few enough to keep for all texts
# The first tokens are attention sinks. They are excluded from the statistics of queries and the scale of expected
# attention, included in the statistics of k and v, and always included in the regression.
_FIRST_TOKENS = 4
_SCALING_TEXTS = 3  # texts whose k and v are kept to scale the expected-attention component
_SCORE_STD = 2.0  # initial deviation of LKV-T's components, about that of the training noise added to scores
_LR = 3e-3
_RETENTIONS = (0.05, 0.15, 0.3)  # for the targets of the heads' shares
_MIN_ERROR = 1e-10  # lower errors are clamped
_HEAD_UPDATES, _HEAD_LR = 400, 1e-2


@torch.no_grad()
def calibrate(model: "PreTrainedModel", policy: Policy, texts: Sequence[list[int]]) -> None:
    """Measure on `texts` (token ids) the statistics in `policy`: of k and v and, for expected attention, of queries."""
    tokens = policy.tokens
    is_learned = tokens.inputs.attention == "learned"
    layers, device = policy.spec.layers, tokens.mean.device
    inputs, queries = [_Moments() for _ in range(layers)], [_Moments() for _ in range(layers)]
    prompts: list[list[LayerKV]] = []
    for ids in texts:
        prompt = read_prompt(model, torch.tensor([ids], device=device), queries=is_learned)
        for layer, part in enumerate(prompt):
            inputs[layer].add(torch.cat([tokens.read_key(part), part.value], -1)[0], outer=False)
            if is_learned:
                unrotated = part.required_rotation.unrotate(to_fp32(part.query))
                # Layers that read k and v of this one count as more tokens of its own query heads.
                heads, group = policy.spec.kv_heads, policy.spec.heads // policy.spec.kv_heads
                grouped = unrotated[0, :, _FIRST_TOKENS:].unflatten(0, (heads, -1, group)).transpose(1, 2)
                queries[layer].add(grouped.flatten(2, 3).flatten(0, 1), outer=True)
        if len(prompts) < _SCALING_TEXTS and len(ids) > _FIRST_TOKENS:
            prompts.append([replace(part, queries=None) for part in prompt])
    for layer, moments in enumerate(inputs):
        mean, variance = moments.mean_and_covariance()
        tokens.mean[layer], tokens.std[layer] = mean, variance.clamp(min=1e-6).sqrt()
    if is_learned:
        for layer, moments in enumerate(queries):
            mean, covariance = (x.unflatten(0, (policy.spec.kv_heads, -1)) for x in moments.mean_and_covariance())
            tokens.query_mean[layer] = mean
            # F [H, d, r] with F F^T the best approximation of rank r to the covariance.
            values, vectors = torch.linalg.eigh(covariance.mean(1))
            rank = tokens.query_spread.shape[-1]
            tokens.query_spread[layer] = vectors[..., -rank:] * values[..., None, -rank:].clamp(min=0).sqrt()
        _scale_attention_term(policy, prompts)


class _Moments:
    """Mean and second central moments of x over tokens, from sums in float64."""

    def __init__(self) -> None:
        self._count, self._sum, self._second = 0, torch.zeros((), device="cpu"), torch.zeros((), device="cpu")

    def add(self, x: Tensor, outer: bool) -> None:
        """Add `x` [H, T, d]; with `outer`, whole matrices of second moments."""
        x = x.double() if has_float64(x.device) else x.cpu().double()
        self._count += x.shape[1]
        self._sum = self._sum + x.sum(1)
        self._second = self._second + (x.transpose(-1, -2) @ x if outer else x.square().sum(1))

    def mean_and_covariance(self) -> tuple[Tensor, Tensor]:
        """Return the mean [H, d], and the covariance [H, d, d] or, without `outer`, the variance [H, d]."""
        mean = self._sum / self._count
        is_outer = self._second.ndim > mean.ndim
        return mean, self._second / self._count - (mean[..., None] * mean[..., None, :] if is_outer else mean.square())


def _scale_attention_term(policy: Policy, prompts: Sequence[list[LayerKV]]) -> None:
    """Set each query head's normaliser, then scale the expected-attention component to the deviation `_SCORE_STD`.

    The normaliser is the log of the mean over tokens of E[exp(q k)]: the softmax denominator per token.
    """
    tokens = policy.tokens
    tokens.attention_weight.fill_(1.0)
    sums, deviations = torch.zeros_like(tokens.normaliser), torch.zeros_like(tokens.attention_weight)
    for is_scaled in (False, True):
        for prompt in prompts:
            for layer, part in enumerate(prompt):
                term = tokens.weights(layer, device=part.key.device).attention
                assert term is not None
                key = to_fp32(part.key)
                future = part.required_rotation.mean_rotation(key, part.end, part.end + FUTURE)
                if is_scaled:
                    scores = expected_attention_scores(term, part.key, part.value, future, part.scale, part.softcap)
                    deviation = scores[0, :, _FIRST_TOKENS:].std(-1, correction=0)
                    deviations[layer] += deviation.to(deviations) / len(prompts)
                else:
                    mean, spread = term.mean @ future * part.scale, future.T @ term.spread * part.scale
                    key = key[0, :, _FIRST_TOKENS:]
                    variance = (key @ spread).square().sum(-1, keepdim=True)
                    total = log_expected_exp(key @ mean.transpose(-1, -2), variance, part.softcap).logsumexp(1)
                    if part.sinks is not None:
                        total = torch.logaddexp(total, part.sinks.to(total).view_as(total))
                    sums[layer] += (total - math.log(key.shape[1])).to(sums) / len(prompts)
        tokens.normaliser.copy_(sums)
    tokens.attention_weight.copy_(_SCORE_STD / deviations.clamp(min=1e-3))


class RegressionTargets(NamedTuple):
    """The regression targets of LKV-T for n tokens of one text, with layers and heads flattened to H' = L H."""

    key: Tensor  # as the content component reads it, [H', n, d]
    value: Tensor  # [H', n, d]
    attention: Tensor | None  # the expected-attention component with weight 1, [H', n]; None if the policy lacks it
    positions: Tensor  # of the tokens, [n]
    end: int  # the position after the text
    scores: Tensor  # targets by `regression_scores`, [H', n]
    shares: Tensor  # each head's share of the entries with the greatest errors of all heads at `_RETENTIONS`, [3, L, H]


def warm_start(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    policy: Policy,
    samples: Callable[[int], TokenizedSample],
    contexts: int,
) -> float:
    """Fit the policy to eviction errors, by forward passes only; all processes share the texts.

    Args:
        model: The frozen model.
        tokenizer: Its tokenizer.
        policy: The policy, which is changed in place.
        samples: Returns a training sample by its number.
        contexts: The number of texts to read.

    Returns:
        The unexplained share of the variance of the scores.
    """
    state = distributed_state("train", "training")
    index, count = state.process_index, state.num_processes
    bar = ProgressBar(range(max(1, contexts // count)), desc="warm start", leave=False, disable=index > 0)
    texts = (samples(number * count + index).context for number in bar)
    targets = [regression_targets(model, tokenizer, policy, ids) for ids in texts]
    return fit_to_targets(policy, targets, is_shared=count > 1)


@torch.no_grad()
def regression_targets(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", policy: Policy, ids: list[int]
) -> RegressionTargets:
    """Compute targets from a text.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        policy: The policy, for its inputs.
        ids: The text; its first `WARM_START_TOKENS` tokens are read, or as many as the model can read twice.
    """
    device = policy.tokens.mean.device
    longest = (patch_attention(model).spec.max_positions - len(encode_question(tokenizer, REQUEST))) // 2
    ids = ids[: min(WARM_START_TOKENS, max(1, longest))]
    prompt = read_prompt(model, torch.tensor([ids], device=device))
    errors = measure_eviction_errors(model, tokenizer, ids, prompt).to(device)
    counts = [
        [GlobalTopKBudget.from_scores(errors, retention).counts(layer, errors)[0] for layer in range(len(prompt))]
        for retention in _RETENTIONS
    ]
    generator = torch.Generator("cpu").manual_seed(len(ids))
    positions = torch.randperm(len(ids), generator=generator, device="cpu")[:_SAMPLED_TOKENS]
    # The first knots can only be learned from the first tokens.
    positions = torch.cat([torch.arange(min(_FIRST_TOKENS, len(ids)), device="cpu"), positions]).unique()
    keys, values, attention = [], [], []
    for layer, part in enumerate(prompt):
        places = positions.to(part.key.device)
        keys.append(policy.tokens.read_key(part)[0, :, places].to(device))
        values.append(part.value[0, :, places].to(device))
        term = policy.tokens.weights(layer, device=part.key.device).attention
        if term is not None:
            future = part.required_rotation.mean_rotation(to_fp32(part.key[:, :1, :1]), part.end, part.end + FUTURE)
            term = term._replace(weight=torch.ones_like(term.weight))
            key, value = part.key[:, :, places], part.value[:, :, places]
            scores = expected_attention_scores(term, key, value, future, part.scale, part.softcap)
            attention.append(scores[0].to(device))
    return RegressionTargets(
        torch.cat(keys),
        torch.cat(values),
        torch.cat(attention) if attention else None,
        positions.to(device),
        len(ids),
        regression_scores(errors[:, 0])[..., positions.to(device)].flatten(0, 1),
        torch.tensor(counts, device=device) / len(ids),
    )


def regression_scores(errors: Tensor) -> Tensor:
    """Compute LKV-T's targets from eviction errors [..., T]: the mean of two scales, each of deviation `_SCORE_STD`.

    One is the logarithm, which separates the greatest errors. The other is the normal quantile of the rank, in which a
    few very low errors do not dominate the squared difference. Equal errors share a rank.
    """
    log = errors.clamp(min=_MIN_ERROR).log()
    standardised = (log - log.mean(-1, keepdim=True)) / log.std(-1, correction=0, keepdim=True).clamp(min=1e-6)
    ordered = log.sort(-1).values
    below, not_above = (torch.searchsorted(ordered, log, right=right) for right in (False, True))
    return (standardised + torch.special.ndtri((below + not_above) / (2 * log.shape[-1]))) / 2 * _SCORE_STD


def fit_to_targets(policy: Policy, targets: Sequence[RegressionTargets], is_shared: bool = False) -> float:
    """Fit LKV-T to `targets` by steps of Adam, one text each, and its knots by least squares; then LKV-H.

    All heads of the model are fitted together. Returns the unexplained share of the variance in the last epoch.
    """
    tokens = policy.tokens
    optimizer = torch.optim.Adam(tokens.parameters(), lr=_LR)
    errors, updates = [], WARM_START_UPDATES * len(targets)
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = _LR * (1 - update / updates)
        text = targets[update % len(targets)]
        optimizer.zero_grad()
        scores = _scores_of_all_heads(policy, text)
        loss = (scores - scores.mean(-1, keepdim=True) - text.scores).square().mean()
        loss.backward()
        if is_shared:
            average_gradients(tokens.parameters(), "mean")
        optimizer.step()
        errors.append(float(loss.detach()) / _SCORE_STD**2)
    if tokens.inputs.knots:
        _solve_knots(policy, targets, is_shared)
    # Fit LKV-H's ratios to the heads' shares.
    shares = torch.stack([text.shares for text in targets]).mean(0)
    target = (all_reduce(shares, "mean") if is_shared else shares).clamp(1e-4, 1 - 1e-4)
    retentions = torch.tensor(_RETENTIONS, device=target.device)
    optimizer = torch.optim.Adam(policy.heads.parameters(), lr=_HEAD_LR)
    for _ in range(_HEAD_UPDATES):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy(policy.ratios(retentions).clamp(1e-6, 1 - 1e-6), target).backward()
        optimizer.step()
    last = errors[-len(targets) :]
    return sum(last) / len(last)


def _scores_of_all_heads(policy: Policy, text: RegressionTargets) -> Tensor:
    """Return LKV-T's scores [H', n] of the tokens of `text`."""
    tokens = policy.tokens
    weights = (x.flatten(0, 1) for x in (tokens.mean, tokens.std, tokens.hidden, tokens.bias, tokens.output))
    scores = content_formula(text.key[None], text.value[None], ContentWeights(*weights))[0]
    if text.attention is not None:
        scores = scores + tokens.attention_weight.flatten()[:, None] * text.attention
    if tokens.inputs.knots:
        scores = scores + interpolate_knots(tokens.start.flatten(0, 1), text.positions + 1)
        scores = scores + interpolate_knots(tokens.end.flatten(0, 1), text.end - text.positions)
    return scores


@torch.no_grad()
def _solve_knots(policy: Policy, targets: Sequence[RegressionTargets], is_shared: bool) -> None:
    """Fit the position component of all heads to the residual of the scores by least squares.

    Gradient steps hardly move the first knots, which few tokens read: the attention sinks.
    """
    tokens = policy.tokens
    count = tokens.inputs.knots
    knots = torch.cat([tokens.start, tokens.end], -1).flatten(0, 1)
    squares, products = knots.new_zeros(2 * count, 2 * count), torch.zeros_like(knots)
    each = torch.eye(count).to(knots)
    for text in targets:
        sides = text.positions + 1, text.end - text.positions
        basis = torch.cat([interpolate_knots(each, places) for places in sides])
        residual = text.scores - _scores_of_all_heads(policy, text) + knots @ basis
        basis = basis - basis.mean(-1, keepdim=True)
        squares += basis @ basis.T
        products += residual @ basis.T
    if is_shared:
        squares, products = all_reduce(squares, "sum"), all_reduce(products, "sum")
    # A knot without nearby tokens stays at 0.
    solved = torch.linalg.solve(squares + torch.eye(2 * count).to(knots), products.T).T
    tokens.start.copy_(solved[:, :count].view_as(tokens.start))
    tokens.end.copy_(solved[:, count:].view_as(tokens.end))
