"""Fidelity on held-out questions and text: KL(full || compressed) and top-1 agreement over reference continuations.

python -m benchmarks.fidelity --data FOLDER    (FOLDER is the evaluation folder; nothing in it is trained on)
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.common import RESULTS, command_of, methods_of, resumable, settings_of
from lkv.data import sources
from lkv.data.packing import (
    CHARS_PER_TOKEN,
    CODE_CHARS_PER_TOKEN,
    pack,
    some_questions,
    split_to_continue,
    window_start,
)
from lkv.data.sample import Continuation, Sample, tokenize
from lkv.embedded import default_policy, load_default
from lkv.evals.compare import Comparison
from lkv.evals.metrics import bootstrap
from lkv.evals.needles import make_needles
from lkv.kvzip import kvzip
from lkv.policy import Policy
from lkv.prefill import read_prompt
from lkv.prompts import encode, question_ids
from lkv.results import write_results

NAMES = ("full", "lkv", "lkv-t", "snapkv")
ALL = (*NAMES, "kvzip")
CONTINUATIONS = 4
LONGEST = 160

Asked = tuple[str, list[Continuation]]


def builders(folder: Path) -> dict[str, Callable[[random.Random, int], Asked]]:
    """One function a task: (random source, tokens) to a context and its continuations."""
    paragraphs = list(sources.squad_format(folder / "xquad.en.json.gz"))
    puzzles = list(sources.hotpot_like(folder / "hotpot_dev_400.jsonl.gz"))
    tales = list(sources.tales(folder / "fairytaleqa_val.jsonl.gz"))
    meetings = sources.meetings(folder, "qmsum_val.jsonl.gz")
    code = [
        sources.Passage("", row["context"] + row["input"])
        for name in ("lcc", "repobench-p")
        for row in sources.rows(folder / "longbench_sample" / f"{name}.jsonl.gz")
    ]

    def prose_qa(rng: random.Random, tokens: int) -> Asked:
        packed = pack(rng, paragraphs, tokens * CHARS_PER_TOKEN, lambda p: len(p.text))
        return "\n\n".join(p.text for p in packed), some_questions(rng, packed, CONTINUATIONS)

    def multihop_qa(rng: random.Random, tokens: int) -> Asked:
        one, other = rng.sample(puzzles, 2)
        needed = [p.passages[i] for p in (one, other) for i in sorted(p.needed)]
        rest = [p.passages[i] for p in (one, other) for i in range(len(p.passages)) if i not in p.needed]
        room = tokens * CHARS_PER_TOKEN - sum(len(p.text) for p in needed)
        chosen = [*needed, *pack(rng, rest, room, lambda p: len(p.text))]
        rng.shuffle(chosen)
        text = "\n\n".join(f"{p.title}\n{p.text}" for p in chosen)
        return text, [Continuation(p.question, p.answer) for p in (one, other)]

    def stories(rng: random.Random, tokens: int) -> Asked:
        tale = rng.choice(tales)
        explicit = [qa for qa in tale.questions if qa[1] in tale.text] or list(tale.questions)
        size = int(tokens * CHARS_PER_TOKEN)
        first = rng.choice(explicit)
        start = window_start(rng, tale.text, size, tale.text.find(first[1]))
        text = tale.text[start : start + size]
        near = [qa for qa in explicit if qa[1] in text and qa != first]
        asked = [first, *rng.sample(near, min(len(near), CONTINUATIONS - 1))]
        return text, [Continuation(question, answer) for question, answer in asked]

    def meeting(rng: random.Random, tokens: int) -> Asked:
        chosen = rng.choice([m for m in meetings if m.queries])
        size = int(tokens * CHARS_PER_TOKEN)
        query, answer, first, _ = rng.choice(chosen.queries)
        context = "\n".join(chosen.turns[max(0, first - 3) :])
        text, following = context[:size], context[size : size + 300]
        return text, [Continuation(query, answer), *([Continuation(None, following)] if following else [])]

    def code_lines(rng: random.Random, tokens: int) -> Asked:
        size = int(tokens * CODE_CHARS_PER_TOKEN)
        text, (following, _) = split_to_continue(rng, [rng.choice(code).text], size)
        return text, [following]

    return {
        "prose QA": prose_qa,
        "multi-hop QA": multihop_qa,
        "stories": stories,
        "meetings": meeting,
        "code": code_lines,
    }


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
    build = builders(options.data)
    prose = [p.text for p in sources.tales(options.data / "fairytaleqa_val.jsonl.gz")]
    tasks = [*build, "needles"]
    with resumable(options.out.with_suffix(".jsonl"), settings_of(options)) as done:
        count = {task: options.contexts * (2 if task == "code" else 1) for task in tasks}
        cases = sorted((number, task) for task in tasks for number in range(count[task]))
        for number, task in tqdm(cases, desc="fidelity"):
            if f"{task}-{number}" in done:
                continue
            rng = random.Random(f"{options.seed}-{task}-{number}")
            tokens = rng.randint(1000, 2000)
            if task == "needles":
                item = make_needles(tokenizer, prose, tokens, 4, options.seed * 100_000 + number)
                ids, asked = item.ids, []
                for question, answer in item.facts:
                    prefix = question_ids(tokenizer, question)
                    target = encode(tokenizer, f"The special magic number is {answer}.")
                    asked.append((prefix + target, len(prefix)))
            else:
                context, continuations = build[task](rng, tokens)
                tokenized = tokenize(Sample(task, context, tuple(continuations)), tokenizer, 2000, LONGEST)
                ids, asked = tokenized.context, tokenized.continuations
            prompt = read_prompt(model, torch.tensor([ids]), queries=True)
            methods = methods_of(NAMES, policy, options.retention)
            methods.append(kvzip(model, tokenizer, ids, prompt, options.retention))
            run = Comparison(model, ids, prompt, methods)
            measured = [[[f.kl, f.agreement] for f in run.fidelity(ids_, skip)] for ids_, skip in asked]
            done.add(f"{task}-{number}", {"tokens": len(ids), "measured": measured, "realised": run.realised()})
        write_results(
            options.out,
            "fidelity",
            summarise(dict(done), count, options.retention),
            options.seed,
            command_of("benchmarks.fidelity", options),
        )


def summarise(done: dict, count: dict[str, int], retention: float) -> list[dict]:
    """Rows per task and over all tasks: KL and agreement, with intervals from resampling the contexts."""
    rows = []
    for task in ["all", *count]:
        chosen = [done[f"{t}-{n}"] for t in count if task in ("all", t) for n in range(count[t])]
        for i, name in enumerate(ALL):
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
