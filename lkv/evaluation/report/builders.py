"""Results to tables: the paper's Tables 1 and 2, the breakdown by task, sweeps, RULER's curves, fidelity."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lkv.errors import ReportError
from lkv.evaluation.report.ablation import build_ablation
from lkv.evaluation.report.names import AVERAGE, CATEGORIES, FULL, SUITES, method_label
from lkv.evaluation.report.results import Results
from lkv.evaluation.report.scores import (
    Pair,
    Scores,
    Unit,
    at_one_retention,
    in_categories,
    method_pairs,
    retentions_of,
)
from lkv.evaluation.report.tables import LEAST, Cell, Column, Table, TableRow
from lkv.methods.registry import PATTERN, RULES, named_like, variants

_SHARE = "of full, %"
_FIDELITY = {  # measure: title, which side is better
    "kl": ("KL(full || compressed), nats", -1),
    "agreement": ("top-1 agreement", 1),
    "hidden_error": ("relative hidden-state error", -1),
}


@dataclass(frozen=True)
class TableRequest:
    """What of the results a table shall show; empty means all, or the default."""

    methods: tuple[str, ...] = ()
    retentions: tuple[float, ...] = ()
    min_full: float = 0.0
    against: str = ""


def build_table(name: str, results: Results, request: TableRequest) -> Table:
    """The table `name`, one of TABLES. Raises ReportError where the results do not hold it."""
    pairs = method_pairs(results, request.methods, request.retentions)
    table, scores = TABLES[name](results, pairs, request)
    header = results.header
    notes = [
        f"{header['model']}, protocol {header['protocol']}, lkv {header['lkv']}.",
        f"Intervals are 95%, by bootstrap over the {_sizes(scores)} samples of each task, widened where they are few; "
        f"one without any width says that all samples of a task scored alike, and less than {LEAST} have none.",
        *([f"Differences are to {method_label(scores.against)}, on the same samples."] if scores.against else []),
        *_coverage(scores),
        *_origins(scores, header),
    ]
    title = f"{SUITES.get(scores.suite, scores.suite)}, {table.title}"
    return replace(
        table,
        title=title,
        notes=(*notes, *scores.notes, *table.notes, *results.notes),
        reference=scores.against,
        caption=_caption(str(header["model"]), scores),
    )


def _caption(model: str, scores: Scores) -> str:
    """Model, R and n of a picture."""
    retentions = retentions_of(scores.pairs)
    amounts = f"R = {', '.join(f'{r:g}' for r in retentions)}; " if retentions else ""
    return f"{model}; {amounts}n = {sum(map(len, scores.units.values()))} samples"


def _main(results: Results, pairs: Sequence[Pair], request: TableRequest) -> tuple[Table, Scores]:
    scores = Scores(results, at_one_retention(pairs), min_full=request.min_full, against=request.against)
    columns = {AVERAGE: list(scores.units), **in_categories(scores)}
    rows = [_row(scores, pair, columns) for pair in scores.pairs]
    return Table("main", "by category", _columns(columns, scores), tuple(rows)), scores


def _ablation(results: Results, pairs: Sequence[Pair], request: TableRequest) -> tuple[Table, Scores]:
    return build_ablation(results, at_one_retention(pairs), request.min_full)


def _tasks(results: Results, pairs: Sequence[Pair], request: TableRequest) -> tuple[Table, Scores]:
    scores = Scores(results, at_one_retention(pairs), min_full=request.min_full, against=request.against)
    names = dict.fromkeys([AVERAGE, *(task for task, _ in scores.units)])
    rows = []
    for length in dict.fromkeys(length for _, length in scores.units):
        units = [unit for unit in scores.units if unit[1] == length]
        columns = {AVERAGE: units, **{unit[0]: [unit] for unit in units}}
        rows += [_row(scores, pair, columns, "" if length is None else _tokens(length)) for pair in scores.pairs]
    return Table("tasks", "by task", _columns(names, scores), tuple(rows), group_title="length"), scores


def _sweep(results: Results, pairs: Sequence[Pair], request: TableRequest) -> tuple[Table, Scores]:
    scores = Scores(results, pairs, min_full=request.min_full, against=request.against)
    units, retentions = list(scores.units), retentions_of(pairs)
    rows = []
    for method in dict.fromkeys(method for method, _ in pairs):
        at = {r: (method, 1.0 if method == FULL else r) for r in retentions}
        cells = {f"R = {r:g}": scores.value(pair, units) for r, pair in at.items() if pair in pairs}
        rows.append(TableRow(method, method_label(method), cells, retention=1.0 if method == FULL else None))
    table = Table(
        "sweep",
        f"{AVERAGE} over retention",
        tuple(Column(f"R = {r:g}", x=r) for r in retentions),
        tuple(rows),
        ("After @: the realised retention (kept / all entries).",),
        axis="retention (kept / all entries)",
        realised_in_cells=True,
    )
    return table, scores


def _ruler(results: Results, pairs: Sequence[Pair], request: TableRequest) -> tuple[Table, Scores]:
    scores = Scores(results, pairs, min_full=request.min_full, against=request.against)
    lengths = sorted({length for _, length in scores.units if length is not None})
    if not lengths:
        raise ReportError("these results have no lengths; the table 'ruler' is made from what `lkv eval ruler` wrote.")
    columns = {AVERAGE: list(scores.units)}
    columns |= {_tokens(length): [unit for unit in scores.units if unit[1] == length] for length in lengths}
    rows = [
        _row(scores, pair, columns, f"R = {retention:g}")
        for retention in retentions_of(pairs)
        for pair in pairs
        if pair[0] == FULL or pair[1] == retention
    ]
    places = {_tokens(length): float(length) for length in lengths}
    spread = tuple(replace(column, x=places.get(column.name)) for column in _columns(columns, scores))
    axis = "context length (tokens)"
    return Table("ruler", "over length and retention", spread, tuple(rows), (), "", "retention", axis), scores


def _fidelity(results: Results, pairs: Sequence[Pair], request: TableRequest) -> tuple[Table, Scores]:
    pairs = [pair for pair in at_one_retention(pairs) if pair[0] != FULL]
    rows_ = [sample.rows[pair] for sample in results.samples for pair in pairs if pair in sample.rows]
    taken = [measure for measure in _FIDELITY if any(row.measures[measure] is not None for row in rows_)]
    if not taken:
        raise ReportError("these results hold no fidelity for these methods; run `lkv eval` so that it measures it.")
    scores = Scores(results, pairs, taken, request.min_full, request.against)
    columns = {AVERAGE: list(scores.units)}
    for unit in scores.units:
        columns.setdefault(unit[0], []).append(unit)
    rows = [_row(scores, pair, columns, _FIDELITY[measure][0], measure) for measure in taken for pair in pairs]
    spread = tuple(replace(column, digits=3) for column in _columns(columns, scores))
    missing = tuple(f"Not measured: {_FIDELITY[measure][0]}." for measure in _FIDELITY if measure not in taken)
    title, sides = "fidelity to the full cache", dict(_FIDELITY.values())
    return Table("fidelity", title, spread, tuple(rows), missing, "", "measure", value="", best_in=sides), scores


TABLES: dict[str, Callable[[Results, Sequence[Pair], TableRequest], tuple[Table, Scores]]] = {
    "main": _main,
    "ablation": _ablation,
    "tasks": _tasks,
    "sweep": _sweep,
    "ruler": _ruler,
    "fidelity": _fidelity,
}


def _row(
    scores: Scores, pair: Pair, columns: Mapping[str, list[Unit]], group: str = "", measure: str = "score"
) -> TableRow:
    cells: dict[str, Cell | None] = {name: scores.value(pair, units, measure) for name, units in columns.items()}
    average = cells[AVERAGE]
    if average and average.difference:
        cells[_difference(scores)] = average.difference
    if measure == "score" and (FULL, 1.0) in scores.pairs and pair[0] != FULL:
        cells[_SHARE] = scores.share_of_full(pair, columns[AVERAGE])
    return TableRow(pair[0], method_label(pair[0]), cells, group, pair[1], scores.realised(pair, list(scores.units)))


def _columns(names: Sequence[str] | Mapping[str, object], scores: Scores) -> tuple[Column, ...]:
    """The average, how it stands to the reference and to the full cache, and the rest."""
    first, *rest = (Column(name) for name in names)
    extra = [Column(_difference(scores), best=0, signed=True)] if scores.against else []
    extra += [Column(_SHARE, best=0, digits=1)] if (FULL, 1.0) in scores.pairs else []
    return (first, *extra, *rest)


def _difference(scores: Scores) -> str:
    return f"{AVERAGE} - {method_label(scores.against)}"


def _tokens(length: int) -> str:
    return f"{length:,} tokens"


def _origins(scores: Scores, header: Mapping[str, Any]) -> list[str]:
    """Which variant of a method stands in the table where there are several, and whose pattern DuoAttention follows."""
    methods = [method for method, _ in scores.pairs if method != FULL]
    notes = [f"{told}." for told in dict.fromkeys(told for method in methods for told in variants(method))]
    if any((known := named_like(method)) and PATTERN in RULES[known[1].rule].needs for method in methods):
        source = header.get("pattern_from") or "from where the results do not tell"
        notes.append(f"DuoAttention's retrieval heads are {source}.")
    return notes


def _sizes(scores: Scores) -> str:
    sizes = sorted({len(samples) for samples in scores.units.values()})
    return f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def _coverage(scores: Scores) -> list[str]:
    """What the average is over, where it is not the whole suite."""
    known = {task for tasks in CATEGORIES.get(scores.suite, {}).values() for task in tasks}
    measured = {task for task, _ in scores.units}
    lengths = [f"{length:,}" for length in dict.fromkeys(length for _, length in scores.units) if length is not None]
    notes = [f"{AVERAGE} is over {len(measured)} of the {len(known)} tasks."] if known - measured else []
    return notes + ([f"All lengths count alike: {' and '.join(lengths)} tokens."] if len(lengths) > 1 else [])
