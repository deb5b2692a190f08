"""`lkv profile`'s measurements: the paper's prefill table and memory figure (Sec. 4.5)."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from lkv.errors import ReportError
from lkv.evaluation.report.figures import finish_figure, method_styles, new_figure
from lkv.evaluation.report.names import FULL, method_label, paper_models, paper_numbers, sort_methods
from lkv.evaluation.report.published import add_rows
from lkv.evaluation.report.tables import PUBLISHED, Cell, Column, Table, TableRow, make_cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUMBERS = ("prefill_seconds", "prefill_ratio", "decode_ms", "decode_ratio", "peak_bytes", "kv_bytes")
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_NEUTRAL = "#7F7F7F"
# Of the prefill table: field of the file and its scale.
_COLUMNS = {
    Column("prefill, s", 0): ("prefill_seconds", 1.0),
    Column("overhead, %", -1, 1, signed=True): ("prefill_ratio", 100.0),
    Column("decode, ms a token", -1): ("decode_ms", 1.0),
    Column("decode of full", 0): ("decode_ratio", 1.0),
    Column("k and v, MiB", -1, 1): ("kv_bytes", 2**-20),
    Column("peak, MiB", 0, 1): ("peak_bytes", 2**-20),
}


@dataclass(frozen=True)
class Profile:
    """What one `lkv profile` run measured; a number is None where it was not measured."""

    machine: str
    rows: tuple[Mapping[str, Any], ...]

    @property
    def model(self) -> str:
        """The profiled model or configuration."""
        return str(self.rows[0]["model"])


def read_profile(path: Path) -> Profile:
    """Read the JSON that `lkv profile` wrote. Raises ReportError for a missing or malformed file, or several models."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(_check_row(path, number, row) for number, row in enumerate(document["rows"], 1))
        is_profile = document["name"] == "profile"
    except OSError as error:
        raise ReportError(f"{path} cannot be read ({error}); give a file that `lkv profile` wrote.") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ReportError(f"{path} is not a profile ({error}); give a file that `lkv profile` wrote.") from error
    if not is_profile or not rows:
        raise ReportError(f"{path} holds no profile; give a file that `lkv profile` wrote.")
    for field in ("model", "device", "batch"):
        if len(values := {str(row[field]) for row in rows}) > 1:
            raise ReportError(f"{path} mixes values of {field} ({', '.join(sorted(values))}); report them separately.")
    return Profile(str(document.get("machine", "")), rows)


def _check_row(path: Path, number: int, row: Mapping[str, Any]) -> Mapping[str, Any]:
    for field in ("model", "device", "method", "tokens", "batch", "retention", *_NUMBERS):
        if field not in row:
            raise ReportError(f"{path}, row {number} has no field {field!r}; make the file anew with `lkv profile`.")
    for field in ("tokens", *_NUMBERS):
        value = row[field]
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            raise ReportError(f"{path}, row {number}: {field} is {value!r}; make the file anew with `lkv profile`.")
    return row


def build_prefill(profile: Profile) -> Table:
    """Prefill and decode times and bytes of k and v of each method, by context length."""

    def cell(row: Mapping[str, Any], field: str, scale: float) -> Cell | None:
        value = row[field]
        if value is None or (field == "prefill_ratio" and row["method"] == FULL):
            return None
        return Cell(scale * (value - 1) if field == "prefill_ratio" else scale * value)

    methods = sort_methods(row["method"] for row in profile.rows)
    rows = [
        TableRow(
            row["method"],
            method_label(row["method"]),
            {column.name: cell(row, *field) for column, field in _COLUMNS.items()},
            f"{row['tokens']:,} tokens",
            row["retention"],
            row.get("realised"),
        )
        for row in sorted(profile.rows, key=lambda row: (row["tokens"], methods.index(row["method"])))
    ]
    first = profile.rows[0]
    return Table(
        "prefill",
        f"Prefill and decode, {profile.model} on {first['device']}, batch {first['batch']}",
        tuple(_COLUMNS),
        make_cells(rows, _COLUMNS),
        (f"Measured on {profile.machine}.", "Overhead and ratios are to the full cache in the same run."),
        group_title="context",
    )


