"""The ragged cache against the stock embedded model: retention 1, and random budgets against a -inf mask.

python -m experiments.equality    (writes equality.json)
"""

import random
from contextlib import nullcontext

import torch

from experiments.common import parse_options, save_rows
from lkv.cache.ragged_cache import RaggedCache
from lkv.hf.loading import load_default
from lkv.methods.budgets import PerHead, Uniform
from lkv.methods.method import Method
from lkv.methods.selectors import PrecomputedScores
from lkv.utils.devices import dtype_name
from tests.masked import hidden_from_continuation

LATER = 24


@torch.no_grad()
def main() -> None:
    options = parse_options(__doc__, "equality", tokens=400, seed=0)
    rng, generator = random.Random(options.seed), torch.Generator().manual_seed(options.seed)
    ids = torch.randint(100, 40_000, (1, options.tokens + LATER), generator=generator)
    rows = []
    for dtype in (torch.float32, torch.float64):
        model, _ = load_default(dtype)
        layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
        scores = torch.rand(layers, 1, heads, options.tokens, generator=generator)
        ratios = [[rng.choice([0.0, 0.02, 0.1, 0.3, 1.0]) for _ in range(heads)] for _ in range(layers)]
        ranks = scores.argsort(-1, descending=True).argsort(-1)
        counts = [torch.tensor([int(r * options.tokens + 1e-6) for r in layer]) for layer in ratios]
        hidden = [rank >= count[None, :, None] for rank, count in zip(ranks, counts, strict=True)]
        for name, budgets, masks in (("retention 1", Uniform(1.0), None), ("random budgets", PerHead(ratios), hidden)):
            with hidden_from_continuation(model, masks, options.tokens) if masks else nullcontext():
                expected = model(ids).logits[:, options.tokens :]
            cache = RaggedCache(model, method=Method(name, budgets, PrecomputedScores(scores)))
            model(ids[:, : options.tokens], past_key_values=cache, use_cache=True)
            steps = [
                model(ids[:, position : position + 1], past_key_values=cache, use_cache=True).logits
                for position in range(options.tokens, options.tokens + LATER)
            ]
            row = {"method": name, "dtype": dtype_name(dtype), "tokens": options.tokens}
            row |= {
                "realised": cache.realised_retention(),
                "value": float((torch.cat(steps, 1) - expected).abs().max()),
            }
            row |= {"largest_logit": float(expected.abs().max()), "n": LATER, "unit": "largest difference of a logit"}
            rows.append(row)
            print(row)
    save_rows(options, "equality", rows, options.seed)


if __name__ == "__main__":
    main()
