"""Tables of `lkv eval`: the paper's Tables 1 and 2, sweeps, RULER's curves, fidelity; with published numbers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.report import names
from experiments.report.names import AVERAGE, FULL, RULES, SELECTORS, method_label, part_label
from experiments.report.results_frame import Pair, Results
from experiments.report.scores import Scores, Unit, at_one_retention, method_pairs, retentions_of
from experiments.report.tables import PUBLISHED, Cell, Column, Table, TableRow, add_rows, make_table
from lkv.errors import DEFAULT_RETENTION, ReportError
from lkv.evaluation.statistics import MIN_SAMPLES
from lkv.methods.registry import find_method
from lkv.utils.journal import MEMORY

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


_ALL = TableRequest()


def build_table(name: str, results: Results, request: TableRequest = _ALL) -> Table:
    """The table `name`, one of `names.TABLES`.

    Raises:
        ReportError: Where the results do not hold it.
    """
    pairs = method_pairs(results, request.methods, request.retentions)
    if name == "ablation":
        pairs = at_one_retention(pairs, results.option)
    metrics: Sequence[str] = ("score",)
    if name == "ablation":
        pairs = [*(pair for pair in pairs if pair[0] == FULL), *_ablation_grid(pairs).values()]
    elif name == "fidelity":
        pairs = [pair for pair in pairs if pair[0] != FULL]
        fidelity = results.frame.set_index(["method", "retention"]).loc[pairs, list(_FIDELITY)]
        metrics = [metric for metric in _FIDELITY if fidelity[metric].notna().any()]
        if not metrics:
            raise ReportError(
                "these results hold no fidelity for these methods; run `lkv eval` so that it measures it."
            )
    scores = Scores(results, pairs, metrics, request.min_full, "" if name == "ablation" else request.against)
    table, header = _BUILDERS[name](scores), results.header
    amounts, sizes = retentions_of(pairs), sorted({min(scores.sizes), max(scores.sizes)})
    notes = [
        f"{header['model']}, protocol {header['protocol']}, lkv {header['lkv']}.",
        f"Intervals are 95%, by bootstrap over the {_describe_draws(sizes)}; fewer than {MIN_SAMPLES} samples have "
        "none. An interval has no width where all samples of a task scored alike. Two intervals that overlap show no "
        "difference.",
    ]
    if results.amount == MEMORY:
        notes += _describe_memory(results, pairs)
    if scores.against:
        notes.append(
            f"Differences are to {method_label(scores.against)}, on the same samples: an interval without 0 shows one."
        )
    suite_tasks = {task for tasks in names.CATEGORIES.get(scores.suite, {}).values() for task in tasks}
    measured = {task for task, _ in scores.units}
    if suite_tasks - measured:
        notes.append(f"{AVERAGE} is over {len(measured)} of the {len(suite_tasks)} tasks.")
    lengths = [f"{length:,}" for length in dict.fromkeys(length for _, length in scores.units) if length is not None]
    if len(lengths) > 1:
        notes.append(f"All lengths count alike: {' and '.join(lengths)} tokens.")
    specs = [spec for method, _ in pairs if method != FULL and (spec := find_method(method))]
    notes += [f"{variant}." for variant in dict.fromkeys(variant for spec in specs for variant in spec.variants)]
    if any(spec.needs_pattern for spec in specs):
        source = header.get("pattern_from") or "of unknown origin: the results do not state it"
        notes.append(f"DuoAttention's retrieval heads are {source}.")
    return replace(
        table,
        title=f"{names.SUITES.get(scores.suite, scores.suite)}, {table.title}",
        notes=(*notes, *scores.notes, *table.notes, *results.notes),
        reference=scores.against,
        amount=results.amount,
        caption=f"{header['model']}; {results.amount} = {', '.join(f'{r:g}' for r in amounts)}; "
        f"n = {sum(scores.sizes)} samples",
    )


def _describe_memory(results: Results, pairs: Sequence[Pair]) -> list[str]:
    """Notes on budgets of bytes."""
    notes = ["memory is the share of the 16-bit cache's bytes, kept that of its entries, in fewer bits each."]
    shares = results.frame.groupby(["method", "retention"])["bytes"].mean()
    excesses = [
        f"{method} {shares[method, budget]:.3g} at {budget:g}"
        for method, budget in pairs
        if method != FULL and shares[method, budget] > 1.05 * budget
    ]
    if excesses:
        notes.append(f"What these methods keep at least takes more bytes than the budget: {', '.join(excesses)}.")
    return notes


def _describe_draws(sizes: Sequence[int]) -> str:
    """What intervals are drawn from, where tasks have these numbers of samples."""
    if max(sizes) == 1:
        return "tasks, each of one sample"
    single = ", and a task of one sample as if it varied as the others do" if min(sizes) == 1 else ""
    return f"{' to '.join(map(str, sizes))} samples of each task, widened where they are few{single}"


def _build_main(scores: Scores) -> Table:
    columns, notes = {AVERAGE: scores.units, **scores.categories()}, []
    if len(columns) == 2 and list(columns.values())[1] == scores.units:  # which would repeat the average
        notes = [f"All tasks are of the category {columns.popitem()[0]}."]
    rows = [_make_row(scores, pair, columns, group) for group, pair in _by_budget(scores)]
    columns_shown = _make_columns(columns, scores)
    return make_table("main", "by category", columns_shown, rows, notes=tuple(notes), group_title="budget")


def _by_budget(scores: Scores, group: str = "", is_named: bool = False) -> Iterator[tuple[str, Pair]]:
    """Each budget's pairs, the full cache among them, under `group` and, of several or if `is_named`, its own title."""
    amounts = retentions_of(scores.pairs)
    for amount in amounts:
        title = f"{scores.amount} = {amount:g}" if is_named or len(amounts) > 1 else ""
        for pair in scores.pairs:
            if pair[0] == FULL or pair[1] == amount:
                yield ", ".join(filter(None, (group, title))), pair


