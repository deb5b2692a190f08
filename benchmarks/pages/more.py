"""docs/more-results.md: RULER with every kind of method and over R, LongBench."""

from typing import Any

from benchmarks.evaluations import ABLE
from benchmarks.pages.parts import figure, interval, less, name_of, rows, source, table
from lkv.methods.registry import FULL

_HEAD = """# More results

SmolLM2-135M-Instruct with the shipped policy, the question unknown at compression; intervals are 95%. Many methods and
retentions on few samples; [Results](results.md) has more samples of fewer.

"""


def more_results() -> str:
    """The whole of docs/more-results.md."""
    parts = []
    if ruler := rows("ruler", task="all"):
        parts += _ruler(ruler)
    if sweep := rows("ruler_sweep", task="all"):
        parts += _sweep(sweep)
    if longbench := rows("longbench", task="all"):
        parts += _longbench(longbench)
    if figure("budget_policies"):
        parts += ["What each method leaves to the 90 heads of the model at the same R:", figure("budget_policies")]
    return _HEAD + "\n\n".join(part.replace("](benchmarks/", "](../benchmarks/") for part in parts) + "\n"


def _ruler(measured: list[dict[str, Any]]) -> list[str]:
    """RULER's mean over all tasks, and over those that the full cache can do."""
    able = {row["method"]: row for row in rows("ruler", task=ABLE)}
    full = able[FULL]

    def cells(row: dict[str, Any]) -> list[str]:
        scores = [interval(row, digits=1), less(row), interval(able[row["method"]], digits=1)]
        if row["method"] == FULL:
            return [*scores, "", "", "1"]
        return [*scores, f"{row['kl']:.3f}", f"{row['agreement']:.3f}", f"{row['realised']:.3f}"]

    return [
        f"RULER at {full['tokens']:,} tokens, R = 0.15: the mean over its 13 tasks ({measured[0]['n']} samples), and "
        f"over those where the full cache scores at least 50 ({full['n']} samples; {source('ruler')}, as `make "
        "reproduce-small` makes it). KL and agreement are those of the right answer, over all tasks.",
        table(
            ("", "13 tasks", "minus LKV", "where full reaches 50", "KL", "top-1 agreement", "kept"),
            ([name_of(r["method"]), *cells(r)] for r in sorted(measured, key=lambda row: -row["value"])),
        ),
        figure("ruler_tasks"),
    ]


def _sweep(measured: list[dict[str, Any]]) -> list[str]:
    """RULER's retrieval tasks by retention."""
    by = {(row["method"], row["retention"]): row for row in measured}
    full = by["full", 1.0]
    retentions = sorted({r for m, r in by if m != "full"}, reverse=True)
    methods = [m for m in dict.fromkeys(m for m, _ in by) if m != "full"]
    return [
        f"RULER's five retrieval tasks by retention, at {full['tokens']:,} tokens ({full['n']} samples; the full cache "
        f"scores {interval(full, digits=1)}; {source('ruler_sweep')}).",
        table(
            ("", *(f"R = {r:g}" for r in retentions)),
            ([name_of(m), *(interval(by[m, r], digits=1) for r in retentions)] for m in reversed(methods)),
        ),
        figure("swept_sweep"),
    ]


def _longbench(measured: list[dict[str, Any]]) -> list[str]:
    """A sample of LongBench: mean over its tasks."""

    def cells(row: dict[str, Any]) -> list[str]:
        if row["method"] == "full":
            return [interval(row, digits=1), less(row), "", ""]
        return [interval(row, digits=1), less(row), f"{row['kl']:.3f}", f"{row['agreement']:.3f}"]

    ordered = sorted(measured, key=lambda row: -row["value"])
    return [
        f"A sample of LongBench: the mean over its 16 tasks, {measured[0]['n']} samples in all, cut to the model's 8k "
        f"tokens ({source('longbench')}). KL and agreement are those of the right answer.",
        table(
            ("", "score", "minus LKV", "KL", "top-1 agreement"),
            ([name_of(r["method"]), *cells(r)] for r in ordered),
        ),
    ]
