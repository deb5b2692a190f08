"""Prefill with eviction against plain prefill, and the bytes of k and v really held, on the demo model.

python -m experiments.prefill    (writes prefill.json and cache_bytes.json)
"""

from experiments.common import command_of, parse_options
from experiments.profile.__main__ import Profile
from experiments.profile.measure import Profiler
from experiments.result_file import write_results
from lkv.hf.loading import DEFAULT, load_default
from lkv.policy.lookup import default_policy

METHODS = ("full", "lkv", "snapkv")


def main() -> None:
    options = parse_options(__doc__, "prefill", tokens=[1024, 4096], repeats=5, retention=0.15)
    settings = Profile(retention=options.retention, repeats=options.repeats, new_tokens=1)
    profiler = Profiler(load_default()[0], DEFAULT, default_policy(), settings)
    times, sizes = [], []
    for tokens in options.tokens:
        full, *others = profiler.measure(tokens, METHODS)
        for row in (full, *others):
            shared = {key: row[key] for key in ("method", "tokens", "retention")}
            ratio = {"value": row["prefill_ratio"], "low": row["prefill_low"], "high": row["prefill_high"]}
            ratio |= {"n": row["n"], "unit": "mean of paired ratios", "baseline": "full"}
            times.append(shared | ratio | {"seconds": row["prefill_seconds"]})
            size = {"realised": row["realised"], "value": row["kv_bytes"] / full["kv_bytes"], "bytes": row["kv_bytes"]}
            sizes.append(shared | size | {"n": 1, "unit": "ratio of bytes, slack included", "baseline": "full"})
            print(f"{tokens} {row['method']:8} {ratio['value']:.3f} of the time, {size['value']:.4f} of the bytes")
    for name, rows in (("prefill", times), ("cache_bytes", sizes)):
        command = command_of("experiments.prefill", options)
        write_results(options.out.with_name(f"{name}.json"), name, rows, 0, command)


if __name__ == "__main__":
    main()
