"""What comparing several methods costs, as a share of the full cache alone on the same samples (RULER).

python -m experiments.comparison_cost --data EVAL_FOLDER    (writes comparison_cost.json)

Every call measures anew: times of another machine, day or number of threads do not count.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.common import parse_options, save_rows
from lkv.evaluation import ruler
from lkv.evaluation.comparison import generate_greedily
from lkv.evaluation.example import Example, make_prompt
from lkv.evaluation.runner import EvaluationConfig, evaluate
from lkv.hf.loading import load_default
from lkv.policy.lookup import default_policy
from lkv.utils.journal import read_samples

_SEVEN = ("lkv", "snapkv", "pyramidkv", "adakv-snapkv", "adakv-expected", "criticalkv", "keydiff")
_SETS = {"eight methods of one pass": (*_SEVEN, "tova"), "seven of them and KVzip": (*_SEVEN, "kvzip")}


def main() -> None:
    options = parse_options(
        __doc__, "comparison_cost", "with RULER's sources", tokens=[2048, 4096], samples=1,
        threads=torch.get_num_threads(),
    )  # fmt: skip
    torch.set_num_threads(options.threads)
    model, tokenizer = load_default(torch.bfloat16)
    sources = ruler.Sources.from_folder(options.data)
    rows = []
    for tokens in options.tokens:
        examples = [
            example
            for task in ruler.TASKS
            for example in ruler.make_examples(task, tokens, options.samples, tokenizer, sources, 0)
        ]
        for name, methods in _SETS.items():
            config = EvaluationConfig(methods, [0.15], policy=default_policy())
            with tempfile.TemporaryDirectory() as folder:
                lines = Path(folder) / "samples.jsonl"
                evaluate(model, tokenizer, examples, config, lines)
                samples = read_samples(lines)[1]
            parts = ("prefill", "methods", "full")
            for sample, example in zip(samples, examples, strict=True):
                sample["seconds"]["full"] = full_seconds(model, tokenizer, example)
            seconds = np.array([[sample["seconds"][part] for part in parts] for sample in samples])
            total = np.array([seconds[:, :2].sum(1), seconds[:, 2]])
            resamples = total[:, np.random.default_rng(0).integers(0, len(seconds), (2000, len(seconds)))].sum(-1)
            low, high = np.quantile(resamples[0] / resamples[1], [0.025, 0.975])
            row = {"methods": name, "tokens": tokens, "threads": options.threads, "n": len(seconds)}
            row |= {"value": total[0].sum() / total[1].sum(), "low": low, "high": high, "baseline": "full"}
            row |= {"unit": "time of the whole comparison by that of the full cache alone, reading and answering"}
            rows.append(row | {f"{part}_seconds": seconds[:, i].mean() for i, part in enumerate(parts)})
            print(rows[-1], flush=True)
    save_rows(options, "comparison_cost", rows)


def full_seconds(model: Any, tokenizer: Any, example: Example) -> float:
    """The time to read a prompt and answer with transformers' own cache."""
    prompt = make_prompt(example, tokenizer, "kvpress", model.config.max_position_embeddings)
    started = time.perf_counter()
    generate_greedily(model, [prompt.context + prompt.question], example.max_new_tokens)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
