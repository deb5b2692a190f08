"""Measure another policy in result files that are there: again the methods that read it, the others as they are.

python -m experiments.remeasure NAME... --data EVAL_FOLDER --policy FOLDER    (NAME.json of experiments/results)

Each file's own command is run with the methods that read a policy. Rows of the other methods stay and are named under
"kept" with their date, machine and versions. What only one run of both methods can give goes: differences to LKV's
samples. So do rows with a policy that the command does not make. It resumes: measured files stay in --work.

A policy with the paper's scorer is measured as LKV alone: its rows take the place of those of "lkv-paper". With
--methods, these are measured instead, and named under "again" with their date, machine and versions; with all methods
of a file it is made anew, which it has to be where another machine's full cache is good at other tasks.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.common import PAPER_SCORER, RESULTS, method_of, plain_name
from experiments.report.names import FULL
from lkv.errors import LkvError, ReportError
from lkv.methods.registry import parse_method
from lkv.policy.policy import Policy
from lkv.utils.files import write_text

_PROVENANCE = ("date", "machine", "versions")
# What tells a row from others of its file, as far as it has them.
_KEYS = ("task", "needles", "tokens", "method", "variant", "retention", "memory", "protect")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", help="of the command, to be measured again (default: see above)")
    parser.add_argument("--model", help="folder or GGUF file (default: as the file's command has it)")
    parser.add_argument("--work", type=Path, default=Path("runs-local/remeasure"))
    options = parser.parse_args()
    policy = Policy.from_pretrained(options.policy)
    work = options.work / "-".join([policy.digest()[:12], *(options.methods or [])])
    work.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        path = RESULTS / f"{name}.json"
        document = json.loads(path.read_text(encoding="utf-8"))
        measured = work / f"{name}.json"
        if not measured.is_file():
            _measure(document["command"], measured, options, policy.inputs.is_paper)
        results = json.loads(measured.read_text(encoding="utf-8"))
        if {method_of(row) for row in document["rows"]} <= {FULL, *(options.methods or ())}:
            merged = measured_anew(document, results)
        elif options.methods:
            merged = merge_methods(document, results, options.methods)
        else:
            merged = (merge_paper_scorer if policy.inputs.is_paper else merge)(document, results)
        write_text(path, json.dumps(merged, indent=1) + "\n", LkvError, "the results")
        print(f"{path}: {len(merged['rows'])} rows")


def _measure(command: str, out: Path, options: argparse.Namespace, is_paper: bool) -> None:
    """Run a result file's command with the methods that read a policy."""
    run, documents = lambda *words: subprocess.run([sys.executable, *words], check=True), []
    for number, line in enumerate(command.split("; ")):
        words = command_for(line, options.data, options.policy, options.model, is_paper, options.methods)
        part = out.with_name(f"{out.stem}-{number}.json")
        if words[0] == "lkv":  # writes a journal, of which experiments.evaluations makes rows
            journal = str(part.with_suffix(".jsonl"))
            run("-m", *words, "--out", journal)
            words = ["python", "-m", "experiments.evaluations", journal]
        run(*words[1:], "--out", str(part))
        documents.append(json.loads(part.read_text(encoding="utf-8")))
    rows = [row for document in documents for row in document["rows"]]
    write_text(out, json.dumps({**documents[-1], "rows": rows}, indent=1) + "\n", LkvError, "the results")


def command_for(
    command: str,
    data: Path,
    policy: Path,
    model: str | None = None,
    is_paper: bool = False,
    methods: Sequence[str] | None = None,
) -> list[str]:
    """The words of a result file's command for this data and policy, with `methods` alone.

    By default those that read a policy; of these, only LKV itself for a policy with the paper's scorer.
    """
    words, reads_policy = list[str](), not command.startswith("lkv ")  # `lkv eval` refuses one that no method reads
    for option, values in _grouped(shlex.split(command)):
        if option == "--methods":
            if methods:
                values = [name for name in values if name in methods]
            else:
                values = [name for name in values if (name == "lkv" if is_paper else parse_method(name).needs_policy)]
            if not values:
                raise ReportError(f"`{command}` has no such method; there is nothing to measure again.")
            reads_policy |= any(name != FULL and parse_method(name).needs_policy for name in values)
        elif option == "--data":
            values = [str(data)]
        elif option == "--model" and model:
            values = [model]
        elif option == "--pattern":  # which no method with a policy reads
            continue
        words += [*([option] if option else []), *values]
    return [*words, "--policy", str(policy)] if reads_policy else words


