"""Results to tables: the paper's Tables 1 and 2, the breakdown by task, sweeps, RULER's curves, fidelity."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lkv.errors import ReportError
from lkv.evaluation.report.names import (
    AVERAGE,
    CATEGORIES,
    FULL,
    RULES,
    SELECTORS,
    SUITES,
    budget_and_selector,
    method_label,
    part_label,
)
from lkv.evaluation.report.results import Results
from lkv.evaluation.report.scores import Pair, Scores, Unit, at_one_retention, method_pairs, retentions_of
from lkv.evaluation.report.tables import MIN_SAMPLES, Cell, Column, Table, TableRow, make_cells
from lkv.methods.registry import find_method

_SHARE = "of full, %"
_GAIN = "gain over uniform"
_ABLATION_COLUMNS = {"longbench": ("Multi-Doc QA", "Synthetic")}  # those of Table 2; other suites show all of theirs
_FIDELITY = {  # metric: title, which side is better
    "kl": ("KL(full || compressed), nats", -1),
    "agreement": ("top-1 agreement", 1),
    "hidden_error": ("relative hidden-state error", -1),
}


@dataclass(frozen=True)
class TableRequest:
    """What of the results a table shows; empty means all, or the default."""

    methods: tuple[str, ...] = ()
    retentions: tuple[float, ...] = ()
    min_full: float = 0.0
    against: str = ""


def build_table(name: str, results: Results, request: TableRequest) -> Table:
    """The table `name`, one of `names.TABLES`.

    Raises:
        ReportError: Where the results do not hold it.
    """
    pairs = method_pairs(results, request.methods, request.retentions)
    table, scores = _BUILDERS[name](results, pairs, request)
    header, sizes = results.header, sorted(set(scores.sizes))
    notes = [
        f"{header['model']}, protocol {header['protocol']}, lkv {header['lkv']}.",
        f"Intervals are 95%, by bootstrap over the {' to '.join(map(str, dict.fromkeys([sizes[0], sizes[-1]])))} "
        "samples of each task, widened where they are few; one without any width says that all samples of a task "
        f"scored alike, and less than {MIN_SAMPLES} have none.",
        *([f"Differences are to {method_label(scores.against)}, on the same samples."] if scores.against else []),
        *_note_coverage(scores),
        *_note_variants(scores, header),
    ]
    amounts = retentions_of(scores.pairs)
    shown = f"R = {', '.join(f'{r:g}' for r in amounts)}; " if amounts else ""
    return replace(
        table,
        title=f"{SUITES.get(scores.suite, scores.suite)}, {table.title}",
        notes=(*notes, *scores.notes, *table.notes, *results.notes),
        reference=scores.against,
        caption=f"{header['model']}; {shown}n = {sum(scores.sizes)} samples",
    )


def _build_main(results: Results, pairs: Sequence[Pair], request: TableRequest) -> tuple[Table, Scores]:
    scores = Scores(results, at_one_retention(pairs), min_full=request.min_full, against=request.against)
    categories, notes = scores.categories(), ()
    if list(categories.values()) == [scores.units]:  # its column would repeat the average
        categories, notes = {}, (f"All tasks are of the category {next(iter(categories))}.",)
    columns = {AVERAGE: scores.units, **categories}
    rows = [_make_row(scores, pair, columns) for pair in scores.pairs]
    return _make_table("main", "by category", _make_columns(columns, scores), rows, notes=notes), scores


def _build_tasks(results: Results, pairs: Sequence[Pair], request: TableRequest) -> tuple[Table, Scores]:
    scores = Scores(results, at_one_retention(pairs), min_full=request.min_full, against=request.against)
    columns = _make_columns([AVERAGE, *dict.fromkeys(task for task, _ in scores.units)], scores)
    rows = []
    for length in dict.fromkeys(length for _, length in scores.units):
        units = [unit for unit in scores.units if unit[1] == length]
        by_task = {AVERAGE: units, **{unit[0]: [unit] for unit in units}}
        group = "" if length is None else _format_length(length)
        rows += [_make_row(scores, pair, by_task, group) for pair in scores.pairs]
    return _make_table("tasks", "by task", columns, rows, group_title="length"), scores


def _build_sweep(results: Results, pairs: Sequence[Pair], request: TableRequest) -> tuple[Table, Scores]:
    scores = Scores(results, pairs, min_full=request.min_full, against=request.against)
    columns = {r: Column(f"R = {r:g}", x=r) for r in retentions_of(pairs)}
    rows = []
    for method in dict.fromkeys(method for method, _ in pairs):
        by_retention = {r: (method, 1.0 if method == FULL else r) for r in columns}
        cells = {columns[r].name: scores.value(p, scores.units) for r, p in by_retention.items() if p in pairs}
        rows.append(TableRow(method, method_label(method), cells, retention=1.0 if method == FULL else None))
    table = _make_table(
        "sweep",
        f"{AVERAGE} over retention",
        list(columns.values()),
        rows,
        notes=("After @: the realised retention (kept / all entries).",),
        axis="retention (kept / all entries)",
        shows_realised=True,
    )
    return table, scores


def _build_ruler(results: Results, pairs: Sequence[Pair], request: TableRequest) -> tuple[Table, Scores]:
    scores = Scores(results, pairs, min_full=request.min_full, against=request.against)
    lengths = sorted({length for _, length in scores.units if length is not None})
    if not lengths:
        raise ReportError("these results have no lengths; the table 'ruler' is made from what `lkv eval ruler` wrote.")
    by_length = {_format_length(length): [u for u in scores.units if u[1] == length] for length in lengths}
    units = {AVERAGE: scores.units} | by_length
    rows = [
        _make_row(scores, pair, units, f"R = {retention:g}")
        for retention in retentions_of(pairs)
        for pair in pairs
        if pair[0] == FULL or pair[1] == retention
    ]
    places = dict(zip(by_length, map(float, lengths), strict=True))
    columns = [replace(column, x=places.get(column.name)) for column in _make_columns(units, scores)]
    more = {"group_title": "retention", "axis": "context length (tokens)"}
    return _make_table("ruler", "over length and retention", columns, rows, **more), scores


def _build_fidelity(results: Results, pairs: Sequence[Pair], request: TableRequest) -> tuple[Table, Scores]:
    pairs = [pair for pair in at_one_retention(pairs) if pair[0] != FULL]
    own = results.frame[[pair in pairs for pair in zip(results.frame.method, results.frame.retention, strict=True)]]
    metrics = [metric for metric in _FIDELITY if own[metric].notna().any()]
    if not metrics:
        raise ReportError("these results hold no fidelity for these methods; run `lkv eval` so that it measures it.")
    scores = Scores(results, pairs, metrics, request.min_full, request.against)
    units: dict[str, list[Unit]] = {AVERAGE: scores.units}
    for unit in scores.units:
        units.setdefault(unit[0], []).append(unit)
    rows = [_make_row(scores, pair, units, _FIDELITY[metric][0], metric) for metric in metrics for pair in pairs]
    columns = [replace(column, digits=3) for column in _make_columns(units, scores)]
    notes = tuple(f"Not measured: {title}." for metric, (title, _) in _FIDELITY.items() if metric not in metrics)
    more = {"notes": notes, "group_title": "measure", "value": "", "best_in": dict(_FIDELITY.values())}
    return _make_table("fidelity", "fidelity to the full cache", columns, rows, **more), scores


def _build_ablation(results: Results, pairs: Sequence[Pair], request: TableRequest) -> tuple[Table, Scores]:
    """Three budget rules by three selectors, from the methods that belong to the grid, under any of their names.

    With what the rules gain, and marginal means that average the methods sample by sample.
    """
    pairs = at_one_retention(pairs)
    grid: dict[tuple[str, str], Pair] = {}
    for pair in pairs:
        combination = budget_and_selector(pair[0])
        if combination and combination[0] in RULES and combination[1] in SELECTORS:
            grid.setdefault(combination, pair)
    if len(grid) < 2:
        raise ReportError(
            f"the ablation needs methods of the grid {{{', '.join(RULES)}}} x {{{', '.join(SELECTORS)}}}; the files "
            f"hold {', '.join(dict.fromkeys(method for method, _ in pairs))}. Run `lkv eval` with --methods "
            f"{' '.join(f'{rule}+{selector}' for selector in SELECTORS for rule in RULES)}."
        )
    full = [pair for pair in pairs if pair[0] == FULL]
    scores = Scores(results, [*full, *grid.values()], min_full=request.min_full)
    shown = _ABLATION_COLUMNS.get(scores.suite)
    units = {AVERAGE: scores.units}
    units |= {name: own for name, own in scores.categories().items() if not shown or name in shown}

    def row(averaged: Sequence[Pair], name: str, group: str, method: str, bases: Sequence[Pair] = ()) -> TableRow:
        """The mean of the methods `averaged`, and its gain over that of `bases`."""
        weights = [1 / len(averaged)] * len(averaged)
        cells = {
            column: scores.value(averaged[0], own) if len(averaged) == 1 else scores.combine(averaged, own, weights)
            for column, own in units.items()
        }
        if bases:
            negative = [-1 / len(bases)] * len(bases)
            cells[_GAIN] = scores.combine([*averaged, *bases], scores.units, weights + negative)
        return TableRow(method, name, cells, group, averaged[0][1], scores.realised(averaged, scores.units))

    rows = [row([pair], method_label(FULL), "", FULL) for pair in full]
    for selector in SELECTORS:
        for rule in RULES:
            if pair := grid.get((rule, selector)):
                uniform = grid.get((RULES[0], selector))
                bases = [uniform] if uniform and rule != RULES[0] else []
                group = f"selection: {part_label(selector)}"
                rows.append(row([pair], part_label(rule), group, f"{rule}+{selector}", bases))
    by_rule = {rule: [grid[rule, s] for s in SELECTORS if (rule, s) in grid] for rule in RULES}
    for rule, ran in by_rule.items():
        if len(ran) == len(SELECTORS):
            bases = by_rule[RULES[0]] if rule != RULES[0] and len(by_rule[RULES[0]]) == len(SELECTORS) else []
            rows.append(row(ran, part_label(rule), "mean over selectors", rule, bases))
    for selector in SELECTORS:
        ran = [grid[rule, selector] for rule in RULES if (rule, selector) in grid]
        if len(ran) == len(RULES):
            rows.append(row(ran, part_label(selector), "mean over budget rules", selector))
    missing = [f"{rule}+{selector}" for rule in RULES for selector in SELECTORS if (rule, selector) not in grid]
    notes = (f"Not measured: {', '.join(missing)}.",) if missing else ()
    columns = [Column(AVERAGE), Column(_GAIN, best=0, signed=True), *map(Column, list(units)[1:])]
    return _make_table("ablation", "budget rule by selector", columns, rows, notes=notes), scores


_BUILDERS: dict[str, Callable[[Results, Sequence[Pair], TableRequest], tuple[Table, Scores]]] = {
    "main": _build_main,
    "ablation": _build_ablation,
    "tasks": _build_tasks,
    "sweep": _build_sweep,
    "ruler": _build_ruler,
    "fidelity": _build_fidelity,
}


def _make_table(name: str, title: str, columns: Sequence[Column], rows: Iterable[TableRow], **more: Any) -> Table:
    cells = make_cells(rows, columns, more.get("shows_realised", False))
    return Table(name, title, tuple(columns), cells, **more)


def _make_row(
    scores: Scores, pair: Pair, units: Mapping[str, Sequence[Unit]], group: str = "", metric: str = "score"
) -> TableRow:
    """The row of a method: its value over the units of each column, and how its average compares."""
    cells = {name: scores.value(pair, own, metric) for name, own in units.items()}
    average = cells[AVERAGE]
    if average and average.difference is not None:
        cells[_difference_name(scores)] = Cell(
            average.difference, average.difference_low, average.difference_high, average.n
        )
    if metric == "score" and (FULL, 1.0) in scores.pairs and pair[0] != FULL:
        cells[_SHARE] = scores.share_of_full(pair, units[AVERAGE])
    return TableRow(pair[0], method_label(pair[0]), cells, group, pair[1], scores.realised([pair], scores.units))


def _make_columns(names: Iterable[str], scores: Scores) -> list[Column]:
    """The average, its difference to the reference, its share of the full cache's, and the rest."""
    first, *rest = map(Column, names)
    extra = [Column(_difference_name(scores), best=0, signed=True)] if scores.against else []
    extra += [Column(_SHARE, best=0, digits=1)] if (FULL, 1.0) in scores.pairs else []
    return [first, *extra, *rest]


