"""Result files as Markdown: rows by their keys, figures with their intervals, tables."""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from experiments.common import RESULTS, method_of, plain_name, row_label
from lkv.hf.loading import DEFAULT
from lkv.methods.registry import find_method
from lkv.policy.policy import Policy
from lkv.policy.shipped import shipped_policies

AT_4096: Mapping[str, Any] = {"method": "lkv", "tokens": 4096}
KVZIP_KEEPS_FIRST = "2026-11-27"  # KVzip measured from then on keeps the first four tokens
KL = "KL(full \\|\\| compressed)"

Row = dict[str, Any]


def read(name: str, /, **wanted: Any) -> list[Row]:
    """The rows of a result file with these values; none where the file is not there."""
    rows = document(name).get("rows", []) if (RESULTS / f"{name}.json").is_file() else []
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def document(name: str) -> dict[str, Any]:
    """A result file: its rows, and the command, machine and versions they are of."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def source(name: str) -> str:
    """A result file's name, with a remark where its policy is not recorded or not shipped, or some rows are of an
    earlier run."""
    of_file = document(name)
    is_unknown = of_file.get("policy") is None
    is_other = not is_unknown and of_file["policy"] not in _shipped_digests()
    has_earlier = "kept" in of_file
    return (
        f"`{name}.json`"
        + ", with a policy that is not recorded" * is_unknown
        + ", with a policy that is not shipped" * is_other
        + ", some methods in an earlier run on the same samples" * has_earlier
    )


def without_policy(*names: str) -> str:
    """A sentence on those of the result files that do not record their policy; empty where there are none."""
    there = [name for name in names if (RESULTS / f"{name}.json").is_file()]
    unknown = [f"`{name}.json`" for name in there if document(name).get("policy") is None]
    return f"The policy is not recorded in {', '.join(unknown)}." if unknown else ""


def files_before(selector: str, date: str) -> list[str]:
    """The result files in which rows of a method with `selector` were measured before a date (ISO)."""
    return [
        path.stem
        for path in sorted(RESULTS.glob("*.json"))
        if any(date_of(method, path.stem) < date for method in _methods_with(selector, path.stem))
    ]


def _methods_with(selector: str, name: str) -> set[str]:
    """The methods with `selector` that a result file has rows of, without their precisions."""
    specs = {method_of(row): find_method(method_of(row)) for row in read(name) if isinstance(row, dict)}
    return {method for method, spec in specs.items() if spec and spec.selector == selector}


def date_of(method: str, name: str) -> str:
    """When the rows of `method` in a result file were measured, by what the file says of it."""
    of_file = document(name)
    kept = of_file.get("kept", {})
    for about in (of_file.get("again", {}).get(method), kept.get("later"), kept):
        if about and method in map(plain_name, about.get("methods", [method])):
            return str(about["date"])
    return str(of_file["date"])


@cache
def _shipped_digests() -> list[str]:
    return [Policy.from_pretrained(entry.folder).digest() for entry in shipped_policies()]


def overlapping_items() -> str:
    """How many items of the training data overlap with evaluated texts and what became of them, by the card."""
    sets = _decontamination()["sets"].values()
    compared, overlapping = (sum(own[key] for own in sets) for key in ("compared", "overlapping"))
    left = sum(_decontamination().get("not_removed", {}).values())  # found only after the training
    return (
        f"{overlapping} of its {compared:,} items overlapped with evaluated texts and were left out"
        + f", but not {left} more with a short text inside an evaluated one" * bool(left)
    )


def _decontamination() -> dict[str, Any]:
    return next(entry for entry in shipped_policies() if entry.name == DEFAULT).card["decontamination"]


def other_models() -> list[str]:
    """The models other than the embedded one that result files are of."""
    return sorted(path.stem.removeprefix("length-") for path in RESULTS.glob("length-*.json"))


def name_of(method: str) -> str:
    return f"**{row_label(method)}**" if method == "lkv" else row_label(method)


def interval(row: Row, key: str = "", digits: int = 3) -> str:
    """value [low, high] of a row, or of the figure `key` in it."""
    value, low, high = (row[part] for part in ((key, f"{key}_low", f"{key}_high") if key else ("value", "low", "high")))
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def score(row: Row) -> str:
    return interval(row, digits=1)


def minus_lkv(row: Row) -> str:
    """The paired difference to LKV, where there is one."""
    return interval(row, "difference", 1) if "difference" in row and row["method"] != "lkv" else ""


def kl_and_agreement(row: Row) -> str:
    return f"{interval(row)} / {row['agreement']:.3f}"


def counted(counts: Iterable[int]) -> str:
    low, high = min(counts := list(counts)), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def table(head: Iterable[str], body: Iterable[Iterable[str]], corner: str = "") -> str:
    """A Markdown table; `corner` is the head of its first column."""
    lines = [[corner, *head]]
    lines += [["---"] * len(lines[0]), *([*line] for line in body)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cross(cells: Mapping[tuple[Any, Any], str], head: Callable[[Any], str], missing: str = "cannot run") -> str:
    """A table of `cells` by (method, column), both in the order of their first cell."""
    methods, columns = (dict.fromkeys(key[i] for key in cells) for i in (0, 1))
    lines = ([name_of(m), *(cells.get((m, column), missing) for column in columns)] for m in methods)
    return table(map(head, columns), lines)


def tokens(length: int) -> str:
    return f"{length:,} tokens"