def _grouped(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each option with its values; the words before the first one under ""."""
    groups: list[tuple[str, list[str]]] = [("", [])]
    for word in words:
        if word.startswith("--"):
            groups.append((word, []))
        else:
            groups[-1][1].append(word)
    return groups


def merge(earlier: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """The result `earlier` with the rows that were measured again, in its order.

    Raises ReportError if the samples are not the same.
    """
    new, old = _by_key(measured["rows"]), _by_key(earlier["rows"])
    _check_samples(new, old)
    rows = [new.get(_key(row)) if _reads_policy(row) else _without_differences(row) for row in earlier["rows"]]
    rows += [row for key, row in new.items() if key not in old and row["method"] != FULL]
    described = {FULL, *earlier.get("again", ()), *([PAPER_SCORER] if PAPER_SCORER in earlier else [])}
    plain = [row for row in old.values() if not _reads_policy(row) and method_of(row) not in described]
    others = sorted({row["method"] for row in plain})
    document = {key: value for key, value in earlier.items() if key != "kept"}
    document |= {key: measured[key] for key in (*_PROVENANCE, "policy")}
    if others:
        provenance = earlier.get("kept", earlier)
        earlier_names = {plain_name(name) for name in provenance.get("methods", others)}
        later = [name for name in others if plain_name(name) not in earlier_names]
        document["kept"] = {"methods": others, **{key: provenance[key] for key in _PROVENANCE}}
        if later:  # measured beside the policy of that time
            document["kept"]["later"] = {"methods": later, **{key: earlier[key] for key in _PROVENANCE}}
    del document["rows"]
    return {**document, "rows": [row for row in rows if row]}


def merge_paper_scorer(earlier: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """The result `earlier` with LKV's rows of `measured` as those of the paper's scorer.

    Raises ReportError if the samples are not the same.
    """
    old = _by_key(earlier["rows"])
    _check_samples(_by_key(measured["rows"]), old)
    new = _by_key([row | {"method": PAPER_SCORER} for row in measured["rows"] if row["method"] == "lkv"])
    rows = [new.get(_key(row)) if row["method"] == PAPER_SCORER else row for row in earlier["rows"]]
    rows += [row for key, row in new.items() if key not in old]
    document = {**earlier, PAPER_SCORER: {key: measured[key] for key in (*_PROVENANCE, "policy")}}
    if "kept" in document:
        document["kept"] = _without(document["kept"], [PAPER_SCORER])
    del document["rows"]
    return {**document, "rows": [row for row in rows if row]}


def merge_methods(earlier: dict[str, Any], measured: dict[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """The result `earlier` with the rows of `methods` that were measured again, named under "again".

    Raises ReportError if the samples are not the same.
    """
    new = _by_key(measured["rows"])
    _check_samples(new, _by_key(earlier["rows"]))
    rows = [new.get(_key(row)) if method_of(row) in methods else row for row in earlier["rows"]]
    provenance = {key: measured[key] for key in _PROVENANCE}
    measured_again = sorted({method_of(row) for row in new.values()} & {*methods})
    document = {**earlier, "again": earlier.get("again", {}) | dict.fromkeys(measured_again, provenance)}
    if "kept" in document:
        document["kept"] = _without(document["kept"], methods)
    del document["rows"]
    return {**document, "rows": [row for row in rows if row]}


def measured_anew(earlier: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """The result `earlier`, of which all methods were measured again."""
    described = {key: measured[key] for key in (*_PROVENANCE, "policy") if key in measured}
    return {**{key: earlier[key] for key in ("name", "command", "seed")}, **described, "rows": measured["rows"]}


def _without(provenance: dict[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """What a file says of earlier rows, without those of `methods`, whatever their precision."""
    others = {**provenance, "methods": [name for name in provenance["methods"] if plain_name(name) not in methods]}
    later = _without(others.pop("later"), methods) if "later" in others else {"methods": []}
    return others | ({"later": later} if later["methods"] else {})


def _check_samples(new: dict[tuple[Any, ...], Any], old: dict[tuple[Any, ...], Any]) -> None:
    for key, row in new.items():
        if row["method"] == FULL and key in old and any(old[key].get(n) != row.get(n) for n in ("n", "contexts")):
            raise ReportError(
                f"{key} was measured on other samples: {old[key]}, {row}; give all its methods as --methods."
            )


def _by_key(rows: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    by_key = {_key(row): row for row in rows}
    if len(by_key) < len(rows):
        raise ReportError(
            "two rows of one file are of the same method, task, length and budget; tell them apart in _KEYS."
        )
    return by_key


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _KEYS)


def _reads_policy(row: dict[str, Any]) -> bool:
    """Whether a row's method, without its precision, reads the policy; those of the paper's scorer read another."""
    with suppress(LkvError):
        return parse_method(method_of(row)).needs_policy
    return False


def _without_differences(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith("difference") and key != "against"}


if __name__ == "__main__":
    main()
