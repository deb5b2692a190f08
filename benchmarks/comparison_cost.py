"""What comparing several methods costs, as a share of the full cache alone on the same samples (RULER).

python -m benchmarks.comparison_cost --data EVAL_FOLDER    (writes comparison_cost.json)
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import RESULTS, command_of
from lkv.evaluation import ruler
from lkv.evaluation.runner import EvaluationConfig, evaluate
from lkv.models.loading import load_default
from lkv.policy.lookup import default_policy
from lkv.utils.journal import read_samples
from lkv.utils.results import write_results

_SEVEN = ("lkv", "snapkv", "pyramidkv", "adakv-snapkv", "adakv-expected", "criticalkv", "keydiff")
_SETS = {"eight methods of one pass": (*_SEVEN, "tova"), "seven of them and KVzip": (*_SEVEN, "kvzip")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with RULER's sources")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--samples", type=int, default=1, help="of each task")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS / "comparison_cost.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load_default(torch.bfloat16)
    sources = ruler.Sources.from_folder(options.data)
    rows: list[dict[str, Any]] = []
    for tokens in options.tokens:
        examples = [
            example
            for task in ruler.TASKS
            for example in ruler.make_examples(task, tokens, options.samples, tokenizer, sources, 0)
        ]
        for number, (name, methods) in enumerate(_SETS.items()):
            lines = options.out.with_name(f"comparison_cost-{tokens}-{number}.jsonl")
            evaluate(model, tokenizer, examples, EvaluationConfig(methods, [0.15], policy=default_policy()), lines)
            rows.append(_row(lines, name, tokens, options.threads))
            print(rows[-1], flush=True)
    write_results(options.out, "comparison_cost", rows, 0, command_of("benchmarks.comparison_cost", options))


def _row(lines: Path, name: str, tokens: int, threads: int) -> dict[str, Any]:
    _, samples = read_samples(lines)
    seconds = np.array([[s["seconds"][part] for part in ("prefill", "methods", "full")] for s in samples])
    total = np.array([seconds[:, :2].sum(1), seconds[:, 2]])
    drawn = total[:, np.random.default_rng(0).integers(0, len(samples), (2000, len(samples)))].sum(-1)
    low, high = np.quantile(drawn[0] / drawn[1], [0.025, 0.975])
    row = {"methods": name, "tokens": tokens, "threads": threads, "n": len(samples)}
    row |= {"value": total[0].sum() / total[1].sum(), "low": low, "high": high, "baseline": "full"}
    row |= {"unit": "time of the whole comparison by that of the full cache alone, reading and answering"}
    return row | {f"{part}_seconds": seconds[:, i].mean() for i, part in enumerate(("prefill", "methods", "full"))}


if __name__ == "__main__":
    main()
