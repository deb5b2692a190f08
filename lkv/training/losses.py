"""The losses of training samples: which of them share a forward pass, and the passes themselves (Sec. 3.5)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lkv.config import TrainingConfig
from lkv.errors import TrainingError
from lkv.integrations.transformers.attention import patch_attention
from lkv.policy.policy import Policy
from lkv.training.data.sample import TokenizedSample
from lkv.training.distillation import SampleDistillation, gumbel, soft_mask
from lkv.training.schedule import Schedule, draw_retentions, weights

_SIMILAR = 0.75  # of a group's longest context, the shortest at least: what is filled up costs as much as text
_STRETCHED = ("dynamic", "longrope")  # rotations that follow the longest text of a forward pass


class Group(NamedTuple):
    """Samples with their numbers in the order of training, which share their forward passes; one that is not `counted`
    has no losses of its own."""

    numbered: list[tuple[int, TokenizedSample]]
    counted: bool = True

    @property
    def named(self) -> str:
        """Which these are, for messages."""
        return ", ".join(f"sample {number}, source {sample.source!r}" for number, sample in self.numbered)


def grouped(numbered: Sequence[tuple[int, TokenizedSample]], most: int, sharded: bool = False) -> list[Group]:
    """The samples that have continuations, in groups of up to `most` contexts of similar length.

    `sharded`: one that has none stays as a group that is not counted, so that all processes make as many passes.
    """
    ready = [(number, sample) for number, sample in numbered if sample.continuations]
    empty = [(number, sample) for number, sample in numbered if not sample.continuations] if sharded else []
    if most > 1:
        ready.sort(key=lambda pair: (-len(pair[1].context), pair[0]))
    groups: list[Group] = []
    for number, sample in ready:
        last = groups[-1].numbered if groups else []
        if last and len(last) < most and len(sample.context) >= _SIMILAR * len(last[0][1].context):
            last.append((number, sample))
        else:
            groups.append(Group([(number, sample)]))
    stand_ins = [(number, replace(sample, continuations=[(sample.context[:2], 0)])) for number, sample in empty]
    return groups + [Group([pair], counted=False) for pair in stand_ins]


def losses(model: Any, policy: Policy, group: Group, config: TrainingConfig, now: Schedule) -> tuple[Tensor, Tensor]:
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
        weighed.append(weights(config, retention).to(scores.device))
    student = run.run(run.joined(masks))
    hidden = run.hidden_distance(teacher, student, config.hidden_norm)
    return run.kl(teacher, student, torch.cat(weighed)) * group.counted, hidden * group.counted


def check_sharing(config: TrainingConfig, model: Any, sharers: int) -> None:
    """Raise TrainingError where contexts of `model` cannot share a forward pass, or `sharers` processes that hold a
    part of its weights each would not make the same passes."""
    attached = patch_attention(model)
    if config.contexts_per_forward > 1:
        if any(attached.windows) or any(kind in attached.spec.rope for kind in _STRETCHED):
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
