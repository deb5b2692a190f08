"""What each method's choice of tokens costs: scoring, budgets, top-k and packing, as a share of plain prefill.

python -m benchmarks.selection_cost    (writes selection_cost.json)
"""

import time

import torch
from transformers import DynamicCache

from benchmarks.common import parse_options, save_rows
from lkv.cache.ragged_cache import RaggedCache
from lkv.integrations.transformers.prefill import read_prompt
from lkv.methods.method import resolve_method
from lkv.methods.registry import METHODS, parse_method
from lkv.models.loading import load_default
from lkv.policy.lookup import default_policy
from lkv.utils.statistics import bootstrap


@torch.no_grad()
def main() -> None:
    options = parse_options(
        __doc__ or "", "selection_cost", tokens=[4096, 16_384], repeats=3, kvzip_up_to=4096, retention=0.15,
        dtype="bfloat16",
    )  # fmt: skip
    model, tokenizer = load_default(getattr(torch, options.dtype))
    policy = default_policy()
    rows = []
    for tokens in options.tokens:
        # Beyond the model's positions its text would mean nothing; what it costs stays the same.
        ids = torch.randint(100, 40_000, (1, tokens), generator=torch.Generator().manual_seed(0))
        drawn = torch.rand(30, 3, generator=torch.Generator().manual_seed(0)).tolist()
        prompt = read_prompt(model, ids, queries=True)
        names = [name for name in METHODS if not parse_method(name).needs_second_pass or tokens <= options.kvzip_up_to]
        names.append("lkv+refit")
        seconds: dict[str, list[float]] = {name: [] for name in ("full", *names)}
        for _ in range(options.repeats):
            for name, record in seconds.items():
                pattern = drawn if name != "full" and parse_method(name).needs_pattern else None
                started = time.perf_counter()
                if name == "full":
                    model.base_model(input_ids=ids, past_key_values=DynamicCache(), use_cache=True)
                elif parse_method(name).needs_second_pass:
                    method = resolve_method(
                        name, model, retention=options.retention, policy=policy, pattern=pattern, tokenizer=tokenizer
                    )
                    method = method.for_prompt(ids[0].tolist(), prompt)
                    RaggedCache(model, method=method).fill(prompt)
                else:
                    RaggedCache(model, policy=policy, retention=options.retention, method=name, pattern=pattern).fill(
                        prompt
                    )
                record.append(time.perf_counter() - started)
        for name in names:
            ratio = bootstrap([[second / full] for second, full in zip(seconds[name], seconds["full"], strict=True)])
            row = {"method": name, "tokens": tokens, "retention": options.retention} | ratio._asdict()
            row |= {"unit": "time of the choice by that of plain prefill, mean of pairs", "baseline": "full"}
            rows.append(row | {"seconds": sorted(seconds[name])[len(seconds[name]) // 2]})
            print(f"{tokens:6} {name:15} {ratio.value:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]", flush=True)
    save_rows(options, "selection_cost", rows)


if __name__ == "__main__":
    main()
