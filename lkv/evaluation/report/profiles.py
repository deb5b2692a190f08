"""`lkv profile`'s measurements: the paper's prefill table and memory figure (Sec. 4.5)."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lkv.errors import ReportError
from lkv.evaluation.report.figures import new_figure
from lkv.evaluation.report.names import FULL, method_label, sort_methods
from lkv.evaluation.report.published import MARK, models, numbers
from lkv.evaluation.report.style import finish_figure, method_styles
from lkv.evaluation.report.tables import Cell, Column, Table, TableRow

_NUMBERS = ("prefill_seconds", "prefill_ratio", "decode_ms", "decode_ratio", "peak_bytes", "kv_bytes")
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_NEUTRAL = "#7F7F7F"


@dataclass(frozen=True)
class Profile:
    """What one `lkv profile` run measured; a number is None where it was not taken."""

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
        rows = tuple(_checked(path, i, row) for i, row in enumerate(document["rows"], 1))
        named = document["name"] == "profile"
    except OSError as error:
        raise ReportError(f"{path} cannot be read ({error}); give a file that `lkv profile` wrote.") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ReportError(f"{path} is no profile ({error}); give a file that `lkv profile` wrote.") from error
    if not named or not rows:
        raise ReportError(f"{path} holds no profile; give a file that `lkv profile` wrote.")
    for field in ("model", "device", "batch"):
        if len(values := {str(row[field]) for row in rows}) > 1:
            raise ReportError(f"{path} mixes values of {field} ({', '.join(sorted(values))}); report them one by one.")
    return Profile(str(document.get("machine", "")), rows)


def _checked(path: Path, number: int, row: Mapping[str, Any]) -> Mapping[str, Any]:
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
    columns = {
        "prefill, s": ("prefill_seconds", 1.0, Column("prefill, s", 0)),
        "overhead, %": ("prefill_ratio", 100.0, Column("overhead, %", -1, 1, signed=True)),
        "decode, ms a token": ("decode_ms", 1.0, Column("decode, ms a token", -1)),
        "decode of full": ("decode_ratio", 1.0, Column("decode of full", 0)),
        "k and v, MiB": ("kv_bytes", 2**-20, Column("k and v, MiB", -1, 1)),
        "peak, MiB": ("peak_bytes", 2**-20, Column("peak, MiB", 0, 1)),
    }
    rows = []
    for tokens in sorted({row["tokens"] for row in profile.rows}):
        at_length = [row for row in profile.rows if row["tokens"] == tokens]
        for method in sort_methods(row["method"] for row in at_length):
            for row in [row for row in at_length if row["method"] == method]:
                cells = {name: _cell(row, field, scale) for name, (field, scale, _) in columns.items()}
                group = f"{tokens:,} tokens"
                rows.append(TableRow(method, method_label(method), cells, group, row["retention"], row.get("realised")))
    first = profile.rows[0]
    return Table(
        "prefill",
        f"Prefill and decode, {profile.model} on {first['device']}, batch {first['batch']}",
        tuple(column for _, _, column in columns.values()),
        tuple(rows),
        (f"Measured on {profile.machine}.", "Overhead and ratios are to the full cache in the same run."),
        group_title="context",
    )


def _cell(row: Mapping[str, Any], field: str, scale: float) -> Cell | None:
    value = row[field]
    if value is None or (field == "prefill_ratio" and row["method"] == FULL):
        return None
    return Cell(scale * (value - 1) if field == "prefill_ratio" else scale * value)


def published_prefill(table: Table, model: str) -> Table:
    """`table` with the paper's prefill table as a group of its own."""
    published = numbers()["prefill"].get(model)
    if published is None:
        raise ReportError(f"the paper prints no prefill times with {models()[model]}; use --published llama-3.1-8b.")
    group = f"{published['context']} tokens, {models()[model]} on {published['device']} ({MARK})"
    rows = []
    for method, (seconds, overhead) in published["rows"].items():
        cells = {"prefill, s": Cell(seconds), "overhead, %": None if overhead is None else Cell(overhead)}
        retention = 1.0 if method == FULL else published["retention"]
        rows.append(TableRow(method, f"{method_label(method)} ({MARK})", cells, group, retention, published=True))
    costs = ", ".join(f"{method_label(method)} {cost}" for method, cost in published["complexity"].items())
    memory = numbers()["memory"][model]
    reached = ", ".join(f"{method_label(method)} {tokens}" for method, tokens in memory["reached"].items())
    notes = (
        f"Cost of selection as the paper gives it (T tokens, W observed): {costs}.",
        f"Context that fits in memory as the paper gives it ({memory['device']}): {reached}.",
    )
    return replace(table, rows=(*table.rows, *rows), notes=(*table.notes, *notes))


