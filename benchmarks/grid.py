"""Three budget rules by three selectors (the paper's ablation) on the held-out continuations.

python -m benchmarks.grid --data FOLDER    (writes grid.json)
"""

import argparse
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.common import RESULTS, command_of, methods_of, settings_of
from benchmarks.fidelity import summarise
from benchmarks.heldout import TASKS, HeldOut
from lkv.evaluation.comparison import MethodComparison
from lkv.integrations.transformers.prefill import read_prompt
from lkv.models.loading import load_default
from lkv.policy.lookup import default_policy
from lkv.utils.journal import open_journal
from lkv.utils.results import write_results

RULES, SELECTORS = ("uniform", "ada", "lkv-h"), ("snapkv", "expected", "lkv-t")
NAMES = ("full", *(f"{rule}+{selector}" for rule in RULES for selector in SELECTORS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--contexts", type=int, default=4, help="contexts a task")
    parser.add_argument("--retention", type=float, default=0.15)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "grid.json")
    options = parser.parse_args()
    model, tokenizer = load_default(getattr(torch, options.dtype))
    policy = default_policy()
    of = {"policy": policy.digest()}
    heldout = HeldOut(options.data, tokenizer, options.seed)
    methods = methods_of(NAMES, policy, options.retention, model)
    with open_journal(options.out.with_suffix(".jsonl"), settings_of(options) | of) as done:
        count = dict.fromkeys(TASKS, options.contexts)
        for number, task in tqdm([(n, task) for n in range(options.contexts) for task in TASKS], desc="grid"):
            if f"{task}-{number}" in done:
                continue
            ids, asked = heldout.case(task, number)
            run = MethodComparison(model, ids, read_prompt(model, torch.tensor([ids]), queries=True), methods)
            kept = run.realised_retentions()
            measured = [[[f.kl, f.agreement] for f in run.measure_fidelity(ids_, skip)] for ids_, skip in asked]
            done.add(f"{task}-{number}", {"tokens": len(ids), "measured": measured, "realised": kept})
        rows = summarise(dict(done), count, options.retention, NAMES)
        write_results(options.out, "grid", rows, options.seed, command_of("benchmarks.grid", options), of)


if __name__ == "__main__":
    main()
