"""What each method's choice of tokens costs: scoring, budgets, top-k and packing, as a share of plain prefill.

python -m experiments.selection_cost    (writes selection_cost.json)
"""

from functools import partial

import torch
from transformers import DynamicCache

from experiments.common import interleaved, paired_ratio, parse_options, save_rows
from lkv.cache.ragged_cache import RaggedCache
from lkv.hf.loading import load_default
from lkv.hf.prompt_kv import LayerKV, read_prompt
from lkv.methods.registry import METHODS, parse_method
from lkv.methods.request import CompressionRequest, resolve_method
from lkv.policy.lookup import default_policy


@torch.no_grad()
def main() -> None:
    options = parse_options(
        __doc__, "selection_cost", tokens=[4096, 16_384], repeats=3, kvzip_up_to=4096, retention=0.15,
        dtype="bfloat16", methods=[*METHODS, "lkv+compensation"],
    )  # fmt: skip
    model, tokenizer = load_default(getattr(torch, options.dtype))
    policy, pattern = default_policy(), torch.rand(30, 3, generator=torch.Generator().manual_seed(0)).tolist()
    rows = []
    for tokens in options.tokens:
        # Beyond the model's positions its text would mean nothing; what it costs stays the same.
        ids = torch.randint(100, 40_000, (1, tokens), generator=torch.Generator().manual_seed(0))
        prompt = read_prompt(model, ids, queries=True)
        second_pass = [name for name in options.methods if parse_method(name).needs_second_pass]
        names = [name for name in options.methods if name not in second_pass or tokens <= options.kvzip_up_to]

        def choose(name: str, ids: torch.Tensor = ids, prompt: list[LayerKV] = prompt) -> None:
            if name == "full":
                model.base_model(input_ids=ids, past_key_values=DynamicCache(), use_cache=True)
                return
            own_pattern = pattern if parse_method(name).needs_pattern else None
            request = CompressionRequest(method=name, retention=options.retention, policy=policy, pattern=own_pattern)
            method = resolve_method(request, model, tokenizer)
            if parse_method(name).needs_second_pass:
                method = method.for_prompt(ids[0].tolist(), prompt)
            RaggedCache(model, method=method).fill(prompt)

        runs = {name: partial(choose, name) for name in ("full", *names)}
        seconds = interleaved(runs, options.repeats, warmups=0)
        for name in names:
            ratio = paired_ratio(seconds[name], seconds["full"])
            row = {"method": name, "tokens": tokens, "retention": options.retention} | ratio
            row |= {"unit": "time of the choice by that of plain prefill, mean of pairs", "baseline": "full"}
            rows.append(row | {"seconds": sorted(seconds[name])[len(seconds[name]) // 2]})
            print(f"{tokens:6} {name:15} {ratio['value']:.4f} [{ratio['low']:.4f}, {ratio['high']:.4f}]", flush=True)
    save_rows(options, "selection_cost", rows)


if __name__ == "__main__":
    main()
