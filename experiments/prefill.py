"""Prefill with eviction against plain prefill, and the bytes of k and v really held, on the demo model.

python -m experiments.prefill    (writes prefill.json and cache_bytes.json)
"""

import statistics
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from experiments.common import command_of, interleaved, paired_ratio, parse_options
from experiments.result_file import write_results
from lkv.cache.full_cache import kv_nbytes
from lkv.cache.ragged_cache import RaggedCache
from lkv.hf.cache_argument import cache_argument
from lkv.hf.loading import load_default
from lkv.policy.lookup import default_policy

METHODS = ("full", "lkv", "snapkv")


@torch.no_grad()
def main() -> None:
    options = parse_options(__doc__, "prefill", tokens=[1024, 4096], repeats=5, retention=0.15)
    model, _ = load_default()
    policy = default_policy()
    times, sizes = [], []
    for tokens in options.tokens:
        ids = torch.randint(100, 40_000, (1, tokens), generator=torch.Generator().manual_seed(0))
        caches: dict[str, Any] = {}

        def read(name: str, ids: torch.Tensor = ids, caches: dict[str, Any] = caches) -> None:
            settings = {"policy": policy, "retention": options.retention, "method": name}
            caches[name] = DynamicCache() if name == "full" else RaggedCache(model, **settings)
            model.base_model(input_ids=ids, **cache_argument(caches[name]), use_cache=True)

        seconds = interleaved({name: partial(read, name) for name in METHODS}, options.repeats, warmups=1)
        nbytes = {name: kv_nbytes(cache) if name == "full" else cache.nbytes() for name, cache in caches.items()}
        for name, own in seconds.items():
            shared = {"method": name, "tokens": tokens, "retention": 1.0 if name == "full" else options.retention}
            ratio = paired_ratio(own, seconds["full"])
            times.append(shared | ratio | {"unit": "mean of paired ratios", "baseline": "full"})
            times[-1]["seconds"] = statistics.median(own)
            realised = 1.0 if name == "full" else caches[name].realised_retention()
            size = {"realised": realised, "value": nbytes[name] / nbytes["full"], "bytes": nbytes[name], "n": 1}
            sizes.append(shared | size | {"unit": "ratio of bytes, slack included", "baseline": "full"})
            print(f"{tokens} {name:8} {times[-1]['value']:.3f} of the time, {sizes[-1]['value']:.4f} of the bytes")
    for name, rows in (("prefill", times), ("cache_bytes", sizes)):
        command = command_of("experiments.prefill", options)
        write_results(options.out.with_name(f"{name}.json"), name, rows, 0, command)


if __name__ == "__main__":
    main()
