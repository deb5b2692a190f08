"""Teacher and student over the continuations of one sample: what the losses of Sec. 3.5 compare."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from lkv.host.attention import device_of
from lkv.methods.budget import LearnedBudget
from lkv.ops.fidelity import agrees, kl
from lkv.ops.soft_topk import soft_topk
from lkv.policy import Policy
from lkv.prefill import read_prompt
from lkv.training.data.sample import TokenizedSample
from lkv.training.student import FrozenPrompt, MaskedSequence

_EVICTED = -1e4  # a log-mask whose exponential is exactly zero


def gumbel(shape: Iterable[int], generator: torch.Generator, device: torch.device) -> Tensor:
    """Standard Gumbel noise from a CPU generator, the same on every device."""
    uniform = torch.rand(tuple(shape), generator=generator, device="cpu").clamp(1e-10, 1 - 1e-7)
    return -torch.log(-torch.log(uniform)).to(device)


@dataclass(frozen=True)
class Outputs:
    """What the continuations of one sample gave: log-probabilities [N, V] of the target rows and hidden states."""

    log_probs: Tensor
    hidden: tuple[Tensor, ...]


class SampleDistillation:
    """Runs teacher and student over the continuations of one sample.

    `whole`: over prompt and continuation together, with the mask in every row's attention, as the paper has it
    literally; else over the continuation's rows alone, behind the prompt's frozen k and v, as at inference.
    """

    def __init__(self, model: Any, sample: TokenizedSample, whole: bool = False):
        self._model, self._whole = model, whole
        device = device_of(model)
        self._context = torch.tensor([sample.context], device=device)
        self.prompt = read_prompt(model, self._context)
        self.tokens = len(sample.context)
        width = max(len(ids) for ids, _ in sample.continuations)
        shape = (len(sample.continuations), width)
        ids = torch.zeros(shape, dtype=torch.long, device="cpu")
        scored, row_weights = torch.zeros(shape, device="cpu"), torch.zeros(shape, device="cpu")
        for row, (tokens, skip) in enumerate(sample.continuations):
            ids[row, : len(tokens)] = torch.tensor(tokens, device="cpu")
            row_weights[row, : len(tokens)] = 1.0 / len(tokens) / shape[0]
            # Row i predicts token i + 1: the targets are predicted by rows skip - 1 .. len - 2.
            first = max(0, skip - 1)
            scored[row, first : len(tokens) - 1] = 1.0 / (len(tokens) - 1 - first) / shape[0]
        self._ids = ids.to(device)
        self._rows = scored.to(device) > 0
        self._continuation = self._rows.nonzero()[:, 0]  # which one each target row belongs to
        # Every continuation weighs the same, whatever its length.
        self.weights = scored.to(device)[self._rows]
        self.row_weights = row_weights.to(device)
        if whole:  # the hidden states of all tokens count, the prompt's too
            real = torch.cat([row_weights.new_ones(shape[0], self.tokens), (row_weights > 0).float()], 1)
            self.row_weights = (real / real.sum(1, keepdim=True) / shape[0]).to(device)

    def run(self, log_mask: Tensor | None) -> Outputs:
        """Forward of all continuations over the prompt under `log_mask` [L, n, H, T] (None: the full cache)."""
        if self._whole:
            return self._run_whole(log_mask)
        positions = torch.arange(self.tokens, self.tokens + self._ids.shape[1], device=self._ids.device)
        out = self._model(
            input_ids=self._ids,
            position_ids=positions[None],
            past_key_values=FrozenPrompt(self.prompt, log_mask),
            use_cache=True,
            output_hidden_states=True,
        )
        return Outputs(log_softmax(out.logits[self._rows].float(), -1), out.hidden_states[1:])

    def _run_whole(self, log_mask: Tensor | None) -> Outputs:
        rows, width = self._ids.shape
        ids = torch.cat([self._context.expand(rows, -1), self._ids], 1)
        out = self._model(
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1], device=ids.device)[None],
            past_key_values=MaskedSequence(len(self.prompt), log_mask),
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=width,
        )
        return Outputs(log_softmax(out.logits[self._rows].float(), -1), out.hidden_states[1:])

    def scores(self, policy: Policy) -> Tensor:
        """LKV-T scores u [L, H, T] of the prompt."""
        return torch.cat([policy.tokens(prompt, layer) for layer, prompt in enumerate(self.prompt)])

    def kl(self, teacher: Outputs, student: Outputs, weight: Tensor | None = None) -> Tensor:
        """D_KL(P_T || P_S): mean over target tokens, then over continuations, of which each counts `weight` [n]."""
        weights = self.weights if weight is None else self.weights * weight[self._continuation]
        return (kl(teacher.log_probs, student.log_probs) * weights).sum()

    def agreement(self, teacher: Outputs, student: Outputs) -> float:
        """Share of target tokens with the same most probable token, averaged like `kl`."""
        return float((agrees(teacher.log_probs, student.log_probs) * self.weights).sum())

    def hidden_distance(self, teacher: Outputs, student: Outputs, norm: str) -> Tensor:
        """1/L sum_l ||H_T - H_S||^2, averaged over tokens; `norm` as in `TrainingConfig.hidden_norm`."""
        total = self.row_weights.new_zeros(())
        for target, hidden in zip(teacher.hidden, student.hidden, strict=True):
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