def _build_tasks(scores: Scores) -> Table:
    rows = []
    for length in dict.fromkeys(length for _, length in scores.units):
        units = [unit for unit in scores.units if unit[1] == length]
        by_task = {AVERAGE: units, **{unit[0]: [unit] for unit in units}}
        title = f"{length:,} tokens" if length else ""
        rows += [_make_row(scores, pair, by_task, group) for group, pair in _by_budget(scores, title)]
    columns = _make_columns([AVERAGE, *dict.fromkeys(task for task, _ in scores.units)], scores)
    return make_table("tasks", "by task", columns, rows, group_title="length, budget")


def _build_sweep(scores: Scores) -> Table:
    columns = {r: Column(f"{scores.amount} = {r:g}", x=r) for r in retentions_of(scores.pairs)}
    rows = []
    for method in dict.fromkeys(method for method, _ in scores.pairs):
        pairs = {r: (method, 1.0 if method == FULL else r) for r in columns}
        cells = {columns[r].name: scores.value(p, scores.units) for r, p in pairs.items() if p in scores.pairs}
        rows.append(TableRow(method, method_label(method), cells, retention=1.0 if method == FULL else None))
    notes = ("After @: the realised retention (kept / all entries).",)
    title = f"{AVERAGE} over {'memory' if scores.amount == MEMORY else 'retention'}"
    return make_table("sweep", title, list(columns.values()), rows, notes=notes, shows_realised=True)


def _build_ruler(scores: Scores) -> Table:
    lengths = sorted({length for _, length in scores.units if length is not None})
    if not lengths:
        raise ReportError("these results have no lengths; the table 'ruler' is made from what `lkv eval ruler` wrote.")
    places = {f"{length:,} tokens": float(length) for length in lengths}
    units = {name: [unit for unit in scores.units if unit[1] == length] for name, length in places.items()}
    units = {AVERAGE: scores.units} | units
    rows = [_make_row(scores, pair, units, group) for group, pair in _by_budget(scores, is_named=True)]
    columns = [replace(column, x=places.get(column.name)) for column in _make_columns(units, scores)]
    more = {"group_title": "retention", "axis": "context length (tokens)"}
    return make_table("ruler", "over length and retention", columns, rows, **more)


