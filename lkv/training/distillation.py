"""Teacher, student and losses of the distillation (Sec. 3.5)."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, pad

from lkv.config import TrainingConfig
from lkv.errors import TrainingError
from lkv.integrations.transformers.attention import input_device, patch_attention
from lkv.integrations.transformers.cache_layers import AttentionCacheLayer, BaseCache
from lkv.integrations.transformers.prefill import FrozenPromptLayer, LayerKV, as_prompt_kv, read_prompt
from lkv.kernels.soft_mask_attention import soft_mask_attention
from lkv.kernels.soft_topk import soft_topk
from lkv.methods.budgets import LearnedBudget
from lkv.policy.policy import Policy
from lkv.training.data.samples import TokenizedSample
from lkv.training.schedule import Schedule, draw_retentions, retention_weights
from lkv.utils.fidelity import is_top1_equal, kl_divergence


class FrozenPrompt(BaseCache):
    """A cache holding the full k and v [1, H, T, d] of a prompt, layer by layer, for continuations of any number.

    `log_mask` [L, n, H, T] weighs the prompt's tokens for each of n continuations (None: the full cache). Own tokens
    of a continuation are not masked. Of several prompts, [C, H, T, d], `owners` [n] says which one each continuation
    follows. For one forward pass: what it appends is not stored.
    """

    def __init__(self, prompt: list[LayerKV], log_mask: Tensor | None = None, owners: Tensor | None = None):
        masks: Any = [None] * len(prompt) if log_mask is None else log_mask
        layers = [_MaskedLayer(layer, mask, owners) for layer, mask in zip(prompt, masks, strict=True)]
        super().__init__(layers=as_prompt_kv(prompt).continuation_layers(layers))


class _MaskedLayer(FrozenPromptLayer):
    def __init__(self, prompt: LayerKV, log_mask: Tensor | None, owners: Tensor | None):
        super().__init__(prompt)
        self._log_mask, self._owners = log_mask, owners

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        rows, heads, new, _ = key.shape
        k = torch.cat([self._of_rows(self._prompt.key, rows), key], 2)
        v = torch.cat([self._of_rows(self._prompt.value, rows), value], 2)
        log_mask = k.new_zeros((rows, heads, k.shape[2]), dtype=torch.float32)
        if self._log_mask is not None:
            # A model may be spread over devices: the masks of all layers are made on one.
            given = self._log_mask.to(k.device)
            log_mask = torch.cat([given, log_mask[..., :new].to(given.dtype)], -1)
        # Under autocast the rotation leaves q and k in float32 beside v in half precision.
        return soft_mask_attention(query.to(v.dtype), k.to(v.dtype), v, log_mask, scale).transpose(1, 2)

    def _of_rows(self, x: Tensor, rows: int) -> Tensor:
        """The prompt's x for each of `rows` continuations."""
        return x.expand(rows, -1, -1, -1) if self._owners is None else x[self._owners.to(x.device)]


class MaskedSequence(BaseCache):
    """No cache at all, but masks for a forward pass over whole sequences, prompt and continuation together: every query
    row sees the prompt's tokens under `log_mask` [L, n, H, T] (the literal student of Sec. 3.5; None: plain attention).
    """

    def __init__(self, layers: int, log_mask: Tensor | None = None):
        masks: Any = [None] * layers if log_mask is None else log_mask
        super().__init__(layers=[_SequenceLayer(mask) for mask in masks])


class _SequenceLayer(AttentionCacheLayer):
    def __init__(self, log_mask: Tensor | None):
        super().__init__()
        self._log_mask = log_mask

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        if self._log_mask is None:
            return stock()
        follows = key.shape[2] - self._log_mask.shape[-1]
        free = self._log_mask.new_zeros((*self._log_mask.shape[:2], follows))
        log_mask = torch.cat([self._log_mask, free], -1)
        out = soft_mask_attention(query.to(value.dtype), key.to(value.dtype), value, log_mask, scale)
        return out.transpose(1, 2)


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


