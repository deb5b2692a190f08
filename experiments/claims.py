"""The page Claims: what the paper says and what was found here, by the figures of the result files.

`claims.json` states each claim of the paper with the figures that it is held against: rows of result files by their
keys, and comparisons of them, from which the verdict follows. `python -m experiments.readme` writes the page.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.common import RESULTS, method_of
from experiments.data.hub import HUB_SOURCES
from experiments.data.loom import NEXT_CODE
from experiments.tables import KVZIP_KEEPS_FIRST, date_of, document, interval, read, table
from lkv.methods.registry import find_method
from lkv.policy.shipped import card_stages, shipped_policies
from lkv.training.config import TrainingConfig
from lkv.training.cost import CALIBRATION_SAMPLES
from lkv.training.trainer import ADAMW_BETAS

CLAIMS = Path(__file__).with_name("claims.json")
HELD, UNCLEAR, PARTLY, NOT_HELD = "held", "undecided", "held in part", "did not hold"
BY_TESTS, NOT_TESTABLE = "held, by tests", "not testable here"
_EXACT_UNITS = ("ratio of bytes", "items", "tokens of the longest prompt")  # what is counted needs no interval
_COMPARISON = re.compile(r"(\w+) ([<>]) (?:([\d.]+) )?(\w+)")


class Figure(NamedTuple):
    """A figure of a result file, with the bounds of its interval: of no width for what is counted or has none."""

    file: str
    row: dict[str, Any]
    value: float
    low: float
    high: float
    digits: int
    is_certain: bool

    def __str__(self) -> str:
        text = f"{self.value:.{self.digits}f}"
        return text if self.low == self.high else f"{text} [{self.low:.{self.digits}f}, {self.high:.{self.digits}f}]"


def read_figure(file: str, wanted: Mapping[str, Any], key: str = "value", digits: int | None = None) -> Figure:
    """The figure `key` of the one row of a result file that has the values `wanted`. Raises ValueError for another
    number of rows."""
    rows = read(file, **wanted)
    if len(rows) != 1:
        raise ValueError(f"{len(rows)} rows of {file}.json have {dict(wanted)}; name one.")
    (row,) = rows
    bounds = ("low", "high") if key == "value" else (f"{key}_low", f"{key}_high")
    low, high = (row[bound if bound in row else key] for bound in bounds)
    has_interval = row.get("n") != 1 and bounds[0] in row
    if digits is None:
        digits = 1 if "score" in row.get("unit", "") and key == "value" else 3
    return Figure(file, row, row[key], low, high, digits, has_interval or row["unit"].startswith(_EXACT_UNITS))


def figures_of(claim: Mapping[str, Any]) -> dict[str, Figure]:
    """The figures of a claim by their names in its text."""
    return {name: read_figure(*at) for name, at in claim.get("figures", {}).items()}


def verdict(claim: Mapping[str, Any]) -> str:
    """What became of a claim: its comparisons decide, where it has any."""
    if "tests" in claim:
        return BY_TESTS
    if "holds" not in claim:
        return NOT_TESTABLE
    outcomes = [_compare(comparison, figures_of(claim)) for comparison in claim["holds"]]
    if set(outcomes) == {HELD}:
        return HELD
    if NOT_HELD not in outcomes:
        return UNCLEAR
    return PARTLY if HELD in outcomes else NOT_HELD


def _compare(comparison: str, figures: Mapping[str, Figure]) -> str:
    """The verdict on "a < 0.5 b" or "a > 1".

    It is undecided where the intervals overlap, or where it is true but a figure has no interval.
    """
    match = _COMPARISON.fullmatch(comparison)
    if not match:
        raise ValueError(f"{comparison!r} is no comparison; write it as 'a < b', 'a < 0.5 b' or 'a > 1'.")
    left, factor = figures[match[1]], float(match[3] or 1)
    right = _constant(float(match[4])) if match[4].isdecimal() else figures[match[4]]
    sign = 1 if match[2] == "<" else -1
    if left.is_certain and right.is_certain:
        if left.low <= factor * right.high and factor * right.low <= left.high:
            return UNCLEAR
        return HELD if sign * (left.value - factor * right.value) < 0 else NOT_HELD
    return UNCLEAR if sign * (left.value - factor * right.value) < 0 else NOT_HELD


def _constant(value: float) -> Figure:
    return Figure("", {}, value, value, value, 0, True)


def claims_page() -> str:
    """docs/claims.md."""
    claims = json.loads(CLAIMS.read_text(encoding="utf-8"))["claims"]
    counts = Counter(map(verdict, claims))
    order = (HELD, BY_TESTS, UNCLEAR, PARTLY, NOT_HELD, NOT_TESTABLE)
    summary = "; ".join(f"{counts[kind]} {kind}" for kind in order if counts[kind])
    return "\n\n".join(
        [
            "# Claims",
            "What the paper says of its 8-billion models, and what was found on two small ones, SmolLM2-135M-Instruct "
            "and Qwen2.5-Coder-0.5B-Instruct, on a CPU. The paper's own models were not run "
            "([scripts](../experiments/runs/README.md)), so nothing here contradicts its tables: a claim "
            "that did not hold did not hold at this size. KL is that of the compressed cache's predictions to the full "
            "cache's, in nats a token, lower is better; scores are of 100; brackets are 95% intervals. LKV is "
            "the shipped policy, whose scorer has more inputs than the paper's, unless it says otherwise; where "
            "no model is named it is SmolLM2, the "
            "only one on which LongBench and the grid of Table 2 were run.",
            f"Of {len(claims)} claims: {summary}. A verdict follows from the figures by the comparisons in "
            "`experiments/claims.json`. Undecided: the 95% intervals overlap, whichever way the means point, or a "
            "figure that supports the claim has none, so that these measurements show no difference.",
            table(["where", "verdict", "figures", "files"], _claim_lines(claims), "claim"),
            *training(),
            "## What is the paper's and what is ours",
            "The preset `paper`, the recipe `loom` and what stands beside them, where the paper leaves something open "
            "or this package differs. What is not in this table is as the paper has it.",
            table(["the paper", "here"], deviations()),
        ]
    ) + "\n"  # fmt: skip


def _claim_lines(claims: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for claim in claims:
        figures = figures_of(claim)
        text = claim.get("evidence", "").format_map(figures)
        if "takes" in claim:
            text = f"It takes {claim['takes']}."
        remark = " ".join(part for part in (claim.get("remark", ""), _earlier_kvzip(figures.values())) if part)
        text = ". ".join(part for part in (text, remark) if part)
        files = dict.fromkeys(f"{figure.file}.json" for figure in figures.values())
        names = ", ".join(f"`{name}`" for name in [*files, *claim.get("tests", ())])
        yield [claim["claim"], claim["where"], verdict(claim), text, names]


def _earlier_kvzip(figures: Iterable[Figure]) -> str:
    """A sentence where some figures are of KVzip as it was before."""
    methods = [(method_of(figure.row), figure.file) for figure in figures]
    is_earlier = any(
        spec.selector == "kvzip" and date_of(method, file) < KVZIP_KEEPS_FIRST
        for method, file in methods
        if (spec := find_method(method))
    )
    return "KVzip was measured before it kept the first four tokens, which improved it." * is_earlier


def training() -> list[str]:
    """The paper's training, scaled down: the curve of each run, and its policy beside the shipped ones."""
    path = RESULTS / "paper_training.json"
    if not path.is_file():
        return []
    results = document(path.stem)
    held_out = [row for row in results["rows"] if row["what"] == "held out"]
    columns = list(dict.fromkeys((row["texts"], row["tokens"], row["retention"]) for row in held_out))
    lines: dict[str, list[str]] = {}
    for row in held_out:
        lines.setdefault(row["method"], [row["method"]]).append(interval(row))
    parts = ["## The paper's training, scaled down"]
    first, *others = results["runs"].items()
    parts.append(_whole_run(first[0], first[1], results["rows"]))
    for name, about in others:
        settings, base = about["training"], first[1]["training"]
        changed = " and ".join(f"{key} {settings[key]}" for key in settings if settings[key] != base[key])
        parts.append(f"`{name}`: the same with {changed}. Held-out KL: {_curve(name, results['rows'])}.")
    head = [f"{texts}, {tokens:,} tokens, R = {retention:g}" for texts, tokens, retention in columns]
    counts = " or ".join(map(str, sorted({row["n"] for row in held_out})))
    lead = (
        f"KL to the full cache on {counts} held-out contexts of the training sets (`paper_training.json`): "
        "`loom`, as these runs were trained; `mixture`, as the shipped policies, here the ones before."
    )
    return [*parts, lead, table(head, lines.values(), "policy")]


