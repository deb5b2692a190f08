"""Teacher, student and losses of the distillation (Sec. 3.5).

The teacher is the frozen model with the full cache, the student the same model with a compressed cache.

A layer evicts after its full attention over the whole prompt, so teacher and student share the prompt's k and v. Only
the rows of the continuations differ and are computed twice. The student sees the prompt under a soft mask.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, pad
from torch.utils.checkpoint import checkpoint

from lkv.errors import TrainingError
from lkv.hf.attention import has_length_dependent_rope, input_device, patch_attention
from lkv.hf.base_cache import BaseCache
from lkv.hf.cache_argument import cache_argument
from lkv.hf.cache_layers import AttentionCacheLayer
from lkv.hf.masks import Mask
from lkv.hf.prompt_kv import FrozenPromptLayer, LayerKV, as_prompt_kv, read_prompt
from lkv.hf.recompute import checkpoint_layers
from lkv.kernels.soft_mask_attention import continuation_attention, soft_mask_attention
from lkv.kernels.soft_topk import soft_topk
from lkv.methods.budgets import LearnedBudget
from lkv.policy.policy import Policy
from lkv.training.config import Schedule, TrainingConfig
from lkv.training.data.samples import TokenizedSample
from lkv.utils.devices import copy_to_device
from lkv.utils.fidelity import is_top1_equal, kl_divergence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_EVICTED = -1e4  # a log-mask with exponential 0
_MIN_LENGTH_RATIO = 0.75  # shortest to longest context in a pass: padding costs as much as text


def gumbel(shape: Iterable[int], generator: torch.Generator) -> Tensor:
    """Return standard Gumbel noise on the device of the generator."""
    uniform = torch.rand(tuple(shape), generator=generator, device=generator.device).clamp(1e-10, 1 - 1e-7)
    return -torch.log(-torch.log(uniform))


class Outputs(NamedTuple):
    """Log-probabilities [N, V] that predict the target tokens, and the hidden states of every layer [n, t, D]."""

    log_probs: Tensor
    hidden: tuple[Tensor, ...]


class SampleDistillation:
    """Runs teacher and student over the continuations of samples that share their forward passes.

    Shorter contexts are right-padded with tokens that nothing attends to. Losses are summed over the samples and do not
    depend on the grouping. `whole`: for one sample, prompt and continuation are computed together under the mask, as
    stated in the paper; else only the continuation's rows, as at inference. For whole sequences only the hidden states
    are saved, and the backward pass recomputes each layer.
    """

    def __init__(self, model: "PreTrainedModel", *samples: TokenizedSample, whole: bool = False):
        if whole and len(samples) > 1:
            raise ValueError(f"Expected one sample for a student over whole sequences, but got {len(samples)}.")
        self._model, self._whole = model, whole
        self._device = input_device(model)
        self.lengths = [len(sample.context) for sample in samples]
        self.counts = [len(sample.continuations) for sample in samples]
        to_device = partial(copy_to_device, device=self._device)
        self._contexts = to_device(_pad_ids([sample.context for sample in samples]))
        self.prompt = read_prompt(model, self._contexts)
        ids = _pad_ids([ids for sample in samples for ids, _ in sample.continuations])
        owners = [index for index, sample in enumerate(samples) for _ in sample.continuations]
        target_weights, row_weights = torch.zeros(ids.shape, device="cpu"), torch.zeros(ids.shape, device="cpu")
        for row, (tokens, skip) in enumerate(pair for sample in samples for pair in sample.continuations):
            length, count = len(tokens), self.counts[owners[row]]
            row_weights[row, :length] = 1.0 / length / count
            # Row i predicts token i + 1: the targets are predicted by rows skip - 1 .. length - 2.
            first = max(0, skip - 1)
            target_weights[row, first : length - 1] = 1.0 / (length - 1 - first) / count
        self._ids, self._owners = to_device(ids), to_device(torch.tensor(owners, device="cpu"))
        self._starts = to_device(torch.tensor([self.lengths[owner] for owner in owners], device="cpu"))
        # The continuation and the row of each target token, on the host, so that nothing waits for the device.
        targets = target_weights.nonzero(as_tuple=True)
        self._target_owners, self._target_rows = map(to_device, targets)
        # All continuations of a sample have the same weight, independent of length.
        self.weights = to_device(target_weights[targets])
        self.row_weights = to_device(row_weights)
        if whole:  # the hidden states of all tokens count, including the prompt's
            real = (self.row_weights > 0).float()
            real = torch.cat([real.new_ones(len(real), self.lengths[0]), real], 1)
            self.row_weights = real / real.sum(1, keepdim=True) / len(real)

    def run(self, log_mask: Tensor | None) -> Outputs:
        """Run all continuations over the prompt under `log_mask` [L, n, H, T] (None: the full cache)."""
        ids, options = self._ids, {}
        if self._whole:
            ids = torch.cat([self._contexts.expand(len(ids), -1), ids], 1)
            positions = torch.arange(ids.shape[1], device=self._device)[None]
            cache = self._sequence_cache(log_mask)
            options = {"logits_to_keep": self._ids.shape[1]}
        else:
            is_single = len(self.lengths) == 1
            starts = self._starts[:1] if is_single else self._starts
            positions = starts[:, None] + torch.arange(ids.shape[1], device=self._device)
            if log_mask is None and not is_single:  # the teacher must not see the padding
                heads = self.prompt[0].key.shape[1]
                shapes = [(len(self.prompt), n, heads, t) for n, t in zip(self.counts, self.lengths, strict=True)]
                log_mask = self.join_masks([torch.zeros(shape, device=self._device) for shape in shapes])
            masks: Iterable[Tensor | None] = [None] * len(self.prompt) if log_mask is None else log_mask
            owners = None if is_single else self._owners
            layers = [_MaskedLayer(layer, mask, owners) for layer, mask in zip(self.prompt, masks, strict=True)]
            cache = BaseCache(*as_prompt_kv(self.prompt).continuation_layers(layers, len(ids)))
        with checkpoint_layers(self._model) if self._whole and torch.is_grad_enabled() else nullcontext():
            out = self._model(
                input_ids=ids,
                position_ids=positions,
                **cache_argument(cache),
                use_cache=True,
                output_hidden_states=True,
                **options,
            )
        logits = out.logits[self._target_owners, self._target_rows]
        return Outputs(log_softmax(logits.float(), -1), out.hidden_states[1:])

    def _sequence_cache(self, log_mask: Tensor | None) -> BaseCache:
        patched = patch_attention(self._model)
        masks, sinks = repeat(None) if log_mask is None else iter(log_mask), iter(patched.sinks)
        is_full = [kind.is_evicted for kind in patched.kinds]
        return BaseCache(
            [
                _SequenceLayer(next(masks), next(sinks), patched.softcap) if full else _SequenceLayer()
                for full in is_full
            ]
        )

    def scores(self, policy: Policy, number: int = 0) -> Tensor:
        """Return the LKV-T scores u [L, H, T] of the prompt of sample `number`."""
        row, tokens = slice(number, number + 1), slice(0, self.lengths[number])
        parts = ((prompt.select(row, tokens), layer) for layer, prompt in enumerate(self.prompt))
        if not torch.is_grad_enabled():
            return torch.cat([policy.tokens(*part).to(self._device) for part in parts])
        # The scorer's activations are recomputed in the backward pass instead of saved.
        recomputed = (checkpoint(policy.tokens, *part, use_reentrant=False, preserve_rng_state=False) for part in parts)
        return torch.cat([part.to(self._device) for part in recomputed])

    def join_masks(self, masks: Sequence[Tensor]) -> Tensor:
        """Join the log-masks [L, n_i, H, T_i] of all samples into one [L, n, H, T] that masks the padding."""
        longest = max(self.lengths)
        return torch.cat([pad(mask, (0, longest - mask.shape[-1]), value=_EVICTED) for mask in masks], 1)

    def kl(self, teacher: Outputs, student: Outputs, weight: Tensor | None = None, scale: float = 0.0) -> Tensor:
        """Compute D_KL(P_T || P_S): the mean over target tokens, then over continuations.

        Args:
            teacher: Predictions with the full cache.
            student: Predictions under a mask.
            weight: The weights of the n continuations, [n]; None for equal weights.
            scale: With a scale s, a continuation's mean x is replaced by s log(1 + x / s); 0 for x itself.
        """
        divergence = kl_divergence(teacher.log_probs, student.log_probs) * self.weights
        if not scale:
            return (divergence if weight is None else divergence * weight[self._target_owners]).sum()
        table = divergence.new_zeros(self._ids.shape).index_put((self._target_owners, self._target_rows), divergence)
        counts = copy_to_device(torch.tensor([n for n in self.counts for _ in range(n)], device="cpu"), self._device)
        shares = (table.sum(1) * counts / scale).log1p() * scale / counts
        return (shares if weight is None else shares * weight).sum()

    def agreement(self, teacher: Outputs, student: Outputs) -> float:
        """Return the share of target tokens with the same most probable token, averaged like `kl`."""
        return float((is_top1_equal(teacher.log_probs, student.log_probs) * self.weights).sum())

    def hidden_distance(self, teacher: Outputs, student: Outputs, norm: str) -> Tensor:
        """1/L sum_l ||H_T - H_S||^2, averaged over tokens; `norm` as in `TrainingConfig.hidden_norm`."""
        total = self.row_weights.new_zeros(())
        distance = partial(_squared_distance, norm=norm)
        if (
            self._whole and torch.is_grad_enabled()
        ):  # saving it in float32 would take twice the memory of the hidden states
            distance = partial(checkpoint, distance, use_reentrant=False, preserve_rng_state=False)
        for target, hidden in zip(teacher.hidden, student.hidden, strict=True):
            # Layers may be on other devices than the losses.
            squared = distance(target.to(total.device), hidden.to(total.device))
            total = total + (squared * self.row_weights).sum()
        return total / len(teacher.hidden)


def _squared_distance(target: Tensor, hidden: Tensor, norm: str) -> Tensor:
    """||target - hidden||^2 of each token [n, t], by the `norm` of `TrainingConfig.hidden_norm`."""
    squared = (hidden.float() - target.float()).square().sum(-1)
    if norm == "relative":
        return squared / target.float().square().sum(-1).clamp(min=1e-12)
    return squared / target.shape[-1] if norm == "mean" else squared


def _pad_ids(rows: Sequence[list[int]]) -> Tensor:
    """Return ids [n, t], shorter rows filled up with zeros."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, device="cpu") for row in rows], batch_first=True)