_SIMILAR = 0.75  # of a group's longest context, the shortest at least: what is filled up costs as much as text
_STRETCHED = ("dynamic", "longrope")  # rotations that follow the longest text of a forward pass


class SampleGroup(NamedTuple):
    """Samples with their numbers in the order of training, which share their forward passes; one that is not `counted`
    has no losses of its own."""

    numbered: list[tuple[int, TokenizedSample]]
    counted: bool = True

    @property
    def named(self) -> str:
        """Which these are, for messages."""
        return ", ".join(f"sample {number}, source {sample.source!r}" for number, sample in self.numbered)


def group_samples(
    numbered: Sequence[tuple[int, TokenizedSample]], most: int, sharded: bool = False
) -> list[SampleGroup]:
    """The samples that have continuations, in groups of up to `most` contexts of similar length.

    `sharded`: one that has none stays as a group that is not counted, so that all processes make as many passes.
    """
    ready = [(number, sample) for number, sample in numbered if sample.continuations]
    empty = [(number, sample) for number, sample in numbered if not sample.continuations] if sharded else []
    if most > 1:
        ready.sort(key=lambda pair: (-len(pair[1].context), pair[0]))
    groups: list[SampleGroup] = []
    for number, sample in ready:
        last = groups[-1].numbered if groups else []
        if last and len(last) < most and len(sample.context) >= _SIMILAR * len(last[0][1].context):
            last.append((number, sample))
        else:
            groups.append(SampleGroup([(number, sample)]))
    stand_ins = [(number, replace(sample, continuations=[(sample.context[:2], 0)])) for number, sample in empty]
    return groups + [SampleGroup([pair], counted=False) for pair in stand_ins]


def distillation_losses(
    model: Any, policy: Policy, group: SampleGroup, config: TrainingConfig, now: Schedule
) -> tuple[Tensor, Tensor]:
    """KL and hidden-state loss of the student under `policy`, each summed over the samples of `group`."""
    run = SampleDistillation(model, *(sample for _, sample in group.numbered), whole=config.student == "full")
    with torch.no_grad():
        teacher = run.run(None)
    masks, weighed = [], []
    for index, (number, sample) in enumerate(group.numbered):
        generator = torch.Generator("cpu").manual_seed(config.seed * 1_000_003 + number)
        scores, rows = run.scores(policy, index), len(sample.continuations)
        noise = gumbel((rows, *scores.shape), generator, scores.device)
        retention = draw_retentions(config, rows, now.retention, generator)
        masks.append(soft_mask(policy, scores, retention.to(scores.device), now.tau, noise))
        weighed.append(retention_weights(config, retention).to(scores.device))
    student = run.run(run.joined(masks))
    hidden = run.hidden_distance(teacher, student, config.hidden_norm)
    return run.kl(teacher, student, torch.cat(weighed)) * group.counted, hidden * group.counted


def check_batching(config: TrainingConfig, model: Any, sharers: int) -> None:
    """Raise TrainingError where contexts of `model` cannot share a forward pass, or `sharers` processes that hold a
    part of its weights each would not make the same passes."""
    attached = patch_attention(model)
    if config.contexts_per_forward > 1:
        if any(attached.sliding_windows) or any(kind in attached.spec.rope for kind in _STRETCHED):
            raise TrainingError(
                f"contexts_per_forward is {config.contexts_per_forward}, but this model has sliding layers or a rotary "
                "embedding that depends on the longest text, so that its contexts are read one by one; give 1."
            )
        if sharers > 1:
            raise TrainingError("contexts_per_forward is 1 where the model's weights are shared out; leave it out.")
    if config.batch % sharers:
        raise TrainingError(
            f"{config.batch} contexts a step cannot be shared out evenly among {sharers} processes that hold parts of "
            "one model; give a --batch that they divide."
        )