def _whole_run(name: str, about: dict[str, Any], rows: list[dict]) -> str:
    settings, dropped = about["training"], sum((about["dropped"] or {}).values())
    contexts = settings["steps"] * settings["batch"]
    own = {key: f"{value:,g}" if isinstance(value, int | float) else value for key, value in settings.items()}
    text = (
        "`{0}`: preset `paper` in {steps} steps, contexts a step {batch}, of {min_tokens} to {max_tokens} tokens "
        "(the paper: 1,000 steps, 64 of 2,000 to 16,000), k {key}, R {retention_start} to {retention_end}, "
        "temperature {tau_start} to {tau_end}, no warm start; Loom-like data, {1} items that overlap with "
        "evaluated texts left out, but not {4:,} short questions of TREC inside evaluated texts. Held-out KL at "
        "R = {retention_end} by steps: {2}. {3:,} contexts in all, where the paper reads 64,000: this shows the "
        "schedule at work, not what it reaches. The policy is not shipped."
    )
    trec = read("overlap", set="trec")[0]["value"] - about["dropped"]["trec"]
    return text.format(name, dropped, _curve(name, rows), contexts, trec, **own)


def _curve(run: str, rows: list[dict]) -> str:
    steps = [row for row in rows if row["what"] == "curve" and row["run"] == run]
    return ", ".join(f"{row['validation_kl']:.3f} after {row['step']:,}" for row in steps)


