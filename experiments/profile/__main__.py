"""python -m experiments.profile: measure time and memory of methods by context length."""

import argparse
import sys
from pathlib import Path
from typing import Any

from experiments.journal import open_journal
from experiments.result_file import write_results
from lkv.cli.command import option
from lkv.cli.main import main
from lkv.cli.options import (
    GPU_DEVICE,
    Dtype,
    MethodName,
    PolicyOptions,
    PositiveInt,
    Retention,
    RunOptions,
    check_policy_is_read,
    find_needs,
)
from lkv.errors import DEFAULT_RETENTION, LkvError, PolicyMismatchError
from lkv.utils.provenance import collect_provenance

_MAX_TOKENS = 2**22  # limit of the search for the largest context
_PRINTED = {
    "realised": "{:.3f} kept", "kv_bytes": "KV cache {:13,} bytes", "peak_bytes": "peak {:14,} bytes",
    "prefill_seconds": "prefill {:8.3f} s", "prefill_ratio": "{:.3f} of full",
    "decode_ms": "decode {:8.2f} ms per token", "decode_ratio": "{:.3f} of full",
}  # fmt: skip
_MEASUREMENT = (
    "--policy", "--policy-revision", "--no-strict", "--methods", "--new-tokens", "--repeats", "--device", "--streaming",
    "--seed", "--until-out-of-memory", "--memory-limit", "--out",
)  # fmt: skip


class Profile(PolicyOptions, RunOptions):
    """Measure prefill and decode latency, peak memory and KV cache size."""

    config: str | None = option("random weights instead of --model: llama-3.1-8b, qwen3-8b, ... or a config.json")
    policy: str | None = option("folder or Hub id of a policy (default: the model's, else random weights)")
    tokens: list[PositiveInt] = option("context lengths", [1024, 2048, 4096, 8192])
    methods: list[MethodName] = option("names from `lkv methods`, or full", ["full", "lkv", "snapkv"])
    retention: Retention = option("fraction of the KV entries to keep", DEFAULT_RETENTION)
    batch: PositiveInt = option("sequences per batch", 1)
    new_tokens: PositiveInt = option("tokens generated after each context", 16)
    repeats: PositiveInt = option("timed rounds, after a warm-up round", 3)
    dtype: Dtype | None = option("dtype of the model (default: bfloat16 on CUDA, else float32)")
    device: str | None = GPU_DEVICE
    chunk: PositiveInt | None = option("read the context in chunks of this many tokens")
    streaming: bool = option("evict after every chunk (needs --chunk)", False)
    seed: int = option("seed of tokens and random weights", 0)
    until_out_of_memory: bool = option("also search for the largest context that fits, for each method", False)
    memory_limit: float | None = option("GiB available besides the weights (default: all of the device)", gt=0)
    out: Path | None = option("JSON result file; an interrupted run resumes")
    dry_run: bool = option("measure nothing: predict memory from the model's shape", False)
    memory: float = option("--dry-run: GiB of the device", 80.0, gt=0)

    def run(self) -> None:
        """Measure each length, resuming an earlier run, and write the result."""
        if self.config and self.model:
            raise LkvError("--config and --model both name a model; leave one of them out.")
        if self.config:
            self.refuse_unread("--config", "--revision")
        if self.dry_run:
            self.refuse_unread("--dry-run", *_MEASUREMENT)
            _predict(self)
            return
        self.refuse_unread("a measurement", "--memory", advice="use --memory-limit, or add --dry-run")
        if self.out is None:
            raise LkvError("--out is missing; give --out FILE.json, or --dry-run to measure nothing.")
        if self.out.suffix != ".json":
            raise LkvError(f"--out is {self.out}, but the result is a JSON file; use a name that ends with .json.")
        if self.streaming and self.chunk is None:
            raise LkvError("--streaming reads the context in chunks; give their size, for example --chunk 4096.")
        check_policy_is_read(self, self.methods)
        import torch

        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if self.until_out_of_memory and self.memory_limit is None and not device.startswith("cuda"):
            raise LkvError(
                f"on {device} the operating system would end the process when memory runs out; give --memory-limit."
            )
        dtype = self.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
        _measure(self.model_copy(update={"device": device, "dtype": dtype}), self.out)