def _difference_name(scores: Scores) -> str:
    return f"{AVERAGE} - {method_label(scores.against)}"


def _format_length(length: int) -> str:
    return f"{length:,} tokens"


def _note_variants(scores: Scores, header: Mapping[str, Any]) -> list[str]:
    """Which variant of a method the table shows where there are several, and where DuoAttention's pattern is from."""
    methods = [method for method, _ in scores.pairs if method != FULL]
    specs = [spec for method in methods if (spec := find_method(method))]
    notes = [f"{variant}." for variant in dict.fromkeys(variant for spec in specs for variant in spec.variants)]
    if any(spec.needs_pattern for spec in specs):
        source = header.get("pattern_from") or "of unknown origin: the results do not state it"
        notes.append(f"DuoAttention's retrieval heads are {source}.")
    return notes


def _note_coverage(scores: Scores) -> list[str]:
    """What the average is over, where it is not the whole suite."""
    tasks = {task for names in CATEGORIES.get(scores.suite, {}).values() for task in names}
    measured = {task for task, _ in scores.units}
    lengths = [f"{length:,}" for length in dict.fromkeys(length for _, length in scores.units) if length is not None]
    notes = [f"{AVERAGE} is over {len(measured)} of the {len(tasks)} tasks."] if tasks - measured else []
    return notes + ([f"All lengths count alike: {' and '.join(lengths)} tokens."] if len(lengths) > 1 else [])
