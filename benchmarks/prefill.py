"""Prefill with eviction against plain prefill, and the bytes of k and v really held, on the embedded model.

python -m benchmarks.prefill    (writes prefill.json and cache_bytes.json)
"""

import statistics
import time

import torch
from transformers import DynamicCache

from benchmarks.common import command_of, parse_options
from lkv.cache.ragged_cache import RaggedCache
from lkv.integrations.transformers.cache_layers import kv_nbytes
from lkv.models.loading import load_default
from lkv.policy.lookup import default_policy
from lkv.utils.results import write_results
from lkv.utils.statistics import bootstrap

METHODS = ("full", "lkv", "snapkv")


def main() -> None:
    options = parse_options(__doc__ or "", "prefill", tokens=[1024, 4096], repeats=5, retention=0.15)
    model, _ = load_default()
    policy = default_policy()
    times, sizes = [], []
    for tokens in options.tokens:
        ids = torch.randint(100, 40_000, (1, tokens), generator=torch.Generator().manual_seed(0))
        seconds: dict[str, list[float]] = {name: [] for name in METHODS}
        nbytes, realised = {}, {"full": 1.0}
        # Interleaved, so that a noisy minute falls on all of them alike; the first round warms up.
        for repeat in range(options.repeats + 1):
            for name in METHODS:
                cache = (
                    DynamicCache()
                    if name == "full"
                    else RaggedCache(model, policy=policy, retention=options.retention, method=name)
                )
                started = time.perf_counter()
                with torch.no_grad():
                    model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
                if repeat:
                    seconds[name].append(time.perf_counter() - started)
                nbytes[name] = cache.nbytes() if isinstance(cache, RaggedCache) else kv_nbytes(cache)
                if isinstance(cache, RaggedCache):
                    realised[name] = cache.realised_retention()
        for name, own in seconds.items():
            shared = {"method": name, "tokens": tokens, "retention": 1.0 if name == "full" else options.retention}
            ratio = bootstrap([[second / full] for second, full in zip(own, seconds["full"], strict=True)])
            times.append(shared | ratio._asdict() | {"unit": "mean of paired ratios", "baseline": "full"})
            times[-1]["seconds"] = statistics.median(own)
            size = {"realised": realised[name], "value": nbytes[name] / nbytes["full"], "bytes": nbytes[name], "n": 1}
            sizes.append(shared | size | {"unit": "ratio of bytes, slack included", "baseline": "full"})
            print(f"{tokens} {name:8} {times[-1]['value']:.3f} of the time, {sizes[-1]['value']:.4f} of the bytes")
    for name, rows in (("prefill", times), ("cache_bytes", sizes)):
        command = command_of("benchmarks.prefill", options)
        write_results(options.out.with_name(f"{name}.json"), name, rows, 0, command)


if __name__ == "__main__":
    main()
