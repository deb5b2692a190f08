"""How a memory budget is best spent on precisions: the table of a policy's card, measured on held-out training text.

python -m experiments.tiers --data FOLDER [--policy FOLDER --write]    (the first FOLDER is that of training)

--write puts the table into the policy that --policy names, and is refused without it before anything is measured.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from experiments.common import SUBJECT, parse_options, per_length, run_cases, subject_of
from experiments.fidelity import measure_in_turn
from lkv.errors import LkvError
from lkv.evaluation.comparison import MethodGrid
from lkv.hf.prompt_kv import read_prompt
from lkv.methods.targets import Precision, TierTable
from lkv.policy.policy import Policy
from lkv.training.data.mixture import Mixture
from lkv.training.data.samples import TokenizedSample, tokenize_sample

SPREAD = 0.1  # of lengths around the one that is asked for
CONTINUATION = 80
# Bits a value at which ways to spend them are compared: 3%, 5%, 10%, 15%, 20% and 30% of a 16-bit cache.
BITS = (0.48, 0.8, 1.6, 2.4, 3.2, 4.8)
_HIGH, _MIXED, _MIDDLE, _LOW = Precision(8, 8), Precision(8, 4), Precision(4, 4), Precision(4, 3)
CANDIDATES = (
    TierTable.single(_HIGH),
    TierTable(((0.0, ((_HIGH, 0.3), (_MIDDLE, 0.7))),)),
    TierTable(((0.0, ((_HIGH, 0.3), (_LOW, 0.7))),)),
    TierTable(((0.0, ((_MIXED, 0.3), (_LOW, 0.7))),)),
    TierTable.single(_MIXED),
    TierTable.single(_MIDDLE),
    TierTable.single(_LOW),
)


@torch.no_grad()
def measure_tiers(
    model: Any, policy: Policy, samples: Iterable[TokenizedSample], bits: Sequence[float] = BITS
) -> Iterator[dict[tuple[float, TierTable], float]]:
    """For each sample KL(full || compressed), in nats a token, of each budget (in bits a value) and candidate."""
    tables = {str(number): table for number, table in enumerate(CANDIDATES)}
    grid = MethodGrid(model, None, ["lkv"], [budget / 16 for budget in bits], policy, tier_tables=tables)
    for sample in samples:
        prompt = read_prompt(model, torch.tensor([sample.context], device=model.device))
        rows, _ = grid.bind(sample.context, prompt)
        measured = measure_in_turn(model, sample.context, prompt, rows, sample.continuations)
        means = [mean(each.kl for each in found) for _, found in measured]
        yield dict(zip(product(bits, CANDIDATES), means, strict=True))


def best_table(measured: Sequence[dict[tuple[float, TierTable], float]]) -> TierTable:
    """The table with the way of the least KL (its mean logarithm over samples) at each budget.

    A way holds from the geometric mean of its first budget and the one before: a budget is looked up without the few
    bits that all entries share, and so lies below the number that was measured.
    """
    rows: list[Any] = []
    budgets = sorted({budget for budget, _ in measured[0]})
    for before, budget in zip([0.0, *budgets], budgets, strict=False):
        scores = {table: sum(math.log(max(1e-6, sample[budget, table])) for sample in measured) for table in CANDIDATES}
        ((_, row),) = min(scores, key=lambda table: scores[table]).rows
        if not rows or rows[-1][1] != row:
            rows.append((math.sqrt(before * budget) if rows else 0.0, row))
    return TierTable(tuple(rows))


def main() -> None:
    options = parse_options(
        __doc__, "tiers", "of training files", **SUBJECT, tokens=[1000, 2000, 4000], contexts=[6, 3, 1], bits=[*BITS],
        seed=7, write=False, out=Path,
    )  # fmt: skip
    if options.write and options.policy is None:
        raise LkvError("--write puts the table into a policy's folder; name that folder with --policy.")
    contexts, subject = per_length(options.tokens, options.contexts), subject_of(options, "tiers")
    bounds = {tokens: (int(tokens * (1 - SPREAD)), int(tokens * (1 + SPREAD))) for tokens in contexts}
    mixtures = {tokens: Mixture(options.data, own).held_out(options.seed) for tokens, own in bounds.items()}
    cases = {f"{tokens}-{number}": (tokens, number) for tokens, count in contexts.items() for number in range(count)}

    def measure_case(tokens: int, number: int) -> dict[str, Any]:
        for index in range(number * 100, (number + 1) * 100):
            text = mixtures[tokens].sample(index, 3)
            sample = tokenize_sample(text, subject.tokenizer, bounds[tokens][1], CONTINUATION)
            # Texts that are too short, or have nothing to continue, are passed over.
            if sample.continuations and len(sample.context) > 0.7 * tokens:
                break
        (measured,) = measure_tiers(subject.model, subject.policy, [sample], options.bits)
        rows = [[budget, table.to_json(), kl] for (budget, table), kl in measured.items()]
        return {"source": sample.source, "tokens": len(sample.context), "rows": rows}

    def rows_of_samples(samples: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        measured = [{(b, TierTable.from_json(t)): kl for b, t, kl in sample["rows"]} for sample in samples.values()]
        rows = []
        for budget, table in measured[0]:
            kl = [sample[budget, table] for sample in measured]
            geometric = math.exp(sum(math.log(max(1e-6, x)) for x in kl) / len(kl))
            rows.append({"bits": budget, "tiers": table.to_json()[0][1], "kl": geometric, "n": len(kl)})
            print(f"{budget:5} bits a value {rows[-1]['tiers']}: {geometric:.4f}")
        print(best_table(measured).to_json())
        return [*rows, {"model": subject.name, "table": best_table(measured).to_json()}]

    rows = run_cases("experiments.tiers", options, "tiers", cases, measure_case, rows_of_samples, subject.policy)
    if options.write:
        subject.policy.card["tiers"] = rows[-1]["table"]
        subject.policy.save_pretrained(options.policy, half=True)


if __name__ == "__main__":
    main()
