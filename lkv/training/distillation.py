"""Teacher and student over the continuations of samples: what the losses of Sec. 3.5 compare."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, pad

from lkv.integrations.transformers.attention import input_device
from lkv.integrations.transformers.prefill import read_prompt
from lkv.kernels.soft_topk import soft_topk
from lkv.methods.budgets import LearnedBudget
from lkv.policy.policy import Policy
from lkv.training.data.sample import TokenizedSample
from lkv.training.student import FrozenPrompt, MaskedSequence
from lkv.utils.fidelity import is_top1_equal, kl_divergence

_EVICTED = -1e4  # a log-mask whose exponential is exactly zero


def gumbel(shape: Iterable[int], generator: torch.Generator, device: torch.device) -> Tensor:
    """Standard Gumbel noise from a CPU generator, the same on every device."""
    uniform = torch.rand(tuple(shape), generator=generator, device="cpu").clamp(1e-10, 1 - 1e-7)
    return -torch.log(-torch.log(uniform)).to(device)


@dataclass(frozen=True)
class Outputs:
    """What the continuations gave: log-probabilities [N, V] of the target rows and hidden states."""

    log_probs: Tensor
    hidden: tuple[Tensor, ...]


class SampleDistillation:
    """Runs teacher and student over the continuations of samples that share their forward passes.

    Contexts of different lengths are filled up at their ends with tokens that nothing attends to; losses are summed
    over the samples, each of which has those that it has alone. `whole`, for one sample: over prompt and continuation
    together, with the mask in every row's attention, as the paper has it literally; else over the continuation's rows
    alone, behind the prompt's frozen k and v, as at inference.
    """

    def __init__(self, model: Any, *samples: TokenizedSample, whole: bool = False):
        if whole and len(samples) > 1:
            raise ValueError(f"{len(samples)} samples are given, but the whole sequence is read one by one.")
        self._model, self._whole = model, whole
        self._device = input_device(model)
        self.lengths = [len(sample.context) for sample in samples]
        contexts = torch.zeros((len(samples), max(self.lengths)), dtype=torch.long, device="cpu")
        for row, sample in enumerate(samples):
            contexts[row, : len(sample.context)] = torch.tensor(sample.context, device="cpu")
        self._contexts = contexts.to(self._device)
        self.prompt = read_prompt(model, self._contexts)
        self.row_weights = self._lay_out(
            [(i, *continuation) for i, sample in enumerate(samples) for continuation in sample.continuations]
        )
        if whole:  # the hidden states of all tokens count, the prompt's too
            real = (self.row_weights > 0).float()
            real = torch.cat([real.new_ones(len(real), self.lengths[0]), real], 1)
            self.row_weights = real / real.sum(1, keepdim=True) / len(real)

    def _lay_out(self, asked: Sequence[tuple[int, list[int], int]]) -> Tensor:
        """Make rows of the continuations `asked`: (the sample's number, ids, how many precede the target); how much the
        hidden state of each token counts."""
        shape = (len(asked), max(len(tokens) for _, tokens, _ in asked))
        ids = torch.zeros(shape, dtype=torch.long, device="cpu")
        scored, row_weights = torch.zeros(shape, device="cpu"), torch.zeros(shape, device="cpu")
        counts = Counter(owner for owner, _, _ in asked)
        self.counts = [counts[owner] for owner in range(len(self.lengths))]
        for row, (owner, tokens, skip) in enumerate(asked):
            ids[row, : len(tokens)] = torch.tensor(tokens, device="cpu")
            row_weights[row, : len(tokens)] = 1.0 / len(tokens) / counts[owner]
            # Row i predicts token i + 1: the targets are predicted by rows skip - 1 .. len - 2.
            first = max(0, skip - 1)
            scored[row, first : len(tokens) - 1] = 1.0 / (len(tokens) - 1 - first) / counts[owner]
        self._ids = ids.to(self._device)
        self._rows = scored.to(self._device) > 0
        self._continuation = self._rows.nonzero()[:, 0]  # which one each target row belongs to
        # Every continuation of a sample weighs the same, whatever its length.
        self.weights = scored.to(self._device)[self._rows]
        self._owners = torch.tensor([owner for owner, _, _ in asked], device=self._device)
        return row_weights.to(self._device)

    def run(self, log_mask: Tensor | None) -> Outputs:
        """Forward of all continuations over the prompt under `log_mask` [L, n, H, T] (None: the full cache)."""
        if self._whole:
            return self._run_whole(log_mask)
        alone = len(self.lengths) == 1
        if log_mask is None and not alone:
            log_mask = self._unmasked()
        starts = torch.tensor(self.lengths, device=self._device)[self._owners[:1] if alone else self._owners]
        out = self._model(
            input_ids=self._ids,
            position_ids=starts[:, None] + torch.arange(self._ids.shape[1], device=self._device),
            past_key_values=FrozenPrompt(self.prompt, log_mask, None if alone else self._owners),
            use_cache=True,
            output_hidden_states=True,
        )
        return Outputs(log_softmax(out.logits[self._rows].float(), -1), out.hidden_states[1:])

    def _run_whole(self, log_mask: Tensor | None) -> Outputs:
        rows, width = self._ids.shape
        ids = torch.cat([self._contexts.expand(rows, -1), self._ids], 1)
        out = self._model(
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1], device=ids.device)[None],
            past_key_values=MaskedSequence(len(self.prompt), log_mask),
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=width,
        )
        return Outputs(log_softmax(out.logits[self._rows].float(), -1), out.hidden_states[1:])

    def scores(self, policy: Policy, number: int = 0) -> Tensor:
        """LKV-T scores u [L, H, T] of the prompt of sample `number`."""
        row, tokens = slice(number, number + 1), slice(0, self.lengths[number])
        parts = (policy.tokens(prompt.select(row, tokens), layer) for layer, prompt in enumerate(self.prompt))
        return torch.cat([part.to(self._device) for part in parts])

    def joined(self, masks: Sequence[Tensor]) -> Tensor:
        """The log-masks [L, n_i, H, T_i] of all samples as one [L, n, H, T]: what fills up a context is evicted."""
        longest = max(self.lengths)
        return torch.cat([pad(mask, (0, longest - mask.shape[-1]), value=_EVICTED) for mask in masks], 1)

    def _unmasked(self) -> Tensor:
        """The teacher's: all tokens of each continuation's own context."""
        heads = self.prompt[0].key.shape[1]
        shapes = [(len(self.prompt), n, heads, t) for n, t in zip(self.counts, self.lengths, strict=True)]
        return self.joined([torch.zeros(shape, device=self._device) for shape in shapes])

    def kl(self, teacher: Outputs, student: Outputs, weight: Tensor | None = None) -> Tensor:
        """D_KL(P_T || P_S): mean over target tokens, then over continuations, of which each counts `weight` [n]."""
        weights = self.weights if weight is None else self.weights * weight[self._continuation]
        return (kl_divergence(teacher.log_probs, student.log_probs) * weights).sum()

    def agreement(self, teacher: Outputs, student: Outputs) -> float:
        """Share of target tokens with the same most probable token, averaged like `kl`."""
        return float((is_top1_equal(teacher.log_probs, student.log_probs) * self.weights).sum())

    def hidden_distance(self, teacher: Outputs, student: Outputs, norm: str) -> Tensor:
        """1/L sum_l ||H_T - H_S||^2, averaged over tokens; `norm` as in `TrainingConfig.hidden_norm`."""
        total = self.row_weights.new_zeros(())
        for target, hidden in zip(teacher.hidden, student.hidden, strict=True):
            # Layers may lie on other devices than the losses.
            hidden, target = hidden.to(total.device), target.to(total.device)
            squared = (hidden.float() - target.float()).square().sum(-1)
            if norm == "relative":
                squared = squared / target.float().square().sum(-1).clamp(min=1e-12)
            elif norm == "mean":
                squared = squared / target.shape[-1]
            total = total + (squared * self.row_weights).sum()
        return total / len(teacher.hidden)


def soft_mask(policy: Policy, scores: Tensor, retention: float | Tensor, tau: float, noise: Tensor) -> Tensor:
    """log m~ [L, n, H, T] = log ST_b(u + g; tau) with b = r t (Sec. 3.4); `noise` [n, L, H, T].

    `retention` is one R, or one for each of the n continuations.
    """
    budgets = policy.ratios(retention) * scores.shape[-1]
    return soft_topk(scores + noise, budgets, tau).log_mask.transpose(0, 1)


def hard_mask(policy: Policy, scores: Tensor, retention: float, rows: int) -> Tensor:
    """The mask of inference as a log-mask [L, n, H, T]: the best floor(r t) tokens of each head."""
    budget = LearnedBudget(policy, retention)
    counts = [budget.limits(layer, *scores.shape[1:]) for layer in range(len(scores))]
    budgets = torch.tensor(counts, device=scores.device)
    rank = scores.argsort(-1, descending=True).argsort(-1)
    mask = torch.where(rank < budgets[..., None], 0.0, _EVICTED)
    return mask[:, None].expand(-1, rows, -1, -1)