def soft_mask(policy: Policy, scores: Tensor, retention: float | Tensor, tau: float, noise: Tensor) -> Tensor:
    """Compute the soft mask of training, log m~ = log ST_b(u + g; tau) with b = r t (Sec. 3.4).

    Args:
        policy: The policy, whose head budgets are r.
        scores: Scores u of the prompt's tokens, [L, H, T].
        retention: R of all n continuations, or of each, [n].
        tau: Temperature of Soft-TopK.
        noise: Gumbel noise g, [n, L, H, T].

    Returns:
        The log-mask, [L, n, H, T].
    """
    budgets = policy.ratios(retention) * scores.shape[-1]
    return soft_topk(scores + noise, budgets, tau).log_mask.transpose(0, 1)


def hard_mask(policy: Policy, scores: Tensor, retention: float, rows: int) -> Tensor:
    """Compute the mask of inference: the best floor(r t) tokens of each head.

    Args:
        policy: The policy, whose head budgets are r.
        scores: Scores of the prompt's tokens, [L, H, T].
        retention: The retention R.
        rows: The number n of continuations.

    Returns:
        The log-mask, [L, n, H, T].
    """
    budget = LearnedBudget(policy, retention)
    counts = [budget.limits(layer, *scores.shape[1:]) for layer in range(len(scores))]
    budgets = torch.tensor(counts, device=scores.device)
    rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(-1)  # ties go to the earlier token
    mask = torch.where(rank < budgets[..., None], 0.0, _EVICTED)
    return mask[:, None].expand(-1, rows, -1, -1)


