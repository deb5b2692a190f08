"""Fidelity by memory: KL(full || compressed) and top-1 agreement at equal bytes, each method with several precisions.

python -m experiments.memory --data FOLDER    (FOLDER is the evaluation folder; writes memory.json and its figure)
python -m experiments.memory --data FOLDER --model NAME

A budget is a share of the bytes of a 16-bit cache, whatever dtype the model computes in: an entry that is not quantised
counts 16 bits a value, also where the model computes in float32. Every method is measured in tiers, and with all its
entries in 16, 8 and 4 bits, and in FP8. --full-table has all budgets and precisions for every method, else only LKV
has, and LKV with compensation in tiers. --tiers-only leaves the other precisions out, and the figure.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.common import SUBJECT, Subject, parse_options, subject_of
from experiments.fidelity import Sample, Samples, fidelity_row, measure_in_turn, run_by_length
from experiments.heldout import Continuations, cut_targets
from experiments.length import TASKS
from experiments.report.figures import draw_kl, finish_figure, method_styles, new_figure, save_figure, scale_by_factors
from experiments.report.names import method_label
from lkv.evaluation.comparison import MethodGrid
from lkv.hf.prompt_kv import read_prompt
from lkv.kernels import FP8
from lkv.methods.targets import DEFAULT_TABLE, Precision, TierTable

METHODS = ["lkv", "lkv+compensation", "kvzip", "snapkv", "lkv-h+expected"]
SINGLE = [Precision(bits, bits) for bits in (16, 8, FP8, 4)]
TABLES = {"": DEFAULT_TABLE} | {str(precision): TierTable.single(precision) for precision in SINGLE}
UNQUANTIZED_ROW = "(16 bits)"
COMPARED = (0.15, 0.05)  # the budgets of methods other than LKV


def main() -> None:
    options = parse_options(
        __doc__, "memory", "of evaluation files", **SUBJECT, methods=METHODS, tokens=[1000, 2000, 4000, 7800],
        memory=[0.3, 0.15, 0.1, 0.05, 0.03], contexts=[2], tasks=TASKS, seed=0, full_table=False, tiers_only=False,
        out=Path,
    )  # fmt: skip
    subject = subject_of(options, "memory")
    dtype, tables = subject.model.dtype, {"": DEFAULT_TABLE} if options.tiers_only else TABLES
    shares = [share * own_share(name, dtype) for name in ("", UNQUANTIZED_ROW) for share in options.memory]
    shares = [share for share in shares if share <= 1]
    grid = MethodGrid(subject.model, subject.tokenizer, options.methods, shares, subject.policy, tier_tables=tables)

    def is_measured(name: str, share: float) -> bool:
        in_full = options.full_table or name.split(" ")[0] == "lkv" or name == "lkv+compensation"
        budgets = options.memory if in_full else COMPARED if "(8 " not in name else ()
        return share in {budget * own_share(name, dtype) for budget in budgets}

    grid = grid.select(frozenset(pair for pair in grid.pairs if is_measured(*pair)))
    rows = run_by_length(
        "experiments.memory", options, "memory", subject,
        lambda ids, continuations: measure(subject, grid, ids, cut_targets(continuations)), summarise,
    )  # fmt: skip
    if not options.tiers_only:
        draw(rows, options.out.parent / "small" / f"{options.out.stem}.png")


@torch.no_grad()
def measure(subject: Subject, grid: MethodGrid, ids: list[int], continuations: Continuations) -> Sample:
    """KL and agreement of each method and budget over each continuation, and the share of bytes that each holds."""
    model = subject.model
    prompt = read_prompt(model, torch.tensor([ids]), queries=True)
    rows, skipped = grid.bind(ids, prompt)
    full_nbytes = sum(2 * (layer.key.numel() + layer.value.numel()) for layer in prompt)  # in 16 bits a value
    sample: Sample = {"tokens": len(ids), "rows": [], "held": [], "kept": [], "measured": [[] for _ in continuations]}
    for row, (comparison, found) in zip(
        rows[1:], measure_in_turn(model, ids, prompt, rows, continuations), strict=True
    ):
        scale = own_share(row.name, model.dtype)
        sample["rows"].append([row.name, round(row.retention / scale, 4)])
        sample["held"].append(comparison.nbytes() / full_nbytes / scale)
        sample["kept"] += comparison.realised_retentions()
        for measured, fidelity in zip(sample["measured"], found, strict=True):
            measured.append([fidelity.kl, fidelity.agreement])
    reasons = [[each.method, each.retention / own_share(each.method, model.dtype), each.reason] for each in skipped]
    return sample | {"skipped": reasons}


def own_share(name: str, dtype: torch.dtype) -> float:
    """The share of the 16-bit cache's bytes in `dtype` for each share that a row stands for.

    Unquantised rows keep the entries that would fit in 16 bits, and hold them in `dtype`.
    """
    return dtype.itemsize / 2 if name.endswith(UNQUANTIZED_ROW) else 1.0


def summarise(samples: Samples) -> list[dict]:
    """Rows by method, budget and length."""
    groups: dict[tuple[int, str, float], list[tuple[Sample, int]]] = {}
    for _, tokens, sample in samples:
        for index, (method, memory) in enumerate(sample["rows"]):
            groups.setdefault((tokens, method, memory), []).append((sample, index))
    rows = []
    for (tokens, method, memory), members in sorted(groups.items()):
        row: dict[str, Any] = {"method": method, "tokens": tokens, "memory": memory}
        row |= {name: sum(s[name][i] for s, i in members) / len(members) for name in ("held", "kept")}
        rows.append(row | fidelity_row(members))
        line = f"n {rows[-1]['n']:4} kl {rows[-1]['kl']:.4f} agreement {rows[-1]['agreement']:.3f}"
        print(f"{tokens:6} {method:28} memory {memory:5} held {row['held']:.4f} {line}")
    return rows


def best_precisions(rows: Sequence[dict]) -> list[dict]:
    """Of each method, length and budget the row with the least KL, called by the method alone.

    Only precisions in which every method of that length and budget was measured count, so that no method has more to
    choose from than another.
    """
    groups: dict[tuple[int, float], dict[str, dict[str, dict]]] = {}
    for row in rows:
        method, _, precision = row["method"].partition(" (")
        groups.setdefault((row["tokens"], row["memory"]), {}).setdefault(method, {})[precision] = row
    best = []
    for methods in groups.values():
        if not (common := set.intersection(*(set(own) for own in methods.values()))):
            continue
        for method, own in methods.items():
            best.append(min((own[name] for name in common), key=lambda row: row["kl"]) | {"method": method})
    return best


def comparable_length(rows: Sequence[dict]) -> int:
    """The greatest length at which every method was measured on the same contexts: a second pass does not fit behind
    texts of nearly as many tokens as the model reads."""
    lengths = {row["tokens"] for row in rows}
    return max(length for length in lengths if len({row["contexts"] for row in rows if row["tokens"] == length}) == 1)


def draw(rows: Sequence[dict], path: Path) -> None:
    """KL over memory at the greatest length that compares all methods: each at its best of the precisions that all of a
    budget have, and LKV in 16 bits."""
    tokens = comparable_length(rows)
    here = [row for row in rows if row["tokens"] == tokens]
    lines = best_precisions(here)
    styles = method_styles(list(dict.fromkeys(row["method"] for row in lines)))
    figure, (axes,) = new_figure(6.4, 4.4)
    for method, style in styles.items():
        draw_kl(axes, [row for row in lines if row["method"] == method], "held", method_label(method), style)
    line = sorted((row for row in here if row["method"] == "lkv (16 bits)"), key=lambda row: row["memory"])
    axes.plot([r["held"] for r in line], [r["kl"] for r in line], label="LKV, 16 bits", color="0.5", linestyle=":")
    axes.set_xlabel("share of the full 16-bit cache's bytes")
    axes.set_ylabel("KL(full || compressed), nats a token")
    scale_by_factors(axes, sorted({row["memory"] for row in here}), ".0%")
    model, count = rows[0]["model"].rpartition("/")[2], max(row["n"] for row in here)
    caption = f"{model}, {tokens:,} tokens; each in its best of the precisions that all have at a budget"
    caption += f"; n = {count} continuations a point; 95% intervals"
    finish_figure(figure, [axes], "Fidelity by memory", caption)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
