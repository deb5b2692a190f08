"""Fidelity on held-out questions and text: KL(full || compressed) and top-1 agreement over reference continuations.

python -m experiments.fidelity --data FOLDER    (FOLDER is the evaluation folder; nothing in it is trained on)
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.bootstrap import bootstrap
from experiments.common import parse_options, rows_of, run_cases
from experiments.heldout import TASKS, Continuations, HeldOut
from lkv.evaluation.comparison import MethodComparison, MethodGrid
from lkv.hf.loading import load_default
from lkv.hf.prompt_kv import read_prompt
from lkv.policy.lookup import default_policy
from lkv.policy.policy import Policy

METHODS = ("lkv", "lkv+compensation", "lkv-t", "snapkv", "kvzip")
Sample = dict[str, Any]


def main(
    name: str = "fidelity", methods: Sequence[str] = METHODS, contexts: int = 12, code: int = 2, doc: str | None = None
) -> None:
    """Measure `methods`; `code` is how many times as many contexts of code there are."""
    options = parse_options(
        doc or __doc__, name, "of evaluation files", policy=Path, contexts=contexts, retention=0.15, dtype="bfloat16",
        seed=0,
    )  # fmt: skip
    model, tokenizer = load_default(getattr(torch, options.dtype))
    policy = Policy.from_pretrained(options.policy) if options.policy else default_policy()
    grids = {"": MethodGrid(model, tokenizer, methods, [options.retention], policy)}
    heldout = HeldOut(options.data, tokenizer, options.seed)
    counts = {task: options.contexts * (code if task == "code" else 1) for task in TASKS}
    cases = {f"{t}-{n}": (t, n) for n in range(max(counts.values())) for t in TASKS if n < counts[t]}
    run_cases(
        f"experiments.{name}", options, name, cases,
        lambda task, number: measure(model, grids, *heldout.case(task, number)),
        lambda samples: summarise((t, None, samples[f"{t}-{n}"]) for t in TASKS for n in range(counts[t])),
        policy, ("contexts",),
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
    return row | {"agreement": agreement.value, "agreement_low": agreement.low, "agreement_high": agreement.high}


if __name__ == "__main__":
    main()
