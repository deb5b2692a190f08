"""Needles in real prose by length and retention, question unknown at compression.

python -m benchmarks.needles --data FOLDER    (FOLDER holds PaulGrahamEssays_49.json.gz; writes needles.json)
python -m benchmarks.needles --data FOLDER --model NAME --tokens 2000 16000 --samples 10 4    (needles-NAME.json)
"""

import argparse
import gzip
import json
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.common import add_subject, command_of, method_grids, per_length, rows_of, settings_of, subject_of
from lkv.evaluation.comparison import MethodComparison
from lkv.evaluation.needles import make_needles
from lkv.integrations.transformers.prefill import read_prompt
from lkv.utils.journal import Journal, open_journal
from lkv.utils.prompts import encode_question
from lkv.utils.results import write_results
from lkv.utils.statistics import bootstrap

METHODS = ("lkv", "kvzip", "lkv-h+expected", "snapkv")
NEEDLES = (1, 4)  # hidden in a text, of which one is asked for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    add_subject(parser)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 2000, 4000, 7800])
    parser.add_argument(
        "--samples", type=int, nargs="+", default=[10], help="a number of needles, for each length or all"
    )
    parser.add_argument("--retention", type=float, nargs="+", default=[0.15, 0.05])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="needles", help="of the result")
    parser.add_argument("--out", type=Path, default=None, help="(default: benchmarks/results/NAME[-MODEL].json)")
    options = parser.parse_args()
    samples = per_length(options.tokens, options.samples)
    subject = subject_of(options)
    model, tokenizer = subject.model, subject.tokenizer
    out = options.out or subject.results(options.name)
    grids = method_grids(model, tokenizer, options.methods, options.retention, subject.policy)
    essays = json.loads(gzip.decompress((options.data / "PaulGrahamEssays_49.json.gz").read_bytes()))
    prose = [essays["text"].replace("\n", " ")]
    of = {"policy": subject.policy.digest()}
    settings = settings_of(options, growing=("samples", "tokens")) | of
    most = range(max(samples.values()))
    cases = [(t, n, s) for s in most for t in sorted(samples) for n in NEEDLES if s < samples[t]]
    with open_journal(out.with_suffix(".jsonl"), settings) as done:
        for tokens, needles, sample in tqdm(cases, desc="needles"):
            key = f"{tokens}-{needles}-{sample}"
            if key in done:
                continue
            item = make_needles(tokenizer, prose, tokens, needles, options.seed * 100_000 + sample)
            prompt = read_prompt(model, torch.tensor([item.ids]), queries=True)
            ready = rows_of(grids, item.ids, prompt)
            run = MethodComparison(model, item.ids, prompt, [method for _, _, method in ready])
            kept = run.realised_retentions()
            answers = run.generate(encode_question(tokenizer, item.question), 24, last=True)
            correct = [item.answer in tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
            done.add(key, {"rows": [row[:2] for row in ready], "found": correct, "realised": kept})
        rows = [{"model": subject.name, **row} for row in summarise(done, cases, options.dtype)]
        write_results(out, options.name, rows, options.seed, command_of("benchmarks.needles", options), of)


def summarise(done: Journal, cases: list[tuple[int, int, int]], dtype: str) -> list[dict]:
    """The share of needles found, by method, retention, length and number of needles."""
    by: dict[tuple[str, float, int, int], list[tuple[bool, float]]] = {}
    for tokens, needles, sample in cases:
        row = done[f"{tokens}-{needles}-{sample}"]
        for (name, retention), correct, kept in zip(row["rows"], row["found"], row["realised"], strict=True):
            by.setdefault((name, retention, tokens, needles), []).append((correct, kept))
    rows = []
    for (name, retention, tokens, needles), samples in by.items():
        mean = bootstrap([[float(correct)] for correct, _ in samples])
        rows.append(
            {
                "method": name,
                "tokens": tokens,
                "needles": needles,
                "dtype": dtype,
                "retention": retention,
                "realised": sum(kept for _, kept in samples) / len(samples),
                **mean._asdict(),
                "unit": "share of needles found",
            }
        )
        print(f"{name:16} {tokens:5} {needles} R {retention:4} {mean.value:.2f}")
    return rows


if __name__ == "__main__":
    main()