class SampleGroup(NamedTuple):
    """Numbered samples that share passes; uncounted samples have no continuations and keep processes in step."""

    numbered: list[tuple[int, TokenizedSample]]
    is_counted: bool = True

    def __str__(self) -> str:
        return ", ".join(f"sample {number}, source {sample.source!r}" for number, sample in self.numbered)


def group_samples(
    numbered: Sequence[tuple[int, TokenizedSample]], max_contexts: int, is_sharded: bool = False
) -> list[SampleGroup]:
    """Group samples of similar length; if `is_sharded`, include those without continuations as uncounted."""
    samples = [(number, sample) for number, sample in numbered if sample.continuations]
    if max_contexts > 1:
        samples.sort(key=lambda pair: (-len(pair[1].context), pair[0]))
    groups: list[SampleGroup] = []
    for number, sample in samples:
        last = groups[-1].numbered if groups else []
        if last and len(last) < max_contexts and len(sample.context) >= _MIN_LENGTH_RATIO * len(last[0][1].context):
            last.append((number, sample))
        else:
            groups.append(SampleGroup([(number, sample)]))
    for number, sample in numbered if is_sharded else ():
        if not sample.continuations:
            stand_in = replace(sample, continuations=[(sample.context[:2], 0)])
            groups.append(SampleGroup([(number, stand_in)], is_counted=False))
    return groups


