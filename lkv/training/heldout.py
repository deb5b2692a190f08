"""Fidelity of predictions after eviction to the full cache's predictions, on held-out texts.

`measure_policy` evicts by a mask over the whole prompt, which is equivalent to a cache without the evicted entries.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lkv.evaluation.comparison import MethodComparison, MethodGrid
from lkv.hf.attention import input_device
from lkv.hf.prompt_kv import read_prompt
from lkv.policy.policy import Policy
from lkv.training.data.samples import TokenizedSample
from lkv.training.distillation import Outputs, SampleDistillation, hard_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROGRESS_RETENTIONS = (0.15, 0.05)
TABLE_RETENTIONS = (0.3, 0.15, 0.05)
_BASELINES = {
    "lkv": "new policy",
    "lkv-h+expected": "Expected Attention, its budgets",
    "default": "the default policy so far",
    "kvzip": "KVzip (reads twice)",
    "snapkv": "SnapKV",
}


class HeldOutFidelity(NamedTuple):
    """Means over target tokens, continuations and texts."""

    kl: float
    agreement: float


@torch.no_grad()
def read_text(model: "PreTrainedModel", sample: TokenizedSample) -> tuple[SampleDistillation, Outputs]:
    """Read a sample with the full cache: its prompt, and the predictions after it."""
    run = SampleDistillation(model, sample)
    return run, run.run(None)._replace(hidden=())


@torch.no_grad()
def measure_policy(
    policy: Policy, texts: Iterable[tuple[SampleDistillation, Outputs]], retentions: Sequence[float]
) -> dict[float, HeldOutFidelity]:
    """KL and agreement of `policy` by retention, over `texts` as `read_text` returns them."""
    results: dict[float, list[HeldOutFidelity]] = {retention: [] for retention in retentions}
    for run, teacher in texts:
        scores = run.scores(policy)
        for retention in retentions:
            student = run.run(hard_mask(policy, scores, retention, sum(run.counts)))
            fidelity = HeldOutFidelity(float(run.kl(teacher, student)), run.agreement(teacher, student))
            results[retention].append(fidelity)
    return {retention: _mean(values) for retention, values in results.items()}


@torch.no_grad()
def compare(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    samples: Sequence[TokenizedSample],
    policy: Policy,
    default: Policy | None = None,
    retentions: Sequence[float] = TABLE_RETENTIONS,
) -> list[dict[str, Any]]:
    """Measure a new policy, the model's previous default policy, and baselines.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        samples: Texts that neither policy was trained on.
        policy: The new policy.
        default: The policy that was the model's default, if any.
        retentions: The retentions to measure at.

    Returns:
        One row per method and retention, without methods that do not support the texts.
    """
    names = [name if name != "default" else "lkv@default" for name in _BASELINES]
    if default is None:
        names.remove("lkv@default")
    grid = MethodGrid(
        model, tokenizer, names, retentions, policy, policies={} if default is None else {"default": default}
    )
    results: dict[tuple[str, float], list[HeldOutFidelity]] = {}
    for sample in samples:
        ids = torch.tensor([sample.context], device=input_device(model))
        prompt = read_prompt(model, ids, queries=grid.required_queries)
        (full, *rows), _ = grid.bind(sample.context, prompt)
        for retention in retentions:  # each a batch, as the logits of all rows at once can be large
            batch = [full, *(row for row in rows if row.retention == retention)]
            comparison = MethodComparison(model, sample.context, prompt, [row.method for row in batch])
            measured = [comparison.measure_fidelity(*continuation) for continuation in sample.continuations]
            for row, fidelities in zip(batch[1:], list(zip(*measured, strict=True))[1:], strict=True):
                values = [HeldOutFidelity(fidelity.kl, fidelity.agreement) for fidelity in fidelities]
                results.setdefault((row.name.removeprefix("lkv@"), retention), []).append(_mean(values))
    return [
        {"method": name, "retention": retention, "texts": len(values), **_mean(values)._asdict()}
        for name in _BASELINES
        for retention in retentions
        if len(values := results.get((name, retention), [])) == len(samples)
    ]


def better_baselines(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return at which retentions SnapKV and KVzip have a lower KL than the new policy in the rows of `compare`."""
    kl = {(row["method"], row["retention"]): row["kl"] for row in rows}
    better: dict[str, list[float]] = {}
    for (name, retention), value in kl.items():
        if name in ("kvzip", "snapkv") and value < kl["lkv", retention]:
            better.setdefault(name, []).append(retention)
    return better


def describe_better_baselines(better: dict[str, list[float]]) -> list[str]:
    """Return what `better_baselines` found as lines of text."""
    return [
        f"{_BASELINES[name]} is closer to the full cache than the new policy at R = {', '.join(map(str, at))} on these "
        f'texts: method="{name}", or a fit of more minutes, is the better choice there'
        for name, at in better.items()
    ]


def format_kl(kl: float) -> str:
    """Format a KL with three decimals, or two significant digits if it is smaller."""
    return f"{kl:.3f}" if kl >= 0.01 else f"{kl:.2g}"


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of `compare` as text: KL and agreement a method and retention."""
    retentions = list(dict.fromkeys(row["retention"] for row in rows))
    lines = [f"{'KL / agreement on held-out texts':34}" + "".join(f"R = {retention:<14g}" for retention in retentions)]
    for name in dict.fromkeys(row["method"] for row in rows):
        named = [row for row in rows if row["method"] == name]
        cells = {row["retention"]: f"{format_kl(row['kl'])} / {row['agreement']:.2f}" for row in named}
        lines.append(f"{_BASELINES[name]:34}" + "".join(f"{cells[retention]:18}" for retention in retentions))
    return "\n".join(lines)


def _mean(values: Sequence[HeldOutFidelity]) -> HeldOutFidelity:
    return HeldOutFidelity(*(sum(column) / len(values) for column in zip(*values, strict=True)))