def _measure(options: Profile, out: Path) -> None:
    from experiments.common import command_of

    profiler = _make_profiler(options)
    rows: list[dict[str, Any]] = []
    settings: dict[str, Any] = {
        name: str(value) for name, value in options.model_dump(exclude={"out", "strict"}).items()
    }
    settings |= {"versions": collect_provenance()["versions"], "device_name": profiler.device_name}
    with open_journal(out.with_suffix(".jsonl"), settings) as journal:
        for tokens in dict.fromkeys(options.tokens):
            if str(tokens) not in journal:
                journal.add(str(tokens), {"rows": profiler.measure(tokens, options.methods)})
            rows += _print_rows(journal[str(tokens)]["rows"])
        for method in dict.fromkeys(options.methods if options.until_out_of_memory else ()):
            key = f"largest-{method}"
            if key not in journal:
                journal.add(key, {"rows": [profiler.measure_largest(method, min(options.tokens), _MAX_TOKENS)]})
            rows += _print_rows(journal[key]["rows"])
        _compare_contexts([row for row in rows if row.get("largest")])
        values = options.model_dump(exclude_defaults=True)
        values["no_strict"] = not values.pop("strict", True)
        command = command_of("experiments.profile", argparse.Namespace(**values))
        write_results(out, "profile", rows, options.seed, command)
    print(f"written to {out}")


def _predict(options: Profile) -> None:
    """Print the memory that each length needs by the model's shape, and the longest prompt that fits."""
    from experiments.profile.predict import check_uniform, longest_prompt, predict_memory
    from experiments.profile.random_models import read_config
    from lkv.hf.loading import load_config
    from lkv.hf.shapes import Shape

    config = read_config(options.config) if options.config else load_config(options.model_name, options.revision)
    check_uniform(config)
    shape, element = Shape.of(config), 4 if options.dtype == "float32" else 2
    settings = options.model_dump(include={"retention", "batch", "chunk"}) | {"element": element}
    print(f"{shape.parameters:,} weights of {element} bytes; GiB predicted from the shape, not measured")
    heads = ("tokens", "weights", "k, v full", "k, v kept", "activations", "peak full", "peak kept")
    print("".join(f"{head:>13}" for head in heads))
    for tokens in dict.fromkeys(options.tokens):
        row = predict_memory(shape, tokens, **settings)
        sizes = (row.weights, row.kv_full, row.kv_kept, row.activations, row.peak_full, row.peak_kept)
        print(f"{tokens:>13,}" + "".join(f"{size / 2**30:>13,.3f}" for size in sizes))
    most = [longest_prompt(shape, options.memory * 2**30, is_evicted, **settings) for is_evicted in (False, True)]
    print(
        f"in {options.memory:g} GiB: {most[0]:,} tokens with the full cache, {most[1]:,} at R = {options.retention:g} "
        "evicting layer by layer; tensors only, without the gaps of PyTorch's caching allocator"
    )


def _make_profiler(options: Profile) -> Any:
    import torch

    from experiments.profile.measure import Profiler
    from experiments.profile.random_models import extend_positions, random_model, random_policy, read_config
    from lkv.hf.attention import patch_attention
    from lkv.methods.registry import POLICY
    from lkv.policy.lookup import default_policy
    from lkv.utils.devices import find_device
    from lkv.utils.files import short_name

    device, dtype = find_device(options.device), getattr(torch, str(options.dtype))
    assert device is not None  # `run` has chosen one
    if options.config:
        path = Path(options.config)
        model = random_model(read_config(options.config), dtype, device, options.seed)
        name = path.resolve().parent.name if path.suffix == ".json" else options.config
    else:
        name = short_name(options.model_name)
        model = options.load_model()[0]
    extend_positions(model, _MAX_TOKENS if options.until_out_of_memory else max(options.tokens) + options.new_tokens)
    spec = patch_attention(model).spec
    policy = options.load_policy()
    if policy is None:
        try:
            policy = default_policy(model, name=options.model)
        except PolicyMismatchError:
            policy = random_policy(spec, options.seed)
    if any(POLICY in find_needs(method) for method in options.methods):
        policy.check_model(spec)
    return Profiler(model, name, policy, options)


def _compare_contexts(largest: list[dict[str, Any]]) -> None:
    """Set the ratio of each method's largest context to the full cache's, where both were found."""
    full = next((row for row in largest if row["method"] == "full" and row["n"]), None)
    for row in largest if full else ():
        row["context_ratio"] = row["tokens"] / full["tokens"] if full and row["n"] else None
        if row["context_ratio"]:
            print(f"{row['method']}: {row['context_ratio']:.2f} times the context of the full cache")


def _print_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        numbers = [form.format(row[key]) for key, form in _PRINTED.items() if row[key] is not None]
        largest = "largest context: " if row.get("largest") and numbers else ""
        print(f"{row['tokens']:8,} {row['method']:16} {largest}{', '.join(numbers or [row['reason']])}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main(command=Profile, program="python -m experiments.profile"))
