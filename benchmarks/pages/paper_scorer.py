"""docs/paper-scorer.md: what was measured with the paper's own scorer."""

from typing import Any

from benchmarks.pages.parts import ABLE, figure, interval, rows, ruler_tables, table
from lkv.report.names import label

_HEAD = """# Measured with the paper's scorer

These tables were made with the policy `smollm2-135m-instruct-paper`, whose LKV-T reads k as cached and nothing else, as
the paper has it. It was trained on texts of up to 4,096 tokens and fails beyond them; the policy shipped as the default
since then is measured in [Results](results.md). "LKV" means the paper's scorer throughout this page.

"""


def earlier() -> str:
    """The whole of docs/paper-scorer.md."""
    parts = []
    if ruler := rows("ruler", task=ABLE):
        lead = "RULER, the mean over those of its 13 tasks where the full cache scores at least 50 at every length"
        parts += [*ruler_tables(ruler, lead, "ruler.json`, made by `make reproduce-small"), figure("ruler_ruler")]
    if sweep := rows("ruler_sweep", task=ABLE):
        parts += _sweep(sweep)
    if longbench := rows("longbench", task="all"):
        parts += _longbench(longbench)
    if figure("budget_policies"):
        parts += ["What each method leaves to the 90 heads of the model at the same R:", figure("budget_policies")]
    return _HEAD + "\n\n".join(part.replace("](benchmarks/", "](../benchmarks/") for part in parts) + "\n"


def _sweep(measured: list[dict[str, Any]]) -> list[str]:
    """RULER's mean over the tasks that the full cache can do, by retention."""
    by = {(row["method"], row["retention"]): row for row in measured}
    full = by["full", 1.0]
    retentions = sorted({r for m, r in by if m != "full"}, reverse=True)
    methods = [m for m in dict.fromkeys(m for m, _ in by) if m != "full"]
    return [
        f"The same by retention, at {full['tokens']:,} tokens ({full['n']} samples; the full cache scores "
        f"{interval(full, digits=1)}; `ruler_sweep.json`).",
        table(
            ("", *(f"R = {r:g}" for r in retentions)),
            (
                [f"**{label(m)}**" if m == "lkv" else label(m), *(interval(by[m, r], digits=1) for r in retentions)]
                for m in reversed(methods)
            ),
        ),
        figure("swept_sweep"),
    ]


def _longbench(measured: list[dict[str, Any]]) -> list[str]:
    """A sample of LongBench: mean over its tasks."""

    def cells(row: dict[str, Any]) -> list[str]:
        if row["method"] == "full":
            return [interval(row, digits=1), interval(row, "difference", 1), "", ""]
        less = interval(row, "difference", 1) if row["method"] != "lkv" else ""
        return [interval(row, digits=1), less, f"{row['kl']:.3f}", f"{row['agreement']:.3f}"]

    ordered = sorted(measured, key=lambda row: -row["value"])
    return [
        f"A sample of LongBench: the mean over its 16 tasks, {measured[0]['n']} samples in all, cut to the model's 8k "
        "tokens (`longbench.json`). KL and agreement are those of the right answer.",
        table(
            ("", "score", "minus LKV", "KL", "top-1 agreement"),
            ([f"**{label(r['method'])}**" if r["method"] == "lkv" else label(r["method"]), *cells(r)] for r in ordered),
        ),
    ]