def _build_fidelity(scores: Scores) -> Table:
    units: dict[str, list[Unit]] = {AVERAGE: scores.units}
    for unit in scores.units:
        units.setdefault(unit[0], []).append(unit)
    rows, best_in = list[TableRow](), dict[str, int]()
    for metric in scores.metrics:
        title, best = _FIDELITY[metric]
        for group, pair in _by_budget(scores, title):
            best_in[group] = best
            rows.append(_make_row(scores, pair, units, group, metric))
    columns = [replace(column, digits=3) for column in _make_columns(units, scores)]
    notes = tuple(f"Not measured: {title}." for metric, (title, _) in _FIDELITY.items() if metric not in scores.metrics)
    more = {"notes": notes, "group_title": "measure", "value": "", "best_in": best_in}
    return make_table("fidelity", "fidelity to the full cache", columns, rows, **more)


def _ablation_grid(pairs: Sequence[Pair]) -> dict[tuple[str, str], Pair]:
    """The methods of the ablation by (budget rule, selector), under any of their names."""
    grid: dict[tuple[str, str], Pair] = {}
    for pair in pairs:
        combination = names.budget_and_selector(pair[0])
        if combination and combination[0] in RULES and combination[1] in SELECTORS:
            grid.setdefault(combination, pair)
    if len(grid) < 2:
        raise ReportError(
            f"the ablation needs methods of the grid {{{', '.join(RULES)}}} x {{{', '.join(SELECTORS)}}}; the files "
            f"hold {', '.join(dict.fromkeys(method for method, _ in pairs))}. Run `lkv eval` with --methods "
            f"{' '.join(f'{rule}+{selector}' for selector in SELECTORS for rule in RULES)}."
        )
    return grid


def _build_ablation(scores: Scores) -> Table:
    """Budget rules by selectors, what the rules gain, and marginal means that average the methods by sample."""
    grid, base = _ablation_grid(scores.pairs), RULES[0]
    titles, units = _ABLATION_COLUMNS.get(scores.suite), {AVERAGE: scores.units}
    units |= {name: group for name, group in scores.categories().items() if not titles or name in titles}

    def row(pairs: Sequence[Pair], name: str, group: str, method: str, bases: Sequence[Pair] = ()) -> TableRow:
        """The mean of the methods `pairs`, and its gain over that of `bases`."""
        weights = dict.fromkeys(pairs, 1 / len(pairs))
        cells = {
            column: scores.value(pairs[0], column_units) if len(pairs) == 1 else scores.combine(weights, column_units)
            for column, column_units in units.items()
        }
        if bases:
            cells[_GAIN] = scores.combine(weights | dict.fromkeys(bases, -1 / len(bases)), scores.units)
        return TableRow(method, name, cells, group, pairs[0][1], scores.realised(pairs, scores.units))

    rows = [row([pair], method_label(FULL), "", FULL) for pair in scores.pairs if pair[0] == FULL]
    for selector in SELECTORS:
        for rule in RULES:
            if pair := grid.get((rule, selector)):
                bases = [grid[base, selector]] if rule != base and (base, selector) in grid else []
                group = f"selection: {part_label(selector)}"
                rows.append(row([pair], part_label(rule), group, f"{rule}+{selector}", bases))
    whole = {part: [grid.get((part, s)) for s in SELECTORS] for part in RULES}
    whole |= {part: [grid.get((rule, part)) for rule in RULES] for part in SELECTORS}
    means = {part: [pair for pair in pairs if pair] for part, pairs in whole.items() if all(pairs)}
    for part, pairs in means.items():
        bases = means.get(base, []) if part in RULES[1:] else []
        group = "mean over selectors" if part in RULES else "mean over budget rules"
        rows.append(row(pairs, part_label(part), group, part, bases))
    missing = [f"{rule}+{selector}" for rule in RULES for selector in SELECTORS if (rule, selector) not in grid]
    notes = (f"Not measured: {', '.join(missing)}.",) if missing else ()
    columns = [Column(AVERAGE), Column(_GAIN, best=0, signed=True), *map(Column, list(units)[1:])]
    return make_table("ablation", "budget rule by selector", columns, rows, notes=notes)