def plot_memory(profile: Profile, published: str = "", weights: bool = False) -> Any:
    """Peak memory where it was measured, and bytes of k and v, over context length; all scales linear, from 0.

    `published`: a model of the paper whose published sizes are drawn too, as hollow points, if the profile is of it.
    `weights`: the peak is that of the whole device, as in the paper's Fig. 5, with the weights in it. A dashed line
    stands where a method ran out of memory.
    """
    panels = [("kv_bytes", "k and v held")]
    if any(row["peak_bytes"] is not None for row in profile.rows):
        panels.insert(0, ("peak_bytes", "peak memory, weights included" if weights else "peak memory"))
    figure = new_figure(0.6 + 5.0 * len(panels), 4.6)
    all_axes = list(figure.subplots(1, len(panels), squeeze=False)[0])
    series = _series(profile)
    chosen = method_styles([method for method, _ in series])
    for axes, (field, title) in zip(all_axes, panels, strict=True):
        comparable = bool(published) and published in profile.model.lower() and field == "kv_bytes"
        points = _published_sizes(published) if comparable else {}
        base = _weights(profile) if weights and field == "peak_bytes" else 0
        most = max([base + (row[field] or 0) for row in profile.rows] + [size for _, size in points.values()])
        unit, scale = next(((name, size) for name, size in _UNITS if most >= size), ("bytes", 1))
        for (method, name), rows in series.items():
            taken = [(row["tokens"], (base + row[field]) / scale) for row in rows if row[field] is not None]
            style = chosen[method]
            axes.plot(
                *zip(*taken, strict=True),
                color=style.colour,
                marker="." if method == FULL else style.marker,
                linewidth=style.width,
                zorder=style.order,
                linestyle=":" if method == FULL else style.line,
                label=name,
            )
            for row in (row for row in rows if row.get("failed_at")):
                axes.axvline(row["failed_at"], color=style.colour, linestyle="--", linewidth=1)
        for method, (tokens, size) in points.items():
            colour = chosen[method].colour if method in chosen else _NEUTRAL
            axes.plot(
                [tokens], [size / scale], "D", color=colour, markerfacecolor="white", markersize=8,
                label=f"{method_label(method)} ({MARK})",
            )  # fmt: skip
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=6)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("context length (tokens)")
        axes.set_ylabel(f"{title} ({unit})")
    retentions = sorted({row["retention"] for row in profile.rows if row["method"] != FULL}, reverse=True)
    amounts = f"R = {', '.join(f'{r:g}' for r in retentions)}; " if retentions else ""
    caption = f"{profile.model}; {amounts}batch {profile.rows[0]['batch']}; measured on {profile.machine}"
    finish_figure(figure, all_axes, "Memory over context length", caption)
    return figure


def _weights(profile: Profile) -> float:
    """Bytes of the model's weights. Raises ReportError for a profile that does not tell."""
    size = profile.rows[0].get("weight_bytes")
    if not isinstance(size, int):
        raise ReportError("the profile does not tell the bytes of the weights; make it anew with `lkv profile`.")
    return size


def _series(profile: Profile) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """The rows of each (method, name) by rising length; names tell retentions apart where a method has several."""
    series: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for method in sort_methods(row["method"] for row in profile.rows):
        of_method = sorted((row for row in profile.rows if row["method"] == method), key=lambda row: row["tokens"])
        amounts = {row["retention"] for row in of_method}
        for row in of_method:
            name = method_label(method) + (f", R = {row['retention']:g}" if len(amounts) > 1 else "")
            series.setdefault((method, name), []).append(row)
    return series


def _published_sizes(model: str) -> dict[str, tuple[int, float]]:
    """(tokens, bytes of k and v) by method. The paper's "25.0 GB at 200k" are GiB of bfloat16 at 200 x 1024 tokens."""
    published = numbers()["memory"].get(model)
    if published is None:
        raise ReportError(f"the paper prints no memory sizes with {models()[model]}; use --published llama-3.1-8b.")
    return {method: (published["tokens"], size * 2**30) for method, size in published["kv_gib"].items()}