def distillation_losses(
    model: "PreTrainedModel", policy: Policy, group: SampleGroup, config: TrainingConfig, now: Schedule
) -> tuple[Tensor, Tensor]:
    """Compute the losses of the student under a policy.

    Args:
        model: The frozen model, which is teacher and student.
        policy: The policy, whose parameters get gradients.
        group: Samples that share forward passes.
        config: The settings of the losses, and the seed of noise and retentions.
        now: Temperature and retention of this step.

    Returns:
        KL and hidden-state loss, each summed over the samples.
    """
    run = SampleDistillation(model, *(sample for _, sample in group.numbered), whole=config.student == "full")
    with torch.no_grad():
        teacher = run.run(None)
    masks, weights = [], []
    for index, (number, sample) in enumerate(group.numbered):
        scores, rows = run.scores(policy, index), len(sample.continuations)
        device = scores.device
        # Random numbers are drawn on the device, without synchronisation.
        generator = torch.Generator(device).manual_seed(config.seed * 1_000_003 + number)
        noise = gumbel((rows, *scores.shape), generator)
        retention, weight = torch.full((rows,), now.retention, device=device), torch.ones(rows, device=device)
        if config.retention_high:  # log-uniform; the KL of a continuation is weighted by its retention
            ratio = config.retention_high / config.retention_low
            retention = config.retention_low * ratio ** torch.rand(rows, generator=generator, device=device)
            weight = (retention / config.retention_end) ** config.retention_power
        masks.append(soft_mask(policy, scores, retention, now.tau, noise))
        weights.append(weight)
    student = run.run(run.join_masks(masks))
    hidden = run.hidden_distance(teacher, student, config.hidden_norm)
    kl = run.kl(teacher, student, torch.cat(weights), config.kl_scale)
    return kl * group.is_counted, hidden * group.is_counted


def check_batching(config: TrainingConfig, model: "PreTrainedModel", num_shards: int) -> None:
    """Raise TrainingError if contexts cannot share a forward pass, or shards would not make the same passes."""
    kinds = patch_attention(model).kinds
    if config.student == "full" and any(kind.is_recurrent for kind in kinds):
        raise TrainingError(
            "student is 'full', which reads each continuation as one text with its context, but this model has "
            "recurrent states, which are kept at the end of the context; give student 'continuation'."
        )
    if config.student == "full" and any(kind.readers for kind in kinds):
        raise TrainingError(
            "student is 'full', which computes layers again one by one, but layers of this model share keys and "
            "values; give student 'continuation'."
        )
    if config.contexts_per_forward > 1:
        if any(kind.other for kind in kinds) or has_length_dependent_rope(model):
            raise TrainingError(
                f"contexts_per_forward is {config.contexts_per_forward}, but this model has sliding or recurrent "
                "layers, or a rotary embedding that depends on the longest text, so its contexts are read one by one; "
                "give 1."
            )
        if num_shards > 1:
            raise TrainingError("contexts_per_forward must be 1 where the model's weights are sharded; leave it out.")
    if config.batch % num_shards:
        raise TrainingError(
            f"{config.batch} contexts a step cannot be split evenly among {num_shards} processes that hold shards of "
            "one model; give a --batch that they divide."
        )


class _MaskedLayer(FrozenPromptLayer):
    """Attention of n continuations over their own k and v, which are not stored, and over frozen prompts [C, H, T, d].

    `log_mask` [n, H, T] weights the prompt's tokens (None: the full cache). `owners` [n] are the prompt indices of the
    continuations (None: there is one prompt).
    """

    def __init__(self, prompt: LayerKV, log_mask: Tensor | None, owners: Tensor | None):
        super().__init__(prompt)
        self._log_mask, self._owners = log_mask, owners

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, model_attention: Callable[[], Tensor]
    ) -> Tensor:
        # The model may be on several devices; the masks of all layers are on one.
        owners, log_mask = (x if x is None else x.to(key.device) for x in (self._owners, self._log_mask))
        # Under autocast RoPE returns q and k in float32, while v is in half precision.
        query, key = query.to(value.dtype), key.to(value.dtype)
        prompt = self._prompt
        given = query, key, value, prompt.key, prompt.value, log_mask, owners, scale
        out = continuation_attention(*given, sinks=prompt.sinks, softcap=prompt.softcap)
        return out.transpose(1, 2)


class _SequenceLayer(AttentionCacheLayer):
    """Attention of whole texts under the mask [n, H, T] of their prompt; None: plain attention.

    Each text is read in one pass, possibly twice for recomputation, so nothing is stored.
    """

    def __init__(self, log_mask: Tensor | None = None, sinks: Tensor | None = None, softcap: float | None = None):
        super().__init__()
        self._log_mask, self._sinks, self._softcap = log_mask, sinks, softcap

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, model_attention: Callable[[], Tensor]
    ) -> Tensor:
        if self._log_mask is None:
            return model_attention()
        query, key = query.to(value.dtype), key.to(value.dtype)
        log_mask = pad(self._log_mask.to(key.device), (0, key.shape[2] - self._log_mask.shape[-1]))
        out = soft_mask_attention(query, key, value, log_mask, scale, sinks=self._sinks, softcap=self._softcap)
        return out.transpose(1, 2)
