"""Write the tables of `PAGES` from the result files, and check the other figures of the pages.

python -m experiments.readme            (rewrites the tables)
python -m experiments.readme --check    (fails where a table or a figure differs from the result files)

A page marks a table with `<!-- table: NAME FILE key=value ... -->` before it and `<!-- end of the table -->` after it:
NAME is a function of this module, FILE a file of experiments/results/ without `.json`, and the keys select its rows.
All other text and the small tables are written by hand. Their intervals, `0.034 [0.023, 0.045]`, must be in the result
files that the text names, and the figures of `prose_figures` must be on their page.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from experiments.common import RESULTS, row_label
from experiments.evaluations import ABLE
from experiments.memory import best_precisions
from experiments.paired import compare_all
from experiments.report.names import FULL, part_label
from experiments.samples import read_kept_samples
from lkv.methods.targets import KVShape
from lkv.policy.policy import Policy
from lkv.policy.shipped import shipped_policies

ROOT = RESULTS.parents[1]
PAGES = tuple(ROOT / name for name in ("README.md", "docs/results.md", "docs/guides/chat.md", "docs/guides/memory.md"))
CHECKED_PAGES = (PAGES[0], *sorted((ROOT / "docs").rglob("*.md")))
QWEN = "qwen2.5-coder-0.5b-instruct"
FITTED_ON = {
    "lkv@none": "without own texts",
    "lkv@code": "with code",
    "lkv@meetings": "with meetings",
    "lkv@mixture": "the training mixture",
    "lkv@clean": "the training mixture without what overlaps with evaluated texts",
}
_TABLE = re.compile(r"(<!-- table: (\w+) (\S+)((?: \w+=\S+)*) -->\n)(.*?)(<!-- end of the table -->)", re.DOTALL)
_INTERVAL = re.compile(r"(-?\d+\.\d+)%? \[(-?\d+\.\d+), (-?\d+\.\d+)\]")

_SPLIT = " || "  # between the parts of a line's name that stand in columns of their own

Row = dict[str, Any]
Cells = dict[tuple[str, str], str]  # by line and column


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page differs")
    is_check = parser.parse_args(arguments).check
    problems = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        page = with_tables(text)
        if page != text and is_check:
            problems.append(f"{path.name}: tables differ from the result files; run python -m experiments.readme")
        elif page != text:
            path.write_text(page, encoding="utf-8")
    problems += [problem for path in CHECKED_PAGES for problem in wrong_intervals(path)]
    problems += [problem for path in PAGES for problem in missing_sources(path)]
    for name, figures in prose_figures().items():
        page = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        problems += [f"{name}: {figure!r} is what the result files say" for figure in figures if figure not in page]
    if problems:
        sys.exit("\n".join(problems))


def with_tables(text: str) -> str:
    """Return a page with each marked table written anew."""

    def rewrite(match: re.Match[str]) -> str:
        start, name, file, conditions, _, end = match.groups()
        return f"{start}\n{TABLES[name](file, **_parse_conditions(conditions))}\n\n{end}"

    return _TABLE.sub(rewrite, text)


def _parse_conditions(text: str) -> Row:
    """Return the values of `key=value` pairs: numbers where they can be read as such, otherwise strings."""
    conditions: Row = {}
    for key, value in (pair.split("=", 1) for pair in text.split()):
        try:
            conditions[key] = json.loads(value)
        except json.JSONDecodeError:
            conditions[key] = value
    return conditions


def wrong_intervals(path: Path) -> Iterator[str]:
    """Yield the intervals outside the marked tables that are not in the result files that the text names."""
    text = _TABLE.sub(r"\1", path.read_text(encoding="utf-8"))
    last: list[str] = []  # a table is of the files that were named last
    for line in text.splitlines():
        files = [name for name in re.findall(r"`([\w.-]+)\.json`", line) if name in result_names()]
        last = files or last
        names = files or (last if line.startswith("|") else result_names())
        for match in _INTERVAL.finditer(line):
            digits = len(match[1].partition(".")[2])
            if not any(match.groups() in rounded_intervals(name, digits) for name in names):
                yield f"{path.name}: {match[0]} is not in {', '.join(names)}"


@cache
def result_names() -> list[str]:
    return [path.relative_to(RESULTS).with_suffix("").as_posix() for path in sorted(RESULTS.rglob("*.json"))]


@cache
def rounded_intervals(name: str, digits: int) -> frozenset[tuple[str, ...]]:
    """Return (value, low, high) of every figure of a result file, rounded."""
    found = set()
    for row in read(name):
        for key in row:
            low, high = ("low", "high") if key == "value" else (f"{key}_low", f"{key}_high")
            if isinstance(row.get(low), float | int) and high in row:
                found.add(tuple(f"{row[part]:.{digits}f}" for part in (key, low, high)))
    return frozenset(found)


def missing_sources(path: Path) -> Iterator[str]:
    """Yield what a page with a table of a result file does not say of the file's policy and earlier runs."""
    text = path.read_text(encoding="utf-8")
    for file in dict.fromkeys(match[3] for match in _TABLE.finditer(text)):
        if file != "-" and source(file) not in text:
            yield f"{path.name}: no sentence names {source(file)}"


