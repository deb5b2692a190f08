"""Needles in real prose, question unknown at compression: full cache, LKV, SnapKV and uniform budgets.

python -m benchmarks.needles --data FOLDER    (FOLDER holds PaulGrahamEssays_49.json.gz)
"""

import argparse
import gzip
import json
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.common import RESULTS, command_of, methods_of, settings_of
from lkv.evals.compare import Comparison
from lkv.evals.needles import make_needles
from lkv.models import default_policy, load_default
from lkv.policy import Policy
from lkv.prefill import read_prompt
from lkv.prompts import question_ids
from lkv.results import resumable, write_results
from lkv.statistics import bootstrap

NAMES = ("full", "lkv", "lkv-t", "snapkv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--policy", type=Path, default=None)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--retention", type=float, default=0.15)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "needles.json")
    options = parser.parse_args()
    model, tokenizer = load_default(getattr(torch, options.dtype))
    policy = Policy.from_pretrained(options.policy) if options.policy else default_policy()
    essays = json.loads(gzip.decompress((options.data / "PaulGrahamEssays_49.json.gz").read_bytes()))
    prose = [essays["text"].replace("\n", " ")]
    cases = [(t, n, s) for s in range(options.samples) for t in (1000, 2000) for n in (1, 4)]
    with resumable(options.out.with_suffix(".jsonl"), settings_of(options)) as done:
        for tokens, needles, sample in tqdm(cases, desc="needles"):
            key = f"{tokens}-{needles}-{sample}"
            if key in done:
                continue
            item = make_needles(tokenizer, prose, tokens, needles, options.seed * 100_000 + sample)
            prompt = read_prompt(model, torch.tensor([item.ids]), queries=True)
            run = Comparison(model, item.ids, prompt, methods_of(NAMES, policy, options.retention))
            answers = run.answers(question_ids(tokenizer, item.question), 24)
            found = [item.answer in tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
            done.add(key, {"found": found, "realised": run.realised()})
        rows = []
        for tokens in (1000, 2000):
            for needles in (1, 4):
                results = [done[f"{tokens}-{needles}-{s}"] for s in range(options.samples)]
                for i, name in enumerate(NAMES):
                    mean = bootstrap([[float(r["found"][i])] for r in results])
                    rows.append(
                        {
                            "method": name,
                            "tokens": tokens,
                            "needles": needles,
                            "dtype": options.dtype,
                            "retention": 1.0 if name == "full" else options.retention,
                            "realised": sum(r["realised"][i] for r in results) / len(results),
                            **mean._asdict(),
                            "unit": "share of needles found",
                        }
                    )
    write_results(options.out, "needles", rows, options.seed, command_of("benchmarks.needles", options))
    for row in rows:
        print(f"{row['method']:14} {row['tokens']} {row['needles']} {row['value']:.2f}")


if __name__ == "__main__":
    main()
