"""Prefill with eviction against plain prefill, and the bytes of k and v really held, on the embedded model.

python -m benchmarks.prefill    (writes prefill.json and cache_bytes.json)
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers import DynamicCache

from benchmarks.common import RESULTS
from lkv.cache.ragged_cache import RaggedCache
from lkv.integrations.transformers.cache_layers import kv_nbytes
from lkv.models.loading import load_default
from lkv.policy.lookup import default_policy
from lkv.utils.results import write_results
from lkv.utils.statistics import bootstrap

METHODS = ("lkv", "snapkv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--retention", type=float, default=0.15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    model, _ = load_default()
    policy = default_policy()
    times, sizes = [], []
    for tokens in options.tokens:
        ids = torch.randint(100, 40_000, (1, tokens), generator=torch.Generator().manual_seed(0))
        seconds: dict[str, list[float]] = {name: [] for name in ("full", *METHODS)}
        held, realised = {}, {"full": 1.0}
        # Interleaved, so that a noisy minute falls on all of them alike; the first round warms up.
        for repeat in range(options.repeats + 1):
            for name, record in seconds.items():
                cache = (
                    DynamicCache()
                    if name == "full"
                    else RaggedCache(model, policy=policy, retention=options.retention, method=name)
                )
                started = time.perf_counter()
                with torch.no_grad():
                    model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
                if repeat:
                    record.append(time.perf_counter() - started)
                held[name] = cache.nbytes() if isinstance(cache, RaggedCache) else kv_nbytes(cache)
                if isinstance(cache, RaggedCache):
                    realised[name] = cache.realised_retention()
        for name, record in seconds.items():
            shared = {"method": name, "tokens": tokens, "retention": 1.0 if name == "full" else options.retention}
            ratio = bootstrap([[second / full] for second, full in zip(record, seconds["full"], strict=True)])
            times.append(shared | ratio._asdict() | {"unit": "mean of paired ratios", "baseline": "full"})
            times[-1]["seconds"] = statistics.median(record)
            sizes.append(shared | {"realised": realised[name], "value": held[name] / held["full"], "bytes": held[name]})
            sizes[-1] |= {"n": 1, "unit": "ratio of bytes, slack included", "baseline": "full"}
            print(f"{tokens} {name:8} {times[-1]['value']:.3f} of the time, {sizes[-1]['value']:.4f} of the bytes")
    write_results(options.out / "prefill.json", "prefill", times, 0, "python -m benchmarks.prefill")
    write_results(options.out / "cache_bytes.json", "cache_bytes", sizes, 0, "python -m benchmarks.prefill")


if __name__ == "__main__":
    main()
