"""What the pages share: rows of result files, cells, tables, and the tables that more than one page has."""

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

from benchmarks.common import RESULTS
from lkv.evaluation.report.names import method_label
from lkv.policy.policy import Policy
from lkv.policy.shipped import shipped

LONGER = ("longer", "longest")  # results like those by length, of fewer methods or tasks


def rows(name: str, **wanted: Any) -> list[dict[str, Any]]:
    """Rows of a result file with these values."""
    path = RESULTS / f"{name}.json"
    measured = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    return [row for row in measured if all(row.get(key) == value for key, value in wanted.items())]


def source(name: str) -> str:
    """The result file that a table is of, whether that was measured with a policy that is not shipped, and whether rows
    that have no paired difference are of an earlier run."""
    document = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    policy = document.get("policy")
    other = policy is not None and policy not in _digests()
    earlier = "kept" in document and any("difference" in row for row in document["rows"])
    return (
        f"`{name}.json`"
        + (", with a policy that is not shipped" if other else "")
        + (", methods without a policy in an earlier run on the same samples" if earlier else "")
    )


@cache
def _digests() -> list[str]:
    """Digests of the shipped policies."""
    return [Policy.from_pretrained(entry.folder).digest() for entry in shipped()]


def other_models() -> list[str]:
    """The models beside the embedded one that result files are of, as these are named after them."""
    return sorted(path.stem.removeprefix("length-") for path in RESULTS.glob("length-*.json"))


def interval(row: dict[str, Any], key: str = "", digits: int = 3) -> str:
    """value [low, high] of a row, or of the figure `key` in it."""
    value, low, high = (row[part] for part in ((key, f"{key}_low", f"{key}_high") if key else ("value", "low", "high")))
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def less(row: dict[str, Any]) -> str:
    """The paired difference of a row to LKV's, where there is one."""
    return interval(row, "difference", 1) if "difference" in row and row["method"] != "lkv" else ""


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [[*head]]
    lines += [["---"] * len(lines[0]), *([*line] for line in body)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def name_of(method: str) -> str:
    if method == "lkv-paper":
        return "LKV, the paper's scorer"
    return f"**{method_label(method)}**" if method == "lkv" else method_label(method)


def counted(counts: Iterable[int]) -> str:
    low, high = min(counts := list(counts)), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def complete(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without methods that some contexts of a length were too long for: their means are of other contexts."""
    most = {row["tokens"]: row["contexts"] for row in measured if row["method"] == "full"}
    return [row for row in measured if row["contexts"] == most[row["tokens"]]]


def figure(name: str) -> str:
    """A picture of benchmarks/results/small, where it is there."""
    path = RESULTS / "small" / f"{name}.png"
    return f"![{name}]({path.relative_to(RESULTS.parents[1])})" if path.is_file() else ""


def ruler_tables(measured: list[dict[str, Any]], lead: str, name: str) -> list[str]:
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
        return [interval(row, digits=1), less(row), f"{row['realised']:.3f}"]

    return [
        f"{lead} ({samples}; {source(name)}).",
        table(
            ("", *head),
            ([name_of(m)] + [cell for length in lengths for cell in cells(by.get((m, length)))] for m in methods),
        ),
    ]


def needle_tables(name: str = "needles") -> list[str]:
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
        f"{what} in real prose, share found of {counted(row['n'] for row in measured)} ({source(name)}).",
        table(
            ("", "R", *(f"{tokens:,} tokens" for tokens in lengths)),
            (
                [
                    name_of(method),
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
