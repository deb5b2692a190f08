"""The section of docs/results.md on `lkv fit`, from the files that experiments.fit wrote."""

from experiments.report.names import FULL, method_label
from experiments.tables import (
    KL,
    Row,
    counted,
    document,
    interval,
    kl_and_agreement,
    other_models,
    read,
    source,
    table,
    tokens,
)

# The task of rows that compare two methods on the same samples, and of those of the held-out KL by minutes.
RATIO, CURVE = "ratio", "held-out texts of the fit"
FITTED_ON = {
    "lkv@none": "without own texts",
    "lkv@code": "with code",
    "lkv@meetings": "with meetings",
    "lkv@mixture": "the training mixture",
    "lkv@clean": "the training mixture without what overlaps with evaluated texts",
}


def fits() -> list[str]:
    """Policies of `lkv fit` against KVzip and the shipped policy, by kind of own text, and the KL over the minutes."""
    parts = [part for file in fit_files() for part in _fits(file)]
    where = "evaluation texts of two kinds, {} contexts of each a length"
    own = _fit_table("fit_domains", ("code", "meetings"), where)
    figure = "![fit](experiments/results/small/fit.png)"
    return ["## A policy in minutes", *parts, figure, *own] if parts else []


def fit_files() -> list[str]:
    """The result files of `experiments.fit`: ten minutes, an hour, and other models."""
    return ["fit_ten_minutes", "fit", *(f"fit-{name}" for name in other_models())]


def _fits(file: str) -> list[str]:
    """The table of one model's policies, and the curves."""
    where = "evaluation texts, {} contexts a length, needles among them"
    curves = []
    for (method, minutes), title in _fit_titles(read(file, task="all")).items():
        points = read(file, task=CURVE, method=method, minutes=minutes, retention=0.15)
        if points:
            falls = ", ".join(f"{point['value']:.3f} after {point['seconds'] / 60:.1f}" for point in points)
            curves.append(f"* {title}: {falls}")
    held_out = f"{KL} at R = 0.15 on held-out texts of the fit's own data, by minutes:"
    means = _fit_table(file, ("all",), where)
    return [*means, *_ratio_table(file), held_out, "\n".join(curves)] if means else []


def _ratio_table(file: str) -> list[str]:
    """KL by that of the baselines on the same samples: lines of policy and baseline, columns of length and R."""
    rows = read(file, task=RATIO)
    if not rows:
        return []
    columns = sorted(dict.fromkeys((row["tokens"], row["retention"]) for row in rows), key=_length_first)
    cells = {
        (row["method"], row["minutes"], row["against"], row["tokens"], row["retention"]): interval(row, digits=2)
        for row in rows
    }
    titles = _fit_titles(rows)
    body = [
        [
            f"{title}, by {titles[against, None]}",
            *(cells.get((*key, against, *column), "cannot run") for column in columns),
        ]
        for against in dict.fromkeys(row["against"] for row in rows)
        for key, title in titles.items()
        if any((*key, against, *column) in cells for column in columns)
    ]
    lead = "Their KL by that of KVzip and of the shipped policy on the same samples:"
    return [lead, table([f"{tokens(length)}, R = {retention:g}" for length, retention in columns], body)]


def minutes_of(file: str) -> str:
    """What the minutes of a file are of."""
    words = document(file)["command"].split()
    threads, dtype = (words[words.index(name) + 1] if name in words else None for name in ("--threads", "--dtype"))
    cores = "one thread" if threads in (None, "1") else f"{threads} idle cores"
    return f"{cores}, {dtype or 'bfloat16'}"


def _fit_titles(rows: list[Row]) -> dict[tuple[str, float | None], str]:
    """What each method and number of minutes is called."""
    fitted = dict.fromkeys((row["method"], row["minutes"]) for row in rows if row.get("minutes"))
    titles: dict[tuple[str, float | None], str] = {
        (method, minutes): f"`lkv fit`, {title}, {minutes:g} minute{'s' * (minutes != 1)}"
        for method, title in FITTED_ON.items()
        for minutes in sorted(each for name, each in fitted if name == method)
    }
    return titles | {("lkv@shipped", None): "the shipped policy", ("kvzip", None): method_label("kvzip")}


def _fit_table(file: str, tasks: tuple[str, ...], where: str) -> list[str]:
    """A line a policy, a column a task, length and retention."""
    rows = [row for task in tasks for row in read(file, task=task)]
    if not rows:
        return []
    contexts = where.format(counted(row["contexts"] for row in rows))
    lead = (
        f"{rows[0]['model'].rpartition('/')[2]}, `lkv fit` by the minutes of {minutes_of(file)} "
        f"({document(file)['machine']}): {KL} and top-1 agreement on {contexts} ({source(file)})."
    )
    columns = dict.fromkeys((row["task"], row["tokens"], row["retention"]) for row in rows if row["method"] != FULL)
    order = sorted(columns, key=lambda column: (tasks.index(column[0]), *_length_first(column[1:])))
    cells = {
        (row["method"], row.get("minutes"), row["task"], row["tokens"], row["retention"]): kl_and_agreement(row)
        for row in rows
    }
    head = [f"{task}, {tokens(length)}, R = {retention:g}".removeprefix("all, ") for task, length, retention in order]
    body = [
        [title, *(cells.get((*key, *column), "not measured") for column in order)]
        for key, title in _fit_titles(rows).items()
    ]
    return [lead, table(head, body)]


def _length_first(column: tuple[int, float]) -> tuple[int, float]:
    return column[0], -column[1]
