"""The README's section of results, docs/results.md and docs/paper-scorer.md, written from the result files alone.

python -m benchmarks.readme [--check]
"""

import json
import sys
from collections.abc import Iterable
from typing import Any

from benchmarks.common import RESULTS
from lkv.report.names import label, part_label

README = RESULTS.parents[1] / "README.md"
EARLIER = README.parent / "docs" / "paper-scorer.md"
RESULTS_PAGE = README.parent / "docs" / "results.md"
TITLE = "## What it keeps of the model\n\n"
_HEAD = """# Measured with the paper's scorer

These tables were made with the policy `smollm2-135m-instruct-paper`, whose LKV-T reads k as cached and nothing else, as
the paper has it. It was trained on texts of up to 4,096 tokens and fails beyond them; the policy shipped as the default
since then is measured in [Results](results.md). "LKV" means the paper's scorer throughout this page.

"""
_ABLE = "full >= 50"
_SERVING = "`python -m benchmarks.serving`"
NAMES = {
    "lkv": "**LKV**",
    "lkv-t": "LKV-T, uniform budgets",
    "snapkv": "SnapKV",
    "kvzip": "KVzip (two passes)",
}


def rows(name: str, **wanted: Any) -> list[dict[str, Any]]:
    """Rows of a result file with these values."""
    path = RESULTS / f"{name}.json"
    measured = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    return [row for row in measured if all(row.get(key) == value for key, value in wanted.items())]


