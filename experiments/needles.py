"""Needles in real prose by length and retention, question unknown at compression.

python -m experiments.needles --data FOLDER    (FOLDER holds PaulGrahamEssays_49.json.gz; writes needles.json)
python -m experiments.needles --data FOLDER --model NAME --tokens 2000 16000 --samples 10 4    (needles-NAME.json)

--samples are those of a number of needles, one number for each length or one for all. With --by-memory, --retention are
shares of the bytes of a 16-bit cache, spent on tiers of precision (--name needles_memory).
"""

import gzip
import json
from pathlib import Path

import torch

from experiments.bootstrap import bootstrap
from experiments.common import SUBJECT, method_grids, parse_options, per_length, rows_of, run_cases, subject_of
from experiments.heldout import cases_by_length, make_needles
from lkv.evaluation.comparison import MethodComparison
from lkv.hf.prompt_kv import read_prompt
from lkv.utils.prompts import encode_question

METHODS = ["lkv", "kvzip", "lkv-h+expected", "snapkv"]
NEEDLES = ("1", "4")  # hidden in a text; the question is about one of them


def main() -> None:
    options = parse_options(
        __doc__, "needles", "with PaulGrahamEssays_49.json.gz", **SUBJECT, methods=METHODS,
        tokens=[1000, 2000, 4000, 7800], samples=[10], retention=[0.15, 0.05], by_memory=False, seed=0, out=Path,
        name="needles",
    )  # fmt: skip
    counts = per_length(options.tokens, options.samples)
    subject = subject_of(options, options.name)
    model, tokenizer = subject.model, subject.tokenizer
    grids = method_grids(
        subject, options.methods, options.retention, has_paper=not (options.policy or options.by_memory),
        tier_tables={"": None} if options.by_memory else None,
    )  # fmt: skip
    essays = json.loads(gzip.decompress((options.data / "PaulGrahamEssays_49.json.gz").read_bytes()))
    prose = [essays["text"].replace("\n", " ")]
    cases = cases_by_length(NEEDLES, counts)

    def measure(needles: str, number: int, tokens: int) -> dict:
        item = make_needles(tokenizer, prose, tokens, int(needles), options.seed * 100_000 + number)
        prompt = read_prompt(model, torch.tensor([item.ids]), queries=True)
        rows = rows_of(grids, item.ids, prompt)
        question, hits, kept = encode_question(tokenizer, item.question), [], []
        for methods in [[row[2]] for row in rows] if options.by_memory else [[row[2] for row in rows]]:
            comparison = MethodComparison(model, item.ids, prompt, methods)
            kept += comparison.realised_retentions()
            answers = comparison.generate(question, 24, last=True)
            hits += [item.answer in tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
        return {"rows": [row[:2] for row in rows], "hits": hits, "realised": kept}

    def summarise(samples: dict[str, dict]) -> list[dict]:
        groups: dict[tuple[str, float, int, int], list[tuple[bool, float]]] = {}
        for key, sample in samples.items():
            hidden, _, tokens = cases[key]
            for row, hit, kept in zip(sample["rows"], sample["hits"], sample["realised"], strict=True):
                groups.setdefault((*row, tokens, int(hidden)), []).append((hit, kept))
        rows = []
        for (method, retention, tokens, needles), members in groups.items():
            mean = bootstrap([[float(hit)] for hit, _ in members])
            row = {"model": subject.name, "method": method, "tokens": tokens, "needles": needles}
            row |= {"dtype": options.dtype, "memory" if options.by_memory else "retention": retention}
            row |= {"realised": sum(kept for _, kept in members) / len(members)}
            rows.append({**row, **mean._asdict(), "unit": "share of needles found"})
            print(f"{method:16} {tokens:5} {needles} R {retention:4} {mean.value:.2f}")
        return rows

    growing = ("samples", "tokens")
    run_cases("experiments.needles", options, options.name, cases, measure, summarise, subject.policy, growing)


if __name__ == "__main__":
    main()
