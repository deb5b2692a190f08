"""The ragged cache against the stock embedded model: retention 1, and random budgets against a -inf mask.

python -m benchmarks.equality    (writes equality.json)
"""

import argparse
import random
from pathlib import Path

import torch

from benchmarks.common import RESULTS
from benchmarks.masked import hidden_from_continuation
from lkv.cache.ragged_cache import RaggedCache
from lkv.methods.budgets import PerHead, Uniform
from lkv.methods.method import Method
from lkv.methods.selectors import PrecomputedScores
from lkv.models.loading import load_default
from lkv.utils.results import write_results

LATER = 24


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "equality.json")
    options = parser.parse_args()
    rng, generator = random.Random(options.seed), torch.Generator().manual_seed(options.seed)
    ids = torch.randint(100, 40_000, (1, options.tokens + LATER), generator=generator)
    rows = []
    for dtype in (torch.float32, torch.float64):
        model, _ = load_default(dtype)
        layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
        table = torch.rand(layers, 1, heads, options.tokens, generator=generator)
        ratios = [[rng.choice([0.0, 0.02, 0.1, 0.3, 1.0]) for _ in range(heads)] for _ in range(layers)]
        hidden = []
        for layer in range(layers):
            rank = table[layer].argsort(-1, descending=True).argsort(-1)
            counts = torch.tensor([int(r * options.tokens + 1e-6) for r in ratios[layer]])
            hidden.append(rank >= counts[None, :, None])
        cases = {
            "retention 1": (
                Method("all", Uniform(1.0), PrecomputedScores(table)),
                [torch.zeros_like(h) for h in hidden],
            ),
            "random budgets": (Method("random", PerHead(ratios), PrecomputedScores(table)), hidden),
        }
        for name, (method, gone) in cases.items():
            if name == "retention 1":
                expected = model(ids).logits[:, options.tokens :]
            else:
                with hidden_from_continuation(model, gone, options.tokens):
                    expected = model(ids).logits[:, options.tokens :]
            cache = RaggedCache(model, method=method)
            model(ids[:, : options.tokens], past_key_values=cache, use_cache=True)
            steps = [
                model(ids[:, position : position + 1], past_key_values=cache, use_cache=True).logits
                for position in range(options.tokens, options.tokens + LATER)
            ]
            difference = (torch.cat(steps, 1) - expected).abs().max()
            rows.append(
                {
                    "method": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "tokens": options.tokens,
                    "realised": cache.realised_retention(),
                    "value": float(difference),
                    "largest_logit": float(expected.abs().max()),
                    "n": LATER,
                    "unit": "largest difference of a logit",
                }
            )
            print(rows[-1])
    write_results(options.out, "equality", rows, options.seed, "python -m benchmarks.equality")


if __name__ == "__main__":
    main()
