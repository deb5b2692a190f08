"""Tables [L][H] of numbers in [0, 1], one for each KV head of a model, read from files."""

import math
import os
from typing import Any

from lkv.errors import BudgetError
from lkv.utils.files import as_path


def read_pattern(path: str | os.PathLike[str], layers: int, heads: int) -> list[list[float]]:
    """The alphas [L][H] of a DuoAttention pattern file (`full_attention_heads.tsv`), clipped to [0, 1].

    One line a layer, one number a KV head, separated by tabs, as published by Xiao et al. (2024). Raises BudgetError.
    """
    lines = [line for line in _text(path).splitlines() if line.strip()]
    try:
        table = [[min(1.0, max(0.0, _number(cell))) for cell in line.split("\t")] for line in lines]
    except ValueError as error:
        raise BudgetError(
            f"{path} is no table of numbers separated by tabs ({error}); give a full_attention_heads.tsv as published "
            "with DuoAttention."
        ) from None
    return check_table(table, layers, heads, str(path))


def check_table(table: Any, layers: int, heads: int, source: str) -> list[list[float]]:
    """`table` as floats if it is [L][H] numbers in [0, 1]; BudgetError, naming `source`, otherwise."""
    if not isinstance(table, list) or not all(isinstance(row, list) for row in table):
        raise BudgetError(f"{source} is no list of lists of numbers; {_wanted(layers, heads)}.")
    widths = sorted({len(row) for row in table})
    if len(table) != layers or widths != [heads]:
        stated = " or ".join(map(str, widths)) or "no"
        raise BudgetError(
            f"{source} has {len(table)} rows of {stated} numbers, but the model has {layers} layers of {heads} KV "
            f"heads; {_wanted(layers, heads)}, made for this very model."
        )
    for layer, row in enumerate(table):
        for head, value in enumerate(row):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise BudgetError(
                    f"{source} has {value!r} for layer {layer}, head {head}, but only numbers in [0, 1] are allowed; "
                    "correct it."
                )
    return [[float(value) for value in row] for row in table]


def _wanted(layers: int, heads: int) -> str:
    return f"give {layers} rows of {heads} numbers in [0, 1]"


def _number(cell: str) -> float:
    value = float(cell)
    if math.isnan(value):
        raise ValueError("nan")
    return value


def _text(path: str | os.PathLike[str]) -> str:
    try:
        return as_path(path, BudgetError, "the table's place").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BudgetError(f"{path} cannot be read ({error}); give a text file that is there.") from None