def published_prefill(table: Table, model: str) -> Table:
    """`table` with the paper's prefill table as a group of its own."""
    published, name = paper_numbers()["prefill"].get(model), paper_models()[model]
    if published is None:
        raise ReportError(f"the paper prints no prefill times with {name}; use --published llama-3.1-8b.")
    group = f"{published['context']} tokens, {name} on {published['device']} ({PUBLISHED})"
    rows = []
    for method, (seconds, overhead) in published["rows"].items():
        cells = {"prefill, s": Cell(seconds), "overhead, %": None if overhead is None else Cell(overhead)}
        retention = 1.0 if method == FULL else published["retention"]
        label = f"{method_label(method)} ({PUBLISHED})"
        rows.append(TableRow(method, label, cells, group, retention, source=PUBLISHED))
    costs = ", ".join(f"{method_label(method)} {cost}" for method, cost in published["complexity"].items())
    memory = paper_numbers()["memory"][model]
    reached = ", ".join(f"{method_label(method)} {tokens}" for method, tokens in memory["reached"].items())
    notes = (
        f"Cost of selection as the paper gives it (T tokens, W observed): {costs}.",
        f"Context that fits in memory as the paper gives it ({memory['device']}): {reached}.",
    )
    return replace(add_rows(table, rows), notes=(*table.notes, *notes))


def plot_memory(profile: Profile, published: str = "", weights: bool = False) -> "Figure":
    """Peak memory where it was measured, and bytes of k and v, over context length; all scales linear, from 0.

    A dashed line stands where a method ran out of memory.

    Args:
        profile: What was measured.
        published: A model of the paper whose published sizes are drawn as hollow points, if the profile is of it.
        weights: Whether the peak includes the weights, as in the paper's Fig. 5.
    """
    panels = {"kv_bytes": "k and v held"}
    frame = pd.DataFrame(profile.rows).sort_values("tokens", kind="stable")
    if frame.peak_bytes.notna().any():
        panels = {"peak_bytes": "peak memory, weights included" if weights else "peak memory"} | panels
    if weights:
        if not isinstance(profile.rows[0].get("weight_bytes"), int):
            raise ReportError("the profile does not state the bytes of the weights; make it anew with `lkv profile`.")
        frame["peak_bytes"] += frame.weight_bytes
    figure = new_figure(0.6 + 5.0 * len(panels), 4.6)
    all_axes = list(figure.subplots(1, len(panels), squeeze=False)[0])
    methods = sort_methods(frame.method)
    styles = method_styles(methods)
    for axes, (field, title) in zip(all_axes, panels.items(), strict=True):
        comparable = bool(published) and published in profile.model.lower() and field == "kv_bytes"
        points = _published_sizes(published) if comparable else {}
        most = max([frame[field].max(), *(size for _, size in points.values())])
        unit, scale = next(((name, size) for name, size in _UNITS if most >= size), ("bytes", 1))
        for method in methods:
            of_method, style = frame[frame.method == method], styles[method]
            for retention, rows in of_method.groupby("retention", sort=False):
                measured = rows.dropna(subset=field)
                axes.plot(
                    measured.tokens,
                    measured[field] / scale,
                    color=style.colour,
                    marker="." if method == FULL else style.marker,
                    linewidth=style.width,
                    zorder=style.order,
                    linestyle=":" if method == FULL else style.line,
                    label=method_label(method) + f", R = {retention:g}" * (of_method.retention.nunique() > 1),
                )
            for tokens in of_method.get("failed_at", pd.Series()).dropna():
                axes.axvline(tokens, color=style.colour, linestyle="--", linewidth=1)
        for method, (tokens, size) in points.items():
            axes.plot(
                [tokens], [size / scale], "D", color=styles[method].colour if method in styles else _NEUTRAL,
                markerfacecolor="white", markersize=8, label=f"{method_label(method)} ({PUBLISHED})",
            )  # fmt: skip
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=6)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("context length (tokens)")
        axes.set_ylabel(f"{title} ({unit})")
    retentions = sorted(frame.retention[frame.method != FULL].unique(), reverse=True)
    amounts = f"R = {', '.join(f'{r:g}' for r in retentions)}; " if retentions else ""
    caption = f"{profile.model}; {amounts}batch {profile.rows[0]['batch']}; measured on {profile.machine}"
    finish_figure(figure, all_axes, "Memory over context length", caption)
    return figure


def _published_sizes(model: str) -> dict[str, tuple[int, float]]:
    """(tokens, bytes of k and v) by method. The paper's "25.0 GB at 200k" are GiB of bfloat16 at 200 x 1024 tokens."""
    published = paper_numbers()["memory"].get(model)
    if published is None:
        name = paper_models()[model]
        raise ReportError(f"the paper prints no memory sizes with {name}; use --published llama-3.1-8b.")
    return {method: (published["tokens"], size * 2**30) for method, size in published["kv_gib"].items()}