def interval(row: dict[str, Any], key: str = "", digits: int = 3) -> str:
    """value [low, high] of a row, or of the figure `key` in it."""
    value, low, high = (row[part] for part in ((key, f"{key}_low", f"{key}_high") if key else ("value", "low", "high")))
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [[*head]]
    lines += [["---"] * len(lines[0]), *([*line] for line in body)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def section() -> str:
    """The README's section: three small tables, each with its command."""
    return "\n\n".join(
        [
            "SmolLM2-135M-Instruct, the question unknown at compression, R = 0.15; 95% intervals. All figures come "
            "from `benchmarks/results/`, whose files name command, machine and seed. More lengths, methods and R: "
            "[results](docs/results.md).",
            *_short_length(),
            *_short_ruler(),
            *_short_costs(),
        ]
    )


def _short_length() -> list[str]:
    """KL by length of LKV and those closest to it, at R = 0.15."""
    complete = _complete(rows("length", task="all"))
    by = {(row["method"], row["tokens"]): row for row in complete if row["retention"] == 0.15}
    if not by:
        return []
    lengths = sorted({tokens for _, tokens in by})
    return [
        "**Fidelity by length**: KL(full \\|\\| compressed) in nats a token (`python -m benchmarks.length`).",
        table(
            ("", *(f"{tokens:,} tokens" for tokens in lengths)),
            (
                [_name(m), *(interval(by[m, t]) if (m, t) in by else "cannot run" for t in lengths)]
                for m in ("lkv", "kvzip", "lkv-h+expected", "snapkv")
            ),
        ),
    ]


def _short_ruler() -> list[str]:
    """RULER's retrieval tasks at both lengths."""
    retrieval = rows("ruler_retrieval", task="all")
    if not retrieval:
        return []
    by = {(row["method"], row["tokens"]): row for row in retrieval}
    lengths = sorted({tokens for _, tokens in by})
    note = "" if _is_new("ruler_retrieval") else ", measured with the paper's scorer"
    return [
        f"**RULER**, five retrieval tasks, score of 100, {by['full', lengths[0]]['n']} samples a length{note} "
        "(`lkv eval ruler`).",
        table(
            ("", *(f"{tokens:,} tokens" for tokens in lengths)),
            (
                [_name(m), *(interval(by[m, t], digits=1) for t in lengths)]
                for m in ("full", "lkv", "kvzip", "snapkv")
                if (m, lengths[0]) in by
            ),
        ),
    ]


def _is_new(name: str) -> bool:
    """Whether a file holds the policy that is the default now: those before it were measured until 21 November 2026."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["date"] > "2026-11-21"


def _short_costs() -> list[str]:
    """Bytes and times of LKV at 4,096 tokens, by those of the full cache."""
    wanted: dict[str, Any] = {"method": "lkv", "tokens": 4096}
    lines = [
        ["bytes of k and v held, slack included", f"{row['value']:.3f}", "`python -m benchmarks.prefill`"]
        for row in rows("cache_bytes", **wanted)
    ]
    lines += [
        ["prefill with eviction", interval(row), "`python -m benchmarks.prefill`"] for row in rows("prefill", **wanted)
    ]
    for part, name in (("attention", "decoding, attention alone"), ("token", "decoding, a whole token")):
        lines += [
            [f"{name}, 1 thread", interval(row), "`python -m benchmarks.decode`"]
            for row in rows("decode", dtype="float32", what=part, threads=1, **wanted)
        ]
    if not lines:
        return []
    return [
        "**Memory and speed** on a CPU at 4,096 tokens, by the full cache's.",
        table(("", "of the full cache's", "command"), lines),
    ]


def results_page() -> str:
    """The whole of docs/results.md."""
    lead = (
        "SmolLM2-135M-Instruct with the shipped policy, the question unknown at compression; intervals are 95%. Each "
        "figure comes from a file under `benchmarks/results/`, which names its command, machine and seed. [Measured "
        "with the paper's scorer](paper-scorer.md) has RULER, LongBench, the ablation and more."
    )
    parts = ["# Results", lead, *_length(), *(_needles() if rows("needles", method="lkv-paper") else [])]
    parts += [part for name in _other_models() for part in _other_model(name)]
    parts += _serving()
    return "\n\n".join(part.replace("](benchmarks/", "](../benchmarks/") for part in parts) + "\n"


def _serving() -> list[str]:
    """Requests at once over a few contexts, by concurrency, and what the contexts take."""
    measured = rows("serving")
    by = {(row["what"], row["method"]): row for row in measured if "concurrency" not in row}
    if not by:
        return []
    rate, size, load, tight = (by[measure, "lkv"] for measure in ("throughput", "memory", "loading", "same memory"))
    seen = {
        (row["method"], row["concurrency"], row.get("statistic", "rate")): row["value"]
        for row in measured
        if "concurrency" in row
    }
    methods, concurrency = ("lkv", "full"), sorted({clients for _, clients, _ in seen})
    return [
        "## Serving",
        f"Questions about 4 texts of {rate['tokens']:,} tokens at R = {rate['retention']:g}, answers of at most 32 "
        f"tokens, on two cores ({_SERVING}, `serving.json`): 16 requests at once give "
        f"{interval(rate, digits=2)} times the tokens a second of one after another "
        f"({rate['equal']} of {rate['answers']} answers equal). The contexts "
        f"hold {size['value']:.3f} of the full caches' bytes, loading one is {load['value']:.0f} times as fast as "
        f"compressing it, and where memory holds little more than one full cache there are {interval(tight, digits=2)} "
        "times the requests a second of full caches.",
        table(
            ("at once", *(f"{_name(m)}, {unit}" for m in methods for unit in ("tokens/s", "p50, s", "p95, s"))),
            (
                [str(n), *(f"{seen[m, n, key]:.1f}" for m in methods for key in ("rate", "p50", "p95"))]
                for n in concurrency
            ),
        ),
    ]


def _other_models() -> list[str]:
    """The models beside the embedded one that result files are of, as these are named after them."""
    return sorted(path.stem.removeprefix("length-") for path in RESULTS.glob("length-*.json"))


def _other_model(name: str) -> list[str]:
    """A part of its own for another model: fidelity by length, RULER, needles, whatever there is."""
    title = rows(f"length-{name}")[0]["model"].rpartition("/")[2]
    able = rows(f"ruler-{name}", task=_ABLE)
    lead = f"RULER: mean score over the tasks in which {title}'s full cache reaches 50"
    return [
        f"### {title}",
        *_length(f"length-{name}"),
        *(_ruler(able, lead, f"ruler-{name}.json") if able else []),
        *_needles(f"needles-{name}"),
    ]


def _length(name: str = "length") -> list[str]:
    measured = _complete(rows(name, task="all"))
    if not measured:
        return []
    parts = []
    lengths = sorted({row["tokens"] for row in measured})
    for retention in sorted({row["retention"] for row in measured if row["method"] != "full"}, reverse=True):
        if retention not in (0.15, 0.05):
            continue
        by = {(row["method"], row["tokens"]): row for row in measured if row["retention"] == retention}
        contexts = [row["contexts"] for row in by.values()]
        parts += [
            f"KL(full \\|\\| compressed) and top-1 agreement by length at R = {retention:g}: code, LongBench texts, "
            f"multi-hop facts, meetings, stories; {_range(contexts)} contexts a length (`{name}.json`).",
            table(
                ("", *(f"{tokens:,} tokens" for tokens in lengths)),
                (
                    [
                        _name(method),
                        *(
                            f"{interval(by[method, tokens])} / {by[method, tokens]['agreement']:.3f}"
                            if (method, tokens) in by
                            else "cannot run"
                            for tokens in lengths
                        ),
                    ]
                    for method in dict.fromkeys(method for method, _ in by)
                ),
            ),
        ]
    return [*parts, f"![{name}](benchmarks/results/small/{name}.png)"]


def _range(counts: Iterable[int]) -> str:
    low, high = min(counts := list(counts)), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _complete(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without methods that some contexts of a length were too long for: their means are of other contexts."""
    most = {row["tokens"]: row["contexts"] for row in measured if row["method"] == "full"}
    return [row for row in measured if row["contexts"] == most[row["tokens"]]]


def _needles(name: str = "needles") -> list[str]:
    return [*_hidden(name, 1, "A needle"), *_hidden(name, 4, "One of four needles")]


def _hidden(name: str, needles: int, what: str) -> list[str]:
    """The share found of what was hidden so many at a time, by method, R and length."""
    measured = rows(name, needles=needles)
    if not measured:
        return []
    lengths = sorted({row["tokens"] for row in measured})
    kinds = dict.fromkeys((row["method"], row["retention"]) for row in measured)
    by = {(row["method"], row["retention"], row["tokens"]): row for row in measured}
    return [
        f"{what} in real prose, share found of {_range(row['n'] for row in measured)} (`{name}.json`).",
        table(
            ("", "R", *(f"{tokens:,} tokens" for tokens in lengths)),
            (
                [
                    _name(method),
                    f"{retention:g}",
                    *(
                        interval(by[method, retention, tokens], digits=2)
                        if (method, retention, tokens) in by
                        else "cannot run"
                        for tokens in lengths
                    ),
                ]
                for method, retention in kinds
            ),
        ),
    ]


def _name(method: str) -> str:
    if method == "lkv-paper":
        return "LKV, the paper's scorer"
    return f"**{label(method)}**" if method == "lkv" else label(method)


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
    if ruler := rows("ruler", task=_ABLE):
        lead = "RULER, the mean over those of its 13 tasks where the full cache scores at least 50 at every length"
        parts += [*_ruler(ruler, lead, "ruler.json`, made by `make reproduce-small"), _figure("ruler_ruler")]
    if retrieval := rows("ruler_retrieval", task="all"):
        lead = "The best of them on ten samples each of the five tasks of the retention sweep below"
        parts += _ruler(retrieval, lead, "ruler_retrieval.json")
    if sweep := rows("ruler_sweep", task=_ABLE):
        parts += _sweep(sweep)
    if longbench := rows("longbench", task="all"):
        parts += _longbench(longbench)
    if _figure("budget_policies"):
        parts += ["What each method leaves to the 90 heads of the model at the same R:", _figure("budget_policies")]
    if variants := rows("variants"):
        parts += [
            f"Streaming and quantised storage, against exact LKV on {variants[0]['contexts']} of these contexts "
            "(`variants.json`; bytes are those of k and v held, slack included).",
            table(
                ("", "KL", "top-1 agreement", "bytes of the full cache's"),
                ([r["variant"], interval(r), interval(r, "agreement"), f"{r['bytes']:.3f}"] for r in variants),
            ),
        ]
    parts += [] if rows("needles", method="lkv-paper") else _needles()
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
        many = f"{threads} thread" + "s" * (threads > 1)
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


def _figure(name: str) -> str:
    """A picture of benchmarks/results/small, where it is there."""
    path = RESULTS / "small" / f"{name}.png"
    return f"![{name}]({path.relative_to(README.parent)})" if path.is_file() else ""


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
        _figure("swept_sweep"),
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


def _ruler(measured: list[dict[str, Any]], lead: str, source: str) -> list[str]:
    """RULER's mean over the tasks that the full cache can do, and the paired difference to LKV."""
    lengths = list(dict.fromkeys(row["tokens"] for row in measured))
    by = {(row["method"], row["tokens"]): row for row in measured}
    methods = sorted(
        dict.fromkeys(row["method"] for row in measured),
        key=lambda m: -max(by[m, t]["value"] for t in lengths if (m, t) in by),
    )
    head = [f"{length:,} {column}" for length in lengths for column in ("tokens", "minus LKV", "kept")]
    samples = ", ".join(f"{by['full', length]['n']} samples at {length:,}" for length in lengths)

    def cells(row: dict[str, Any] | None) -> list[str]:
        if row is None:
            return ["", "", ""]
        less = interval(row, "difference", 1) if row["method"] != "lkv" else ""
        return [interval(row, digits=1), less, f"{row['realised']:.3f}"]

    return [
        f"{lead} ({samples}; `{source}`).",
        table(
            ("", *head),
            (
                [f"**{label(m)}**" if m == "lkv" else label(m)]
                + [cell for length in lengths for cell in cells(by.get((m, length)))]
                for m in methods
            ),
        ),
    ]


def main() -> None:
    text = README.read_text(encoding="utf-8")
    start = text.index(TITLE) + len(TITLE)
    end = text.index("\n## ", start)
    pages = {
        README: text[:start] + section() + "\n" + text[end:],
        EARLIER: earlier(),
        RESULTS_PAGE: results_page(),
    }
    if "--check" in sys.argv:
        if stale := [path.name for path, page in pages.items() if path.read_text(encoding="utf-8") != page]:
            sys.exit(f"{', '.join(stale)} tell other figures than the files: run python -m benchmarks.readme")
        return
    for path, page in pages.items():
        path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