_BUILDERS: dict[str, Callable[[Scores], Table]] = {
    "main": _build_main,
    "ablation": _build_ablation,
    "tasks": _build_tasks,
    "sweep": _build_sweep,
    "ruler": _build_ruler,
    "fidelity": _build_fidelity,
}


def _make_row(
    scores: Scores, pair: Pair, units: Mapping[str, Sequence[Unit]], group: str = "", metric: str = "score"
) -> TableRow:
    """The row of a method: its value over the units of each column, and how its average compares."""
    cells = {name: scores.value(pair, column_units, metric) for name, column_units in units.items()}
    average = cells[AVERAGE]
    if average and average.difference is not None:
        difference = Cell(average.difference, average.difference_low, average.difference_high, average.n)
        cells[_difference_title(scores)] = difference
    if metric == "score" and (FULL, 1.0) in scores.pairs and pair[0] != FULL:
        cells[_SHARE] = scores.share_of_full(pair, units[AVERAGE])
    return TableRow(pair[0], method_label(pair[0]), cells, group, pair[1], scores.realised([pair], units[AVERAGE]))


def _make_columns(titles: Iterable[str], scores: Scores) -> list[Column]:
    """The average, its difference to the reference, its share of the full cache's, and the rest."""
    first, *rest = map(Column, titles)
    extra = [Column(_difference_title(scores), best=0, signed=True)] if scores.against else []
    extra += [Column(_SHARE, best=0, digits=1)] if (FULL, 1.0) in scores.pairs else []
    return [first, *extra, *rest]


def _difference_title(scores: Scores) -> str:
    return f"{AVERAGE} - {method_label(scores.against)}"


def with_published(table: Table, model: str, suite: str, measured: str = "") -> Table:
    """`table` with a marked row for each published one, or a note where the paper prints no such numbers.

    Args:
        table: The measured table.
        model: Short name of a model of the paper.
        suite: What was measured; the paper's numbers are LongBench's.
        measured: The measured model; rows of another one name it.
    """
    name = names.paper_models()[model]
    mark = PUBLISHED if not measured or model in measured.lower() else f"{PUBLISHED}, {name}"
    published = names.paper_numbers().get(table.name, {}).get(model) if suite == "longbench" else None
    if published is None:
        return add_rows(table, [], f"The paper prints no numbers for this table with {name}.")
    titles = [f"R = {title:g}" if isinstance(title, float) else title for title in published["columns"]]
    present = {column.name for column in table.columns}
    own_group = f"R = {DEFAULT_RETENTION:g}"  # of a table with several budgets
    own_group = own_group if own_group in set(table.cells.group) else ""
    rows = []
    for method, values in published["rows"].items():
        cells = {title: Cell(value) for title, value in zip(titles, values, strict=True) if title in present}
        combination = names.budget_and_selector(method) if table.name == "ablation" else None
        group = f"selection: {part_label(combination[1])}" if combination else own_group
        label = part_label(combination[0]) if combination else method_label(method)
        retention = 1.0 if method == FULL else None if table.shows_realised else DEFAULT_RETENTION
        if cells:
            rows.append(TableRow(method, f"{label} ({mark})", cells, group, retention, source=PUBLISHED))
    note = (
        f"Rows marked {PUBLISHED}: {name}, as the LKV paper prints them, on all of LongBench; its baselines are those "
        "of kvpress."
    )
    return add_rows(table, rows, note)
