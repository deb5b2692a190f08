"""Replace rows of a result by those measured again: with another policy, or with methods whose code was fixed.

python -m benchmarks.renewed NEW.json                    (writes benchmarks/results/NAME.json, NAME that of NEW.json)
python -m benchmarks.renewed NEW.json --mended METHOD... (replaces only these methods' rows that NEW.json has)

All other rows stay. Rows that both files have of methods that did not change must agree: otherwise NEW.json was
measured on other texts or with another program, and is refused.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS
from lkv.errors import DataError
from lkv.methods.registry import FULL, parse_method
from lkv.utils.results import write_results

_KEYS = ("method", "variant", "task", "tokens", "needles", "retention")
_TOLERANCE = {"value": 1e-3, "kl": 1e-4}  # differences between machines, or 0.3%; scores go up to 100
_PAIRED = ("against", "difference")  # compare with a row of the earlier policy
_MEASURED = ("date", "machine", "versions")

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("new", type=Path)
    parser.add_argument("--name", default=None, help="of the result (default: NEW's)")
    parser.add_argument("--mended", nargs="+", default=[], help="methods whose code was fixed, under the same policy")
    options = parser.parse_args()
    new = json.loads(options.new.read_text(encoding="utf-8"))
    path = RESULTS / f"{options.name or new['name']}.json"
    old = json.loads(path.read_text(encoding="utf-8"))
    if old["seed"] != new["seed"]:
        raise DataError(f"{path} has seed {old['seed']}, but {options.new} has {new['seed']}; measure with one seed.")
    if options.mended and old["policy"] != new["policy"]:
        raise DataError(f"{path} and {options.new} have different policies; measure with that of the former.")
    rows = merge_rows(old["rows"], new["rows"], options.mended)
    if options.mended:
        before = old.get("mended", {"methods": [], "tokens": []})
        details = {name: value for name, value in old.items() if name not in ("name", "rows", "seed", "command")}
        details["mended"] = {name: new[name] for name in _MEASURED} | {
            "methods": sorted({*options.mended, *before["methods"]}),
            "tokens": sorted({row["tokens"] for row in new["rows"]} | set(before["tokens"])),
        }
    else:
        details = {name: new[name] for name in (*_MEASURED, "policy")}
        if kept := sorted({row["method"] for row in old["rows"]} - {row["method"] for row in new["rows"]}):
            earlier = old.get("kept", old)
            details["kept"] = {"methods": kept, **{name: earlier[name] for name in _MEASURED}}
    write_results(path, old["name"], rows, old["seed"], old["command"], details)


def merge_rows(old: Sequence[Row], new: Sequence[Row], fixed: Sequence[str] = ()) -> list[Row]:
    """`old` with the rows of `new` in their places: of the methods `fixed` only, or else of all methods.

    Without `fixed`, all rows of methods that read a policy must be in `new`. Raises DataError where the files cannot be
    of one measurement.
    """
    places = {_key(row): row for row in new}
    if len(places) < len(new):
        raise DataError("the new result has several rows of one key; measure all of it again.")
    replaced = {key for key, row in places.items() if not fixed or row["method"] in fixed}
    missing = replaced - {_key(row) for row in old}
    if missing or not replaced:
        name = sorted(missing, key=str)[0] if missing else fixed
        raise DataError(f"the old result has no row of {name}; measure all of it again.")
    methods = {row["method"] for row in new}
    rows = []
    for row in old:
        found, reads_policy = places.get(_key(row)), _reads_policy(row["method"])
        if found is None and not fixed and (row["method"] in methods or reads_policy):
            raise DataError(f"the new result has no row of {_key(row)}, which reads a policy; measure that too.")
        if found is not None and (row["method"] not in fixed if fixed else not reads_policy):
            _check_same(row, found)
        if fixed:
            rows.append(found if found is not None and row["method"] in fixed else row)
        else:
            rows.append(found or {name: row[name] for name in row if not name.startswith(_PAIRED)})
    return rows


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _KEYS)


def _reads_policy(method: str) -> bool:
    """Whether `method` reads the policy that changed; the paper's is another one."""
    return method not in (FULL, "lkv-paper") and parse_method(method).needs_policy


def _check_same(old: Row, new: Row) -> None:
    for name, tolerance in _TOLERANCE.items():
        before, after = old.get(name), new.get(name)
        if before is not None and after is not None and abs(before - after) > max(tolerance, 3e-3 * before):
            raise DataError(
                f"{name} of {_key(old)}, which did not change, was {before} and is {after}: these results are not of "
                "the same texts and program; measure all of it again."
            )


if __name__ == "__main__":
    main()
