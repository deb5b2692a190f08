"""How a memory budget is best spent on precisions: the table of a policy's card, measured on held-out training text.

python -m benchmarks.tiers --data FOLDER [--write]    (FOLDER is that of training; --write puts it into the policy)
"""

import math
from pathlib import Path
from typing import Any

from benchmarks.common import SUBJECT, parse_options, per_length, run_cases, subject_of
from lkv.methods.memory import TierTable
from lkv.training.data.recipes import Mixture
from lkv.training.data.samples import tokenize_sample
from lkv.training.tiers import BITS, best_table, measure_tiers

SPREAD = 0.1  # of lengths around the one that is asked for
CONTINUATION = 80


def main() -> None:
    options = parse_options(
        __doc__, "tiers", "of training files", **SUBJECT, tokens=[1000, 2000, 4000], contexts=[6, 3, 1], bits=[*BITS],
        seed=7, write=False, out=Path,
    )  # fmt: skip
    contexts, subject = per_length(options.tokens, options.contexts), subject_of(options)
    options.out = options.out or subject.results("tiers")
    bounds = {tokens: (int(tokens * (1 - SPREAD)), int(tokens * (1 + SPREAD))) for tokens in contexts}
    mixtures = {tokens: Mixture(options.data, *own, options.seed, validation=True) for tokens, own in bounds.items()}
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

    rows = run_cases("benchmarks.tiers", options, "tiers", cases, measure_case, rows_of_samples, subject.policy)
    if options.write:
        subject.policy.card["tiers"] = rows[-1]["table"]
        subject.policy.save_pretrained(options.policy, half=True)


if __name__ == "__main__":
    main()