def source(name: str) -> str:
    """Return a result file's name with what a reader must know: another policy, or rows of an earlier run."""
    about = document(name)
    policy = about.get("policy")
    is_other = policy is not None and policy not in _shipped_digests()
    return (
        f"`{name}.json`"
        + ", with a policy that is not recorded" * (policy is None)
        + ", with a policy that is not shipped" * is_other
        + ", some methods in an earlier run on the same samples" * ("kept" in about)
    )


@cache
def _shipped_digests() -> list[str]:
    return [Policy.from_pretrained(entry.folder).digest() for entry in shipped_policies()]


@cache
def document(name: str) -> Row:
    """Return a result file: its rows, with the command, machine and versions."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def read(name: str, /, **wanted: Any) -> list[Row]:
    """Return the rows of a result file that have these values.

    Rows with compensation of files before 2026-11-30 are left out: they are of an earlier form, which is gone.
    """
    file = document(name)
    is_current = file.get("date", "") >= "2026-11-30"
    rows = [row for row in file["rows"] if is_current or "+compensation" not in row.get("method", "")]
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


# Cells and tables.


def name_of(label: str) -> str:
    """Return a method's name in a table, with its precision where it has one; LKV's is bold."""
    method, _, precision = label.partition(" (")
    name = f"**{row_label(method)}**" if method == "lkv" else row_label(method)
    return name + (f", {precision[:-1]}" if precision else "")


def tokens_of(length: int) -> str:
    return f"{length:,} tokens"


def interval(row: Row, key: str = "value", digits: int = 3) -> str:
    low, high = ("low", "high") if key == "value" else (f"{key}_low", f"{key}_high")
    return f"{row[key]:.{digits}f} [{row[low]:.{digits}f}, {row[high]:.{digits}f}]"


def score(row: Row) -> str:
    return interval(row, digits=1)


def minus_lkv(row: Row) -> str:
    """Return the paired difference to LKV, where there is one."""
    return interval(row, "difference", 1) if "difference" in row and row["method"] != "lkv" else ""


def kl_and_agreement(row: Row) -> str:
    return f"{interval(row)} / {row['agreement']:.3f}"


def table(
    cells: Mapping[tuple[str, str], str], corner: str = "", missing: str = "", columns: Iterable[str] = ()
) -> str:
    """Return a Markdown table.

    Args:
        cells: By line and column, both in the order in which they first occur.
        corner: The head of the first column.
        missing: The text of a cell that is not there.
        columns: Their order, where it is another one.
    """
    heads = list(columns) or list(dict.fromkeys(column for _, column in cells))
    first = [*corner.split(_SPLIT), *heads]
    lines = [first, ["---"] * len(first)]
    for line in dict.fromkeys(line for line, _ in cells):
        lines.append([*line.split(_SPLIT), *(cells.get((line, head), missing) for head in heads)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main_table(_: str) -> str:
    """Return the README's table: KL of both models at 5% of the bytes, in each method's best precisions."""
    cells: Cells = {}
    for file, model in ("memory", "SmolLM2-135M"), (f"memory-{QWEN}", "Qwen2.5-Coder-0.5B"):
        rows = {row["method"]: row for row in best_precisions(read(file, memory=0.05, tokens=1000))}
        for method, readings in ("lkv", "once"), ("kvzip", "twice"), ("snapkv", "once"):
            line = name_of(method).removesuffix(" (two passes)")
            cells[line, model], cells[line, "reads the text"] = f"{rows[method]['value']:.2f}", readings
        line = "Quantisation alone"
        cells[line, model], cells[line, "reads the text"] = "cannot shrink this far", "once"
    return table(cells, "at 5% of the bytes", columns=("SmolLM2-135M", "Qwen2.5-Coder-0.5B", "reads the text"))


def by_memory(file: str, **wanted: Any) -> str:
    """Return KL and agreement at one length, a column for each budget in bytes."""
    rows = read(file, **wanted)
    cells = {(name_of(row["method"]), f"{row['memory']:.0%}"): kl_and_agreement(row) for row in rows}
    budgets = sorted({row["memory"] for row in rows}, reverse=True)
    return table(cells, columns=[f"{budget:.0%}" for budget in budgets])


def paired(file: str, pairs: str) -> str:
    """Return the KL of METHOD minus that of BASELINE in the same contexts, and what follows, a column for each budget.

    Args:
        file: The result, which has samples.
        pairs: METHOD:BASELINE, separated by commas.
    """
    samples, cells = read_kept_samples(RESULTS / f"{file}.json"), {}
    for budget, method, baseline, test, p in compare_all(samples.values(), pairs.split(",")):
        difference = f"{test.difference:+.3f} [{test.low:+.3f}, {test.high:+.3f}]"
        line = f"{name_of(method)} minus {name_of(baseline)}"
        cells[line, f"{budget:.0%}"] = f"{difference}, p {p:.3f}: {test.verdict(p)}"
    return table(cells)


def by_length(file: str, retention: float) -> str:
    """Return KL and agreement, a column for each length, without methods that cannot read all its contexts."""
    rows = sorted(read(file, task="all"), key=lambda row: row["tokens"])
    contexts = {row["tokens"]: row["contexts"] for row in rows if row["method"] == FULL}
    rows = [row for row in rows if row["retention"] == retention and row["contexts"] == contexts[row["tokens"]]]
    cells = {(name_of(row["method"]), tokens_of(row["tokens"])): kl_and_agreement(row) for row in rows}
    return table(cells, missing="cannot run")


def needles(file: str, count: int) -> str:
    """Return the share of needles found, a line for each method and budget."""
    rows = read(file, needles=count)
    budget, head, form = ("memory", "bytes", ".0%") if "memory" in rows[0] else ("retention", "R", "g")
    cells = {
        (f"{name_of(row['method'])}{_SPLIT}{row[budget]:{form}}", tokens_of(row["tokens"])): interval(row, digits=2)
        for row in rows
    }
    return table(cells, _SPLIT + head, "cannot run", map(tokens_of, sorted({row["tokens"] for row in rows})))


def ruler(file: str, task: str, retention: float) -> str:
    """Return RULER's mean score, the paired difference to LKV and the share kept, by length; the best method first."""
    rows = [row for row in read(file, task=ABLE if task == "able" else task) if row["retention"] in (1.0, retention)]
    best: dict[str, float] = {}
    for row in rows:
        best[row["method"]] = max(row["value"], best.get(row["method"], 0.0))
    cells: Cells = {}
    for row in sorted(rows, key=lambda row: -best[row["method"]]):
        figures = {"tokens": score(row), "minus LKV": minus_lkv(row), "kept": f"{row['realised']:.3f}"}
        cells |= {(name_of(row["method"]), f"{row['tokens']:,} {head}"): text for head, text in figures.items()}
    return table(cells)


