"""The table of experiments.profile (the paper's Table 3): times and bytes by context length."""

import json
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import pandas as pd

from experiments.report import names
from experiments.report.names import FULL, method_label
from experiments.report.tables import PUBLISHED, Cell, Column, Table, TableRow, add_rows, make_table
from lkv.errors import ReportError

_PREFILL = {  # column: field of the profile and its scale
    Column("prefill, s", 0): ("prefill_seconds", 1.0),
    Column("overhead, %", -1, 1, signed=True): ("prefill_ratio", 100.0),
    Column("decode, ms per token", -1): ("decode_ms", 1.0),
    Column("decode of full", 0): ("decode_ratio", 1.0),
    Column("k and v, MiB", -1, 1): ("kv_bytes", 2**-20),
    Column("peak, MiB", 0, 1): ("peak_bytes", 2**-20),
}


@dataclass(frozen=True)
class ProfileResults:
    """What experiments.profile measured, a row a method and length; a number is missing where it was not measured."""

    machine: str
    model: str
    device: str
    batch: int
    frame: pd.DataFrame


def read_profile(path: Path) -> ProfileResults:
    """Read the JSON that experiments.profile wrote. Raises ReportError for a malformed file or several models."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = list(document["rows"]) if document["name"] == "profile" else []
        numbers = ("tokens", *(name for name, _ in _PREFILL.values()))
        for number, row in enumerate(rows, 1):
            for name in ("model", "device", "method", "batch", "retention", *numbers):
                value = row.get(name, "missing")
                is_number = isinstance(value, int | float) and isfinite(value)
                if name not in row or (name in numbers and value is not None and not is_number):
                    raise ReportError(
                        f"{path}, row {number}: {name} is {value!r}; make the file anew with experiments.profile."
                    )
    except OSError as error:
        raise ReportError(f"{path} cannot be read ({error}); give a file that experiments.profile wrote.") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ReportError(f"{path} is not a profile ({error}); give a file that experiments.profile wrote.") from error
    if not rows:
        raise ReportError(f"{path} has no profile; give a file that experiments.profile wrote.")
    for name in ("model", "device", "batch"):
        if len(values := {str(row[name]) for row in rows}) > 1:
            raise ReportError(f"{path} mixes values of {name} ({', '.join(sorted(values))}); report them separately.")
    frame = pd.DataFrame(rows).astype(dict.fromkeys(numbers[1:], float))
    machine, first = str(document.get("machine", "")), rows[0]
    return ProfileResults(machine, str(first["model"]), str(first["device"]), first["batch"], frame)


def build_prefill(profile: ProfileResults, published: str = "") -> Table:
    """Prefill and decode times and bytes of k and v of each method, by context length (Table 3).

    Args:
        profile: What was measured.
        published: A model of the paper whose prefill times are added as a group of their own.
    """
    methods = names.sort_methods(profile.frame.method)
    frame = profile.frame.assign(place=profile.frame.method.map(methods.index)).sort_values(["tokens", "place"])
    rows = []
    for row in frame.to_dict("records"):
        numbers = row | {"prefill_ratio": None if row["method"] == FULL else row["prefill_ratio"] - 1}
        cells = {c.name: Cell(scale * numbers[f]) for c, (f, scale) in _PREFILL.items() if pd.notna(numbers[f])}
        group, label = f"{row['tokens']:,} tokens", method_label(row["method"])
        rows.append(TableRow(row["method"], label, cells, group, row["retention"], row.get("realised")))
    title = f"Prefill and decode, {profile.model} on {profile.device}, batch {profile.batch}"
    notes = (f"Measured on {profile.machine}.", "Overhead and ratios are to the full cache in the same run.")
    table = make_table("prefill", title, list(_PREFILL), rows, notes=notes, group_title="context")
    if not published:
        return table
    paper, name = names.paper_numbers()["prefill"].get(published), names.paper_models()[published]
    if paper is None:
        raise ReportError(f"the paper prints no prefill times with {name}; use --published llama-3.1-8b.")
    group, rows = f"{paper['context']} tokens, {name} on {paper['device']} ({PUBLISHED})", []
    for method, (seconds, overhead) in paper["rows"].items():
        cells = {"prefill, s": Cell(seconds)} | ({} if overhead is None else {"overhead, %": Cell(overhead)})
        retention = 1.0 if method == FULL else paper["retention"]
        label = f"{method_label(method)} ({PUBLISHED})"
        rows.append(TableRow(method, label, cells, group, retention, source=PUBLISHED))
    costs = ", ".join(f"{method_label(method)} {cost}" for method, cost in paper["complexity"].items())
    memory = names.paper_numbers()["memory"][published]
    reached = ", ".join(f"{method_label(method)} {tokens}" for method, tokens in memory["reached"].items())
    return add_rows(
        table,
        rows,
        f"Cost of selection as the paper gives it (T tokens, W observed): {costs}.",
        f"Context that fits in memory as the paper gives it ({memory['device']}): {reached}.",
    )