def _shipped_training() -> dict[str, str]:
    """R and temperature in all stages of the shipped policies, and more of the one with the paper's scorer, by card."""
    stages = {
        entry.name: [own["training"] for own in card_stages(entry.card) if "training" in own]
        for entry in shipped_policies()
    }
    every = [stage for own in stages.values() for stage in own]
    low, high = (min(stage["retention_low"] for stage in every), max(stage["retention_high"] for stage in every))
    hot, cold = (max(stage["tau_start"] for stage in every), min(stage["tau_end"] for stage in every))
    paper = next(stages[entry.name] for entry in shipped_policies() if entry.has_paper_scorer)
    shortest, longest = min(stage["min_tokens"] for stage in paper), max(stage["max_tokens"] for stage in paper)
    return {
        "shipped_retention": f"{low:g} to {high:g}", "shipped_tau": f"{hot:g} to {cold:g}",
        "paper_contexts": str(sum(stage["steps"] * stage["batch"] for stage in paper)),
        "paper_tokens": f"{shortest:,} to {longest:,}",
        "paper_warmup": str(max(stage["warmup_contexts"] for stage in paper)),
    }  # fmt: skip


def deviations() -> list[list[str]]:
    """(what, the paper, here) of every deviation, with the settings of preset `paper` as they are."""
    config, stack = TrainingConfig(), HUB_SOURCES["the_stack"]
    named = (
        vars(config)
        | {
            "betas": " and ".join(map(str, ADAMW_BETAS)),
            "calibration": CALIBRATION_SAMPLES,
            "stack_files": stack.files,
            "next_code": NEXT_CODE,
            "schedule_retention": f"{config.retention_start:g} to {config.retention_end:g}",
            "schedule_tau": f"{config.tau_start:g} to {config.tau_end:g}",
        }
        | _shipped_training()
    )
    rows = json.loads(CLAIMS.read_text(encoding="utf-8"))["deviations"]
    return [[what, *(text.format_map(named) for text in texts)] for what, *texts in rows]