def fidelity(file: str) -> str:
    """Return KL and agreement of each method."""
    cells: Cells = {}
    for row in read(file, task="all"):
        if row["method"] != FULL:
            cells[name_of(row["method"]), "KL(full \\|\\| compressed)"] = interval(row)
            cells[name_of(row["method"]), "top-1 agreement"] = interval(row, "agreement")
    return table(cells)


def grid(file: str) -> str:
    """Return the KL of budget rules by selectors."""
    parts = {row["method"]: row["method"].split("+") for row in read(file, task="all") if "+" in row["method"]}
    rows = {row["method"]: row for row in read(file, task="all")}
    rules, selectors = (tuple(dict.fromkeys(part[i] for part in parts.values())) for i in (0, 1))
    return table({(part_label(a), part_label(b)): interval(rows[f"{a}+{b}"]) for a in rules for b in selectors})


def fits(file: str, tasks: str = "all") -> str:
    """Return KL and agreement of policies of `lkv fit`, a column for each task, length and retention."""
    rows = [row for task in tasks.split(",") for row in read(file, task=task)]
    order = sorted(
        (row for row in rows if row["method"] != FULL),
        key=lambda row: (tasks.split(",").index(row["task"]), row["tokens"], -row["retention"]),
    )
    found = {(row["method"], row.get("minutes"), _conditions_of(row)): kl_and_agreement(row) for row in rows}
    titles, columns = _fit_titles(rows), dict.fromkeys(map(_conditions_of, order))
    return table({(title, c): found.get((*key, c), "not measured") for key, title in titles.items() for c in columns})


