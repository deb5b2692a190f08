"""A result measured again for another policy, where the methods that read one were measured; or for mended methods.

python -m benchmarks.renewed NEW.json                    (writes benchmarks/results/NAME.json, NAME that of NEW.json)
python -m benchmarks.renewed NEW.json --mended METHOD... (takes these methods' rows alone, as far as NEW.json has them)

The other methods' rows stay as they were. What both files hold of methods that did not change must agree: else NEW.json
is of other texts or of another program, and is refused.
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
_TOLERANCE = {"value": 1e-3, "kl": 1e-4}  # what machines differ by, or 0.3%; scores go up to 100
_OF_OTHERS = ("against", "difference")  # compares with a row of the policy before

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("new", type=Path)
    parser.add_argument("--name", default=None, help="of the result (default: NEW's)")
    parser.add_argument("--mended", nargs="+", default=[], help="methods whose code was mended, under the same policy")
    options = parser.parse_args()
    new = json.loads(options.new.read_text(encoding="utf-8"))
    path = RESULTS / f"{options.name or new['name']}.json"
    old = json.loads(path.read_text(encoding="utf-8"))
    if old["seed"] != new["seed"]:
        raise DataError(f"{path} has seed {old['seed']}, but {options.new} has {new['seed']}; measure with one seed.")
    if options.mended:
        if old["policy"] != new["policy"]:
            raise DataError(f"{path} and {options.new} are of different policies; measure with that of the former.")
        again = {name: new[name] for name in ("date", "machine", "versions")}
        before = old.get("mended", {"methods": [], "tokens": []})
        again |= {
            "methods": sorted({*options.mended, *before["methods"]}),
            "tokens": sorted({row["tokens"] for row in new["rows"]} | set(before["tokens"])),
        }
        of = {name: value for name, value in old.items() if name not in ("name", "rows", "seed", "command")}
        made = mended(old["rows"], new["rows"], options.mended)
        write_results(path, old["name"], made, old["seed"], old["command"], of | {"mended": again})
        return
    made = renewed(old["rows"], new["rows"])
    of = {name: new[name] for name in ("date", "machine", "versions", "policy")}
    kept = sorted({row["method"] for row in old["rows"]} - {row["method"] for row in new["rows"]})
    if kept:
        earlier = old.get("kept", {name: old[name] for name in ("date", "machine", "versions")})
        of["kept"] = {"methods": kept, **{name: earlier[name] for name in ("date", "machine", "versions")}}
    write_results(path, old["name"], made, old["seed"], old["command"], of)


def renewed(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """`old` with the rows of `new` in their places. Raises DataError where they cannot be of one measurement."""
    places = {_key(row): row for row in new}
    if len(places) < len(new):
        raise DataError("the new result has several rows of one key; measure all of it again.")
    if missing := {_key(row) for row in new} - {_key(row) for row in old}:
        raise DataError(f"the old result has no row of {sorted(missing, key=str)[0]}; measure all of it again.")
    methods = {row["method"] for row in new}
    rows = []
    for row in old:
        found = places.get(_key(row))
        if found is None and (row["method"] in methods or _reads_policy(row["method"])):
            raise DataError(f"the new result has no row of {_key(row)}, which reads a policy; measure that too.")
        if found is not None and not _reads_policy(row["method"]):
            _check_same(row, found)
        rows.append(found or {name: row[name] for name in row if not name.startswith(_OF_OTHERS)})
    return rows


def mended(old: Sequence[Row], new: Sequence[Row], methods: Sequence[str]) -> list[Row]:
    """`old` with those rows of `methods` that `new` has. Raises DataError where the others of both do not agree."""
    places = {_key(row): row for row in new}
    if len(places) < len(new):
        raise DataError("the new result has several rows of one key; measure all of it again.")
    of_methods = {key for key, row in places.items() if row["method"] in methods}
    if not of_methods or (missing := of_methods - {_key(row) for row in old}):
        raise DataError(f"the old result has no row of {sorted(missing, key=str)[0] if of_methods else methods}.")
    rows = []
    for row in old:
        found = places.get(_key(row))
        if found is not None and row["method"] not in methods:
            _check_same(row, found)
        rows.append(found if found is not None and row["method"] in methods else row)
    return rows


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _KEYS)


def _reads_policy(method: str) -> bool:
    """Whether `method` reads the policy that was changed: the paper's is another one."""
    return method not in (FULL, "lkv-paper") and parse_method(method).needs_policy


def _check_same(old: Row, new: Row) -> None:
    for name, tolerance in _TOLERANCE.items():
        before, after = old.get(name), new.get(name)
        if before is not None and after is not None and abs(before - after) > max(tolerance, 3e-3 * before):
            raise DataError(
                f"{name} of {_key(old)}, which reads no changed policy, was {before} and is {after}: these results are "
                "not of the same texts and program; measure all of it again."
            )


if __name__ == "__main__":
    main()
