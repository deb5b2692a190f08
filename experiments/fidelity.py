"""Fidelity on held-out questions and text: KL(full || compressed) and top-1 agreement over reference continuations.

python -m experiments.fidelity --data FOLDER    (FOLDER is the evaluation folder; nothing in it is trained on)
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.bootstrap import bootstrap, named_interval
from experiments.common import SUBJECT, Subject, parse_options, per_length, rows_of, run_cases, subject_of
from experiments.heldout import TASKS, Continuations, HeldOut, cases_by_length
from lkv.evaluation.comparison import BoundMethod, Fidelity, MethodComparison, MethodGrid
from lkv.hf.prompt_kv import LayerKV, read_prompt
from lkv.utils.fidelity import is_top1_equal, kl_divergence

METHODS = ("lkv", "lkv+compensation", "lkv-t", "snapkv", "kvzip")
Sample = dict[str, Any]
Samples = Iterable[tuple[str, int, Sample]]  # (task, length, sample)


def main(
    name: str = "fidelity", methods: Sequence[str] = METHODS, contexts: int = 12, code: int = 2, doc: str | None = None
) -> None:
    """Measure `methods`; `code` is how many times as many contexts of code there are."""
    options = parse_options(
        doc or __doc__, name, "of evaluation files", **(SUBJECT | {"dtype": "bfloat16"}), contexts=contexts,
        retention=0.15, seed=0, out=Path,
    )  # fmt: skip
    subject = subject_of(options, name)
    grids = {"": MethodGrid(subject.model, subject.tokenizer, methods, [options.retention], subject.policy)}
    heldout = HeldOut(options.data, subject.tokenizer, options.seed)
    counts = {task: options.contexts * (code if task == "code" else 1) for task in TASKS}
    cases = {f"{t}-{n}": (t, n) for n in range(max(counts.values())) for t in TASKS if n < counts[t]}
    run_cases(
        f"experiments.{name}", options, name, cases,
        lambda task, number: measure(subject.model, grids, *heldout.case(task, number)),
        lambda samples: summarise((t, None, samples[f"{t}-{n}"]) for t in TASKS for n in range(counts[t])),
        subject.policy, ("contexts",),
    )  # fmt: skip


def run_by_length(
    module: str,
    options: argparse.Namespace,
    name: str,
    subject: Subject,
    measure: Callable[[list[int], Continuations], Sample],
    summarise: Callable[[Samples], list[dict]],
    details: Mapping[str, Any] | None = None,
) -> list[dict]:
    """Measure --contexts held-out contexts of each of --tasks and --tokens as `run_cases` does, and return the rows.

    `measure` gets a context's ids and continuations.
    """
    heldout = HeldOut(options.data, subject.tokenizer, options.seed)
    cases = cases_by_length(options.tasks, per_length(options.tokens, options.contexts))

    def rows_of_samples(samples: dict[str, Sample]) -> list[dict]:
        rows = summarise((cases[key][0], cases[key][2], sample) for key, sample in samples.items())
        return [{"model": subject.name, **row} for row in rows]

    return run_cases(
        module, options, name, cases, lambda *case: measure(*heldout.case(*case)), rows_of_samples, subject.policy,
        ("contexts", "tokens", "tasks"), details,
    )  # fmt: skip


@torch.no_grad()
def measure(
    model: Any, grids: dict[str, MethodGrid], ids: list[int], continuations: Continuations, own_answer: int = 0
) -> Sample:
    """KL and agreement of each method and retention over each continuation, and what each kept.

    `own_answer`: so many tokens of the model's own answer to the first question are a continuation too.
    """
    prompt = read_prompt(model, torch.tensor([ids]), queries=True)
    rows = rows_of(grids, ids, prompt)
    if own_answer and continuations and (skip := continuations[0][1]):
        question = continuations[0][0][:skip]
        answer = MethodComparison(model, ids, prompt, [rows[0][2]]).generate(question, own_answer)[0]
        continuations = [*continuations, (question + answer, skip)]
    comparison = MethodComparison(model, ids, prompt, [method for _, _, method in rows])
    return {
        "tokens": len(ids),
        "rows": [row[:2] for row in rows],
        "kept": comparison.realised_retentions(),
        "measured": [
            [[f.kl, f.agreement] for f in comparison.measure_fidelity(target, skip)] for target, skip in continuations
        ],
    }


def measure_in_turn(
    model: Any, ids: list[int], prompt: list[LayerKV], rows: Sequence[BoundMethod], continuations: Continuations
) -> Iterator[tuple[MethodComparison, Iterator[Fidelity]]]:
    """Each method but the first, the full cache, by itself, as memory budgets need it: the compressed prompt, and its
    fidelity over each continuation, which is measured when it is read."""
    full = MethodComparison(model, ids, prompt, [rows[0].method])
    predictions = [full.predict(target, skip).row(0) for target, skip in continuations]
    for row in rows[1:]:
        own = MethodComparison(model, ids, prompt, [row.method])
        pairs = zip(continuations, predictions, strict=True)
        yield own, (own.predict(target, skip).row(0).fidelity_to(expected) for (target, skip), expected in pairs)


def kl_and_agreement(full: Tensor, compressed: Tensor) -> list[float]:
    """Mean KL and agreement of log-probabilities [n, V]."""
    return [float(x.float().mean()) for x in (kl_divergence(full, compressed), is_top1_equal(full, compressed))]


def summarise(samples: Iterable[tuple[str, int | None, Sample]]) -> list[dict]:
    """Rows by method, retention, length and task ("all" for all of them), of (task, length, sample).

    Without a length, a row has the mean length of its contexts.
    """
    groups: dict[tuple[str, int | None, str, float], list[tuple[Sample, int]]] = {}
    for task, tokens, sample in samples:
        for group in ("all", task):
            for index, (method, retention) in enumerate(sample["rows"]):
                groups.setdefault((group, tokens, method, retention), []).append((sample, index))
    rows = []
    for (task, tokens, method, retention), members in groups.items():
        row: dict[str, Any] = {"method": method, "task": task}
        row |= {"tokens": tokens or round(sum(sample["tokens"] for sample, _ in members) / len(members))}
        row |= {"retention": retention, "realised": sum(s["kept"][i] for s, i in members) / len(members)}
        rows.append(row | fidelity_row(members))
        if task == "all" or tokens is None:
            line = f"n {rows[-1]['n']:4} kl {rows[-1]['kl']:.3f} agreement {rows[-1]['agreement']:.3f}"
            print(f"{task:14} {method:16} {row['tokens']:6} R {retention:4} {line}")
    return rows


def fidelity_row(members: Sequence[tuple[Sample, int]]) -> dict[str, Any]:
    """KL and agreement over all continuations, with intervals from resampling the contexts.

    `members` are samples, each with the index of the method in it.
    """
    kl, agreement = (
        bootstrap([[continuation[i][k] for continuation in sample["measured"]] for sample, i in members])
        for k in (0, 1)
    )
    row = {"contexts": len(members), **kl._asdict(), "unit": "nats a token, KL(full || compressed)", "kl": kl.value}
    return row | named_interval("agreement", agreement)


if __name__ == "__main__":
    main()