def _conditions_of(row: Row) -> str:
    return f"{row['task']}, {tokens_of(row['tokens'])}, R = {row['retention']:g}".removeprefix("all, ")


def _fit_titles(rows: Sequence[Row]) -> dict[tuple[str, float | None], str]:
    """Return what each policy of `lkv fit`, by method and minutes, and each baseline is called."""
    fitted = {(row["method"], row["minutes"]) for row in rows if row.get("minutes")}
    titles: dict[tuple[str, float | None], str] = {
        (method, minutes): f"`lkv fit`, {title}, {minutes:g} minute{'s' * (minutes != 1)}"
        for method, title in FITTED_ON.items()
        for minutes in sorted(each for name, each in fitted if name == method)
    }
    return titles | {("lkv@shipped", None): "the shipped policy", ("kvzip", None): row_label("kvzip")}


def ruler_tasks(file: str) -> str:
    """Return RULER's mean over all tasks, and over those that the full cache can do; the best method first."""
    able = {row["method"]: row for row in read(file, task=ABLE)}
    cells: Cells = {}
    for row in sorted(read(file, task="all"), key=lambda row: -row["value"]):
        is_full = row["method"] == FULL
        figures = {
            "13 tasks": score(row),
            "minus LKV": minus_lkv(row),
            "where full reaches 50": score(able[row["method"]]),
            "KL": "" if is_full else f"{row['kl']:.3f}",
            "top-1 agreement": "" if is_full else f"{row['agreement']:.3f}",
            "kept": "1" if is_full else f"{row['realised']:.3f}",
        }
        cells |= {(name_of(row["method"]), head): text for head, text in figures.items()}
    return table(cells)


TABLES: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        main_table, by_memory, paired, by_length, needles, ruler, fidelity, grid, fits, ruler_tasks,
    )
}  # fmt: skip


def prose_figures() -> dict[str, list[str]]:
    """Return what the text of each page must say, beside its intervals."""
    at_4096 = {"tokens": 4096, "dtype": "float32", "what": "token", "threads": 1}
    (tiers,), (prefill,) = read("decode", method="lkv, tiers", **at_4096), read("prefill", method="lkv", tokens=4096)
    full = KVShape(32 * 8, 128, 2).reference_nbytes(2**17) / 1e9  # Llama-3.1-8B: 32 layers of 8 heads
    readme = [f"takes {full:.1f} GB for 128k tokens, or {full / 10:.1f} GB at the default of a tenth"]
    readme += [f"takes {prefill['value'] - 1:.0%} longer", f"step {tiers['value']:.2f} of the full cache's time"]
    names = ("questions-qwen2.5-coder-1.5b-instruct", "questions-qwen2.5-coder-0.5b-instruct", "questions")
    questions = [f"(`{name}.json`) | {' | '.join(str(row['right']) for row in read(name))} |" for name in names]
    return {"README.md": readme, "docs/quickstart.md": questions}


if __name__ == "__main__":
    main()
