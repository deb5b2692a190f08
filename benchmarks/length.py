"""Fidelity by length, retention and task: KL(full || compressed) and top-1 agreement of every method of one table.

python -m benchmarks.length --data FOLDER    (FOLDER is the evaluation folder; writes length.json)
python -m benchmarks.length --data FOLDER --model NAME --tokens 4000 16000 --name longer    (longer-NAME.json)

References are the gold answers, the text that follows, and the model's own answer from its full cache.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.common import add_subject, command_of, method_grids, per_length, rows_of, settings_of, subject_of
from benchmarks.heldout import HeldOut
from lkv.config import asdict
from lkv.evaluation.comparison import MethodComparison, MethodGrid
from lkv.evaluation.report.figures import finish_figure, method_styles, new_figure, save_figure
from lkv.evaluation.report.names import method_label
from lkv.integrations.transformers.prefill import read_prompt
from lkv.methods.registry import FULL
from lkv.utils.journal import Journal, open_journal
from lkv.utils.results import write_results
from lkv.utils.statistics import Mean, bootstrap

TASKS = ("code", "LongBench text", "multi-hop QA", "meetings", "stories")
METHODS = ("lkv", "kvzip", "lkv-h+kvzip", "lkv-h+expected", "snapkv", "adakv-snapkv", "keydiff")
ANSWER, REFERENCE = 40, 80  # tokens of the model's own answer, and of any reference at most
_UNIT = "nats a token, KL(full || compressed)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    add_subject(parser)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 2000, 4000, 7800])
    parser.add_argument("--retention", type=float, nargs="+", default=[0.3, 0.15, 0.1, 0.05])
    parser.add_argument("--contexts", type=int, nargs="+", default=[3], help="contexts a task, for each length or all")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="length", help="of the result")
    parser.add_argument("--out", type=Path, default=None, help="(default: benchmarks/results/NAME[-MODEL].json)")
    options = parser.parse_args()
    contexts = per_length(options.tokens, options.contexts)
    subject = subject_of(options)
    model = subject.model
    out = options.out or subject.results(options.name)
    grids = method_grids(model, subject.tokenizer, options.methods, options.retention, subject.policy)
    heldout = HeldOut(options.data, subject.tokenizer, options.seed)
    of = {"policy": subject.policy.digest()}
    settings = settings_of(options, growing=("contexts", "tokens", "tasks")) | of
    with open_journal(out.with_suffix(".jsonl"), settings) as done:
        most = range(max(contexts.values()))
        cases = [(n, t, task) for n in most for t in sorted(contexts) for task in options.tasks if n < contexts[t]]
        for number, tokens, task in tqdm(cases, desc="length"):
            key = f"{task}-{tokens}-{number}"
            if key not in done:
                ids, asked = heldout.case(task, number, tokens)
                done.add(key, measure(model, grids, ids, asked))
        rows = [{"model": subject.name, **row} for row in summarise(done, cases)]
        write_results(out, options.name, rows, options.seed, command_of("benchmarks.length", options), of)
    draw(rows, out.parent / "small" / f"{out.stem}.png")


@torch.no_grad()
def measure(model: Any, grids: dict[str, MethodGrid], ids: list[int], asked: Sequence[tuple[list[int], int]]) -> dict:
    """KL and agreement of each method and retention over each continuation, and what each kept."""
    prompt = read_prompt(model, torch.tensor([ids]), queries=True)
    rows = rows_of(grids, ids, prompt)
    full = MethodComparison(model, ids, prompt, [rows[0][2]])
    references = [(answer[: skip + REFERENCE], skip) for answer, skip in asked]
    for answer, skip in asked[:1]:
        if skip:
            answered = full.generate(answer[:skip], ANSWER)[0]
            references.append((answer[:skip] + answered, skip))
    run = MethodComparison(model, ids, prompt, [method for _, _, method in rows])
    fidelity = [[asdict(f) for f in run.measure_fidelity(reference, skip)] for reference, skip in references]
    return {
        "tokens": len(ids),
        "rows": [[name, retention] for name, retention, _ in rows],
        "kept": run.realised_retentions(),
        "measured": [[[f["kl"], f["agreement"]] for f in row] for row in fidelity],
    }


def summarise(done: Journal, cases: Sequence[tuple[int, int, str]]) -> list[dict]:
    """Rows by method, retention, length and task ("all" for all of them)."""
    rows = []
    wanted: dict[tuple[str, float, int, str], list[tuple[dict, int]]] = {}
    for number, tokens, task in cases:
        sample = done[f"{task}-{tokens}-{number}"]
        for index, (name, retention) in enumerate(sample["rows"]):
            for group in ("all", task):
                wanted.setdefault((name, retention, tokens, group), []).append((sample, index))
    for (name, retention, tokens, group), sampled in wanted.items():
        kl, agreement = (_mean(sampled, measure) for measure in (0, 1))
        rows.append(
            {
                "method": name,
                "task": group,
                "tokens": tokens,
                "retention": retention,
                "realised": sum(sample["kept"][i] for sample, i in sampled) / len(sampled),
                "contexts": len(sampled),
                **kl._asdict(),
                "unit": _UNIT,
                "kl": kl.value,
                "agreement": agreement.value,
                "agreement_low": agreement.low,
                "agreement_high": agreement.high,
            }
        )
        if group == "all":
            print(f"{name:16} {tokens:6} R {retention:4} n {kl.n:3} kl {kl.value:.3f} agreement {agreement.value:.3f}")
    return rows


def draw(rows: Sequence[dict], path: Path) -> None:
    """KL over length at the second highest retention, and over retention at the greatest length."""
    # A method that some contexts of a length were too long for has the mean of other contexts.
    most = {row["tokens"]: row["contexts"] for row in rows if row["task"] == "all" and row["method"] == FULL}
    means = [row for row in rows if row["task"] == "all" and row["method"] != FULL]
    means = [row for row in means if row["contexts"] == most[row["tokens"]]]
    retentions = sorted({row["retention"] for row in means}, reverse=True)
    middle, longest = retentions[min(1, len(retentions) - 1)], max(row["tokens"] for row in means)
    figure = new_figure(9.5, 4.6)
    left, right = figure.subplots(1, 2, sharey=True)
    chosen = method_styles(list(dict.fromkeys(row["method"] for row in means)))
    for method, style in chosen.items():
        for axes, x, fixed, at in ((left, "tokens", "retention", middle), (right, "retention", "tokens", longest)):
            line = sorted((r for r in means if r["method"] == method and r[fixed] == at), key=lambda r: r[x])
            if line:
                low, high = ([abs(r[end] - r["kl"]) for r in line] for end in ("low", "high"))
                axes.errorbar(
                    [r[x] for r in line], [r["kl"] for r in line], yerr=(low, high), label=_label(method),
                    color=style.colour, marker=style.marker, linewidth=style.width, linestyle=style.line, capsize=2,
                    zorder=style.order,
                )  # fmt: skip
    for axes, x, name in (
        (left, "tokens", f"context length (tokens), at R = {middle:g}"),
        (right, "retention", f"retention R, at {longest:,} tokens"),
    ):
        axes.set_xlabel(name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        measured = sorted({row[x] for row in means})
        axes.set_xticks(measured, [f"{value:,g}" for value in measured])
        axes.minorticks_off()
    left.set_ylabel("KL(full || compressed), nats a token")
    model = rows[0]["model"].rpartition("/")[2]
    continuations = max(row["n"] for row in means)
    caption = f"{model}; n = {continuations} continuations a point at most; 95% intervals"
    finish_figure(figure, [left, right], "Fidelity by length and by retention", caption)
    save_figure(figure, path)


def _label(method: str) -> str:
    return "LKV, the paper's scorer" if method == "lkv-paper" else method_label(method)


def _mean(sampled: Sequence[tuple[dict, int]], measure: int) -> Mean:
    return bootstrap(
        [[continuation[index][measure] for continuation in sample["measured"]] for sample, index in sampled]
    )


if __name__ == "__main__":
    main()
