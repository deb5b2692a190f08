"""The paper's Table 2: three budget rules by three selectors, with what the rules gain and the marginal means."""

from collections.abc import Sequence

from lkv.errors import ReportError
from lkv.evaluation.report.names import AVERAGE, FULL, RULES, SELECTORS, budget_and_selector, method_label, part_label
from lkv.evaluation.report.results import Results
from lkv.evaluation.report.scores import Pair, Scores, Unit, in_categories
from lkv.evaluation.report.tables import Cell, Column, Table, TableRow

GAIN = "gain over uniform"
_SHOWN = {"longbench": ("Multi-Doc QA", "Synthetic")}  # the categories of Table 2; other suites show all of theirs


def build_ablation(results: Results, pairs: Sequence[Pair], min_full: float = 0.0) -> tuple[Table, Scores]:
    """The grid from the methods of `pairs` (one retention) that belong to it, under any of their names.

    Marginal means average the methods sample by sample. Raises ReportError where fewer than two of the grid are there.
    """
    grid: dict[tuple[str, str], Pair] = {}
    for pair in pairs:
        if (combination := budget_and_selector(pair[0])) and combination[0] in RULES and combination[1] in SELECTORS:
            grid.setdefault(combination, pair)
    if len(grid) < 2:
        raise ReportError(
            f"the ablation needs methods of the grid {{{', '.join(RULES)}}} x {{{', '.join(SELECTORS)}}}; the files "
            f"hold {', '.join(dict.fromkeys(method for method, _ in pairs))}. Run `lkv eval` with --methods "
            f"{' '.join(f'{rule}+{selector}' for selector in SELECTORS for rule in RULES)}."
        )
    full = [pair for pair in pairs if pair[0] == FULL]
    scores = Scores(results, [*full, *grid.values()], min_full=min_full)
    columns: dict[str, list[Unit]] = {AVERAGE: list(scores.units)}
    shown = _SHOWN.get(scores.suite)
    columns |= {name: units for name, units in in_categories(scores).items() if not shown or name in shown}
    rows = [_row(scores, columns, [pair], method_label(FULL), "", FULL) for pair in full]
    for selector in SELECTORS:
        group = f"selection: {part_label(selector)}"
        for rule in RULES:
            if (rule, selector) in grid:
                uniform = grid.get((RULES[0], selector))
                bases = [uniform] if uniform and rule != RULES[0] else []
                chosen = [grid[rule, selector]]
                rows.append(_row(scores, columns, chosen, part_label(rule), group, f"{rule}+{selector}", bases))
    rows += _marginals(scores, columns, grid)
    missing = [f"{rule}+{selector}" for rule in RULES for selector in SELECTORS if (rule, selector) not in grid]
    notes = (f"Not measured: {', '.join(missing)}.",) if missing else ()
    names = [Column(AVERAGE), Column(GAIN, best=0, signed=True), *(Column(name) for name in [*columns][1:])]
    return Table("ablation", "budget rule by selector", tuple(names), tuple(rows), notes), scores


def _marginals(scores: Scores, columns: dict[str, list[Unit]], grid: dict[tuple[str, str], Pair]) -> list[TableRow]:
    """Means over the selectors for each rule, and over the rules for each selector, where all of them are there."""
    rows = []
    by_rule = {rule: [grid.get((rule, selector)) for selector in SELECTORS] for rule in RULES}
    base = [pair for pair in by_rule[RULES[0]] if pair]
    for rule, pairs in by_rule.items():
        ran = [pair for pair in pairs if pair]
        if len(ran) == len(pairs):
            bases = base if rule != RULES[0] and len(base) == len(pairs) else []
            rows.append(_row(scores, columns, ran, part_label(rule), "mean over selectors", rule, bases))
    for selector in SELECTORS:
        ran = [grid[rule, selector] for rule in RULES if (rule, selector) in grid]
        if len(ran) == len(RULES):
            rows.append(_row(scores, columns, ran, part_label(selector), "mean over budget rules", selector))
    return rows


def _row(
    scores: Scores,
    columns: dict[str, list[Unit]],
    averaged: Sequence[Pair],
    name: str,
    group: str,
    method: str,
    bases: Sequence[Pair] = (),
) -> TableRow:
    """The mean of the methods `averaged`, and its gain over that of `bases`."""
    units = columns[AVERAGE]
    weights = [1 / len(averaged)] * len(averaged)
    cells: dict[str, Cell | None] = {
        column: scores.value(averaged[0], counted)
        if len(averaged) == 1
        else scores.combined(averaged, counted, weights)
        for column, counted in columns.items()
    }
    if bases:
        cells[GAIN] = scores.combined([*averaged, *bases], units, weights + [-1 / len(bases)] * len(bases))
    kept = [share for pair in averaged if (share := scores.realised(pair, units)) is not None]
    realised = sum(kept) / len(averaged) if len(kept) == len(averaged) else None
    return TableRow(method, name, cells, group, averaged[0][1], realised)
