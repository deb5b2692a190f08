"""Fidelity on held-out questions and text: KL(full || compressed) and top-1 agreement over reference continuations.

python -m benchmarks.fidelity --data FOLDER    (FOLDER is the evaluation folder; nothing in it is trained on)
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.common import RESULTS, command_of, methods_of, settings_of
from benchmarks.heldout import TASKS, HeldOut
from lkv.evaluation.comparison import MethodComparison
from lkv.integrations.transformers.prefill import read_prompt
from lkv.methods.method import resolve_method
from lkv.models.loading import load_default
from lkv.policy.lookup import default_policy
from lkv.policy.policy import Policy
from lkv.utils.journal import open_journal
from lkv.utils.results import write_results
from lkv.utils.statistics import bootstrap

NAMES = ("full", "lkv", "lkv+refit", "lkv-t", "snapkv")
ALL = (*NAMES, "kvzip")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--policy", type=Path, default=None)
    parser.add_argument("--contexts", type=int, default=12, help="contexts a task (code: double)")
    parser.add_argument("--retention", type=float, default=0.15)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "fidelity.json")
    options = parser.parse_args()
    model, tokenizer = load_default(getattr(torch, options.dtype))
    policy = Policy.from_pretrained(options.policy) if options.policy else default_policy()
    of = {"policy": policy.digest()}
    heldout = HeldOut(options.data, tokenizer, options.seed)
    with open_journal(options.out.with_suffix(".jsonl"), settings_of(options) | of) as done:
        count = {task: options.contexts * (2 if task == "code" else 1) for task in TASKS}
        cases = sorted((number, task) for task in TASKS for number in range(count[task]))
        for number, task in tqdm(cases, desc="fidelity"):
            if f"{task}-{number}" in done:
                continue
            ids, asked = heldout.case(task, number)
            prompt = read_prompt(model, torch.tensor([ids]), queries=True)
            methods = methods_of(NAMES, policy, options.retention)
            kvzip = resolve_method("kvzip", model, retention=options.retention, tokenizer=tokenizer)
            methods.append(kvzip.for_prompt(ids, prompt))
            run = MethodComparison(model, ids, prompt, methods)
            kept = run.realised_retentions()
            measured = [[[f.kl, f.agreement] for f in run.measure_fidelity(ids_, skip)] for ids_, skip in asked]
            done.add(f"{task}-{number}", {"tokens": len(ids), "measured": measured, "realised": kept})
        write_results(
            options.out,
            "fidelity",
            summarise(dict(done), count, options.retention, ALL),
            options.seed,
            command_of("benchmarks.fidelity", options),
            of,
        )


def summarise(done: dict, count: dict[str, int], retention: float, names: Sequence[str]) -> list[dict]:
    """Rows per task and over all tasks: KL and agreement, with intervals from resampling the contexts."""
    rows = []
    for task in ["all", *count]:
        chosen = [done[f"{t}-{n}"] for t in count if task in ("all", t) for n in range(count[t])]
        for i, name in enumerate(names):
            kl, agreement = (
                bootstrap([[continuation[i][k] for continuation in sample["measured"]] for sample in chosen])
                for k in (0, 1)
            )
            rows.append(
                {
                    "method": name,
                    "task": task,
                    "tokens": round(sum(s["tokens"] for s in chosen) / len(chosen)),
                    "retention": 1.0 if name == "full" else retention,
                    "realised": sum(s["realised"][i] for s in chosen) / len(chosen),
                    "n": kl.n,
                    "contexts": len(chosen),
                    "value": kl.value,
                    "low": kl.low,
                    "high": kl.high,
                    "unit": "nats a token, KL(full || compressed)",
                    "kl": kl.value,
                    "agreement": agreement.value,
                    "agreement_low": agreement.low,
                    "agreement_high": agreement.high,
                }
            )
            print(f"{task:14} {name:14} n={kl.n:4} kl {kl.value:.3f} agreement {agreement.value:.3f}")
    return rows


if __name__ == "__main__":
    main()
