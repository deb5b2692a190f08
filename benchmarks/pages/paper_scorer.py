"""docs/paper-scorer.md: what was measured with the paper's own scorer."""

from typing import Any

from benchmarks.pages.parts import ABLE, figure, interval, needle_tables, rows, ruler_tables, table
from lkv.report.names import label, part_label

_HEAD = """# Measured with the paper's scorer

These tables were made with the policy `smollm2-135m-instruct-paper`, whose LKV-T reads k as cached and nothing else, as
the paper has it. It was trained on texts of up to 4,096 tokens and fails beyond them; the policy shipped as the default
since then is measured in [Results](results.md). "LKV" means the paper's scorer throughout this page.

"""
NAMES = {
    "lkv": "**LKV**",
    "lkv-t": "LKV-T, uniform budgets",
    "snapkv": "SnapKV",
    "kvzip": "KVzip (two passes)",
}


def earlier() -> str:
    """The whole of docs/paper-scorer.md."""
    fidelity = {row["method"]: row for row in rows("fidelity", task="all")}
    learned = fidelity["lkv"]
    parts = [
        f"Fidelity on held-out questions and text at R = {learned['retention']}: {learned['n']} continuations of "
        f"{learned['contexts']} contexts of 1k to 2k tokens (`fidelity.json`).",
        table(
            ("", "KL(full \\|\\| compressed)", "top-1 agreement"),
            ([NAMES[m], interval(fidelity[m]), interval(fidelity[m], "agreement")] for m in NAMES),
        ),
    ]
    if grid := {row["method"]: row for row in rows("grid", task="all")}:
        rules, selectors = (tuple(dict.fromkeys(m.split("+")[i] for m in grid if "+" in m)) for i in (0, 1))
        contexts = grid["full"]["contexts"]
        parts += [
            f"Budget rules by selectors: KL(full \\|\\| compressed) over {contexts} of these contexts (`grid.json`).",
            table(
                ("", *map(part_label, selectors)),
                ([part_label(rule), *(interval(grid[f"{rule}+{s}"]) for s in selectors)] for rule in rules),
            ),
        ]
    if ruler := rows("ruler", task=ABLE):
        lead = "RULER, the mean over those of its 13 tasks where the full cache scores at least 50 at every length"
        parts += [*ruler_tables(ruler, lead, "ruler.json`, made by `make reproduce-small"), figure("ruler_ruler")]
    if sweep := rows("ruler_sweep", task=ABLE):
        parts += _sweep(sweep)
    if longbench := rows("longbench", task="all"):
        parts += _longbench(longbench)
    if figure("budget_policies"):
        parts += ["What each method leaves to the 90 heads of the model at the same R:", figure("budget_policies")]
    if variants := rows("variants"):
        parts += [
            f"Streaming and quantised storage, against exact LKV on {variants[0]['contexts']} of these contexts "
            "(`variants.json`; bytes are those of k and v held, slack included).",
            table(
                ("", "KL", "top-1 agreement", "bytes of the full cache's"),
                ([r["variant"], interval(r), interval(r, "agreement"), f"{r['bytes']:.3f}"] for r in variants),
            ),
        ]
    parts += [] if rows("needles", method="lkv-paper") else needle_tables()
    parts += _costs()
    return _HEAD + "\n\n".join(part.replace("](benchmarks/", "](../benchmarks/") for part in parts) + "\n"


def _costs() -> list[str]:
    speed = []
    for row in rows("prefill", method="lkv", tokens=4096):
        size = rows("cache_bytes", method="lkv", tokens=4096)[0]
        speed.append(
            f"At 4,096 tokens the cache holds {size['value']:.3f} of the full cache's bytes, slack included, and "
            f"prefill with eviction takes {interval(row)} of plain prefill (`cache_bytes.json`, `prefill.json`)."
        )
    for row in rows("decode", method="lkv", tokens=4096, dtype="float32", what="attention"):
        threads = row["threads"]
        token = rows("decode", method="lkv", tokens=4096, dtype="float32", what="token", threads=threads)[0]
        many = f"{threads} thread" + "s" * (threads > 1) + " (extra `cpu`)" * (row.get("backend") == "numba")
        speed.append(
            f"Decoding over it on {many}, attention takes {interval(row)} of the time of "
            f"PyTorch's best over the full cache, a whole token {interval(token)} (`decode.json`)."
        )
    for row in rows("comparison_cost"):
        speed.append(
            f"Comparing {row['methods']} on RULER at {row['tokens']:,} tokens takes {interval(row, digits=2)} of the "
            f"time of the full cache alone ({row['n']} samples, `comparison_cost.json`)."
        )
    for row in rows("streaming"):
        speed.append(
            f"Reading {row['tokens']:,} tokens in parts of {row['chunk']:,} never holds more than {row['value']:.3f} "
            "of the full cache's bytes (`streaming.json`)."
        )
    return [" ".join(speed)]


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
