"""Fidelity by length, retention and task: KL(full || compressed) and top-1 agreement of every method of one table.

python -m experiments.length --data FOLDER    (FOLDER is the evaluation folder; writes length.json)
python -m experiments.length --data FOLDER --model NAME --tokens 4000 16000 --name longer    (longer-NAME.json)

References are the gold answers, the text that follows, and the model's own answer from its full cache. --contexts are
those of a task, one number for each length or one for all.
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.common import SUBJECT, method_grids, parse_options, row_label, subject_of
from experiments.fidelity import measure, run_by_length, summarise
from experiments.heldout import cut_targets
from experiments.report.figures import draw_kl, finish_figure, method_styles, new_figure, save_figure, scale_by_factors
from lkv.methods.registry import FULL

TASKS = ("code", "LongBench text", "multi-hop QA", "meetings", "stories")
METHODS = ["lkv", "kvzip", "lkv-h+kvzip", "lkv-h+expected", "snapkv", "adakv-snapkv", "keydiff"]
ANSWER = 40  # tokens of the model's own answer at most


def main() -> None:
    options = parse_options(
        __doc__, "length", "of evaluation files", **SUBJECT, methods=METHODS, tokens=[1000, 2000, 4000, 7800],
        retention=[0.3, 0.15, 0.1, 0.05], contexts=[3], tasks=TASKS, seed=0, name="length", out=Path,
    )  # fmt: skip
    subject = subject_of(options, options.name)
    grids = method_grids(subject, options.methods, options.retention, has_paper=not options.policy)
    rows = run_by_length(
        "experiments.length", options, options.name, subject,
        lambda ids, continuations: measure(subject.model, grids, ids, cut_targets(continuations), ANSWER), summarise,
    )  # fmt: skip
    draw(rows, options.out.parent / "small" / f"{options.out.stem}.png")


def draw(rows: Sequence[dict], path: Path) -> None:
    """KL over length at the second highest retention, and over retention at the greatest length."""
    # A method that some contexts of a length were too long for has the mean of other contexts.
    every = [row for row in rows if row["task"] == "all"]
    contexts = {row["tokens"]: row["contexts"] for row in every if row["method"] == FULL}
    means = [row for row in every if row["method"] != FULL and row["contexts"] == contexts[row["tokens"]]]
    retentions = sorted({row["retention"] for row in means}, reverse=True)
    middle, longest = retentions[min(1, len(retentions) - 1)], max(row["tokens"] for row in means)
    figure, (left, right) = new_figure(9.5, 4.6, 1, 2, sharey=True)
    for method, style in method_styles(list(dict.fromkeys(row["method"] for row in means))).items():
        for axes, x, fixed, at in ((left, "tokens", "retention", middle), (right, "retention", "tokens", longest)):
            if line := [row for row in means if row["method"] == method and row[fixed] == at]:
                draw_kl(axes, line, x, row_label(method), style)
    for axes, x, name in (
        (left, "tokens", f"context length (tokens), at R = {middle:g}"),
        (right, "retention", f"retention R, at {longest:,} tokens"),
    ):
        axes.set_xlabel(name)
        scale_by_factors(axes, sorted({row[x] for row in means}), ",g")
    left.set_ylabel("KL(full || compressed), nats a token")
    model, most = rows[0]["model"].rpartition("/")[2], max(row["n"] for row in means)
    caption = f"{model}; n = {most} continuations a point at most; 95% intervals"
    finish_figure(figure, [left, right], "Fidelity by length and by retention", caption)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
