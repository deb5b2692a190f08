"""lkv profile: what methods cost in time and memory, by context length."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from lkv.cli.options import add_model, add_policy_revision, add_revision, check_policy, positive
from lkv.errors import LkvError, PolicyMismatchError, check_retention
from lkv.utils.journal import open_journal
from lkv.utils.results import write_results

_MOST_TOKENS = 2**22  # no context beyond this is tried
_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    source = parser.add_mutually_exclusive_group()
    add_model(source)
    source.add_argument("--config", default=None, help="random weights: llama-3.1-8b, qwen3-8b, ... or a config.json")
    parser.add_argument("--policy", default=None, help="folder or hub id (default: random where none is shipped)")
    add_revision(parser)
    add_policy_revision(parser)
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=positive,
        default=[1024, 2048, 4096, 8192],
        help="context lengths (default: 1024 2048 4096 8192)",
    )
    parser.add_argument(
        "--methods", nargs="+", default=["full", "lkv", "snapkv"], help="of `lkv methods` (default: full lkv snapkv)"
    )
    parser.add_argument("--retention", type=float, default=0.15, help="share to keep, in (0, 1] (default: %(default)g)")
    parser.add_argument("--batch", type=positive, default=1, help="rows read at once (default: %(default)s)")
    parser.add_argument(
        "--new-tokens", type=positive, default=16, help="tokens generated after each context (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=positive, default=3, help="timed rounds, after one that warms up (default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=_DTYPES, default=None, help="(default: bfloat16 on CUDA, else float32)")
    parser.add_argument("--device", default=None, help="cpu, cuda, cuda:1, ... (default: CUDA where there is one)")
    parser.add_argument("--chunk", type=positive, default=None, help="read the context in parts of so many tokens")
    parser.add_argument("--streaming", action="store_true", help="evict after every part (needs --chunk)")
    parser.add_argument("--seed", type=int, default=0, help="of tokens and random weights (default: %(default)s)")
    parser.add_argument(
        "--until-out-of-memory", action="store_true", help="also find the largest context each method has room for"
    )
    parser.add_argument(
        "--memory-limit", type=float, default=None, help="GiB allowed beside the weights (default: what there is)"
    )
    parser.add_argument("--out", type=Path, default=None, help="JSON file; a run that was interrupted goes on")
    parser.add_argument(
        "--dry-run", action="store_true", help="measure nothing: tell the bytes that follow from the model's shape"
    )
    parser.add_argument(
        "--memory", type=float, default=80.0, help="--dry-run: GiB of the device (default: %(default)g)"
    )


def run(options: argparse.Namespace) -> None:
    """Measure each length, going on where an earlier run stopped, and write the result."""
    from lkv.methods.registry import FULL, parse_method

    # What is wrong with the command is told before a model is made.
    check_retention(options.retention)
    check_policy(options)
    if options.dry_run:
        return _predict(options)
    if options.out is None:
        raise LkvError("the result needs a place: give --out FILE.json, or --dry-run to measure nothing.")
    for name in options.methods:
        if name != FULL:
            parse_method(name)
    if options.out.suffix != ".json":
        raise LkvError(f"--out is {options.out}, but the result is a JSON file: give a name that ends with .json.")
    if options.streaming and options.chunk is None:
        raise LkvError("streaming reads the context in parts: give their size in tokens, for example --chunk 4096.")
    if options.memory_limit is not None and options.memory_limit <= 0:
        raise LkvError(f"--memory-limit is {options.memory_limit}, but it is a size in GiB above 0.")
    if options.device is None:
        options.device = _default_device()
    if options.until_out_of_memory and options.memory_limit is None and not options.device.startswith("cuda"):
        raise LkvError(
            f"on {options.device} the system would stop everything when its memory is used up: give --memory-limit."
        )
    options.dtype = options.dtype or ("bfloat16" if options.device.startswith("cuda") else "float32")
    profiler = _profiler(options)
    rows: list[dict[str, Any]] = []
    settings = {key: str(value) for key, value in vars(options).items() if key not in ("run", "out")}
    with open_journal(options.out.with_suffix(".jsonl"), settings) as done:
        for tokens in dict.fromkeys(options.tokens):
            if str(tokens) not in done:
                done.add(str(tokens), {"rows": profiler.rows(tokens, options.methods)})
            rows += _shown(done[str(tokens)]["rows"])
        for method in dict.fromkeys(options.methods if options.until_out_of_memory else ()):
            key = f"largest-{method}"
            if key not in done:
                done.add(key, {"rows": [profiler.largest(method, min(options.tokens), _MOST_TOKENS)]})
            rows += _shown(done[key]["rows"])
        _compare_contexts([row for row in rows if row.get("largest")])
        write_results(options.out, "profile", rows, options.seed, _command(options))
    print(f"written to {options.out}")


def _predict(options: argparse.Namespace) -> None:
    """Tell what each length needs by the model's shape, and the longest prompt that the memory has room for."""
    from lkv.evaluation.profiling.predict import longest_prompt, predict_memory
    from lkv.evaluation.profiling.random_models import read_config
    from lkv.models.loading import DEFAULT, load_config
    from lkv.models.shapes import Shape

    if options.memory <= 0:
        raise LkvError(f"--memory is {options.memory:g}, but it is a size in GiB above 0; give another.")
    config = read_config(options.config) if options.config else load_config(options.model or DEFAULT, options.revision)
    Shape.check_plain(config)
    shape, element = Shape.of(config), 4 if options.dtype == "float32" else 2
    settings: dict[str, Any] = {
        "retention": options.retention, "element": element, "batch": options.batch, "chunk": options.chunk,
    }  # fmt: skip
    print(f"{shape.parameters:,} weights of {element} bytes; GiB, predicted from the shape, nothing measured")
    heads = ("tokens", "weights", "k, v full", "k, v kept", "activations", "peak full", "peak kept")
    print("".join(f"{head:>13}" for head in heads))
    for tokens in dict.fromkeys(options.tokens):
        row = predict_memory(shape, tokens, **settings)
        sizes = (row.weights, row.kv_full, row.kv_kept, row.activations, row.peak_full, row.peak_kept)
        print(f"{tokens:>13,}" + "".join(f"{size / 2**30:>13,.3f}" for size in sizes))
    most = [longest_prompt(shape, options.memory * 2**30, kept, **settings) for kept in (False, True)]
    print(
        f"in {options.memory:g} GiB: {most[0]:,} tokens with the full cache, {most[1]:,} at R = {options.retention:g} "
        "evicting layer by layer, by tensors alone: the gaps of PyTorch's caching allocator come on top"
    )


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _profiler(options: argparse.Namespace) -> Any:
    import torch

    from lkv.evaluation.profiling.measure import Profiler, ProfileSettings
    from lkv.evaluation.profiling.random_models import extend_positions, random_model, random_policy, read_config
    from lkv.integrations.transformers.attention import patch_attention
    from lkv.methods.registry import FULL, parse_method
    from lkv.models.loading import DEFAULT, load_model
    from lkv.policy.lookup import load_policy, policy_for

    try:
        device, dtype = torch.device(options.device), getattr(torch, options.dtype)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LkvError(f"there is no device {options.device!r} here; give --device cpu.") from error
    chosen = options.model or DEFAULT
    if options.config:
        path = Path(options.config)
        model = random_model(read_config(options.config), dtype, device, options.seed)
        name = path.resolve().parent.name if path.suffix == ".json" else options.config
    else:
        name = Path(chosen).name
        model = load_model(chosen, dtype, options.revision)[0].to(device)
    extend_positions(model, _MOST_TOKENS if options.until_out_of_memory else max(options.tokens) + options.new_tokens)
    spec = patch_attention(model).spec
    if options.policy:
        policy = load_policy(options.policy, revision=options.policy_revision)
    else:
        try:
            policy = policy_for(spec)
        except PolicyMismatchError:
            policy = random_policy(spec, options.seed)
    if any(parse_method(method).needs_policy for method in options.methods if method != FULL):
        policy.check_model(spec)
    settings = ProfileSettings(
        retention=options.retention,
        batch=options.batch,
        new_tokens=options.new_tokens,
        repeats=options.repeats,
        chunk=options.chunk,
        streaming=options.streaming,
        seed=options.seed,
        limit=None if options.memory_limit is None else int(options.memory_limit * 2**30),
    )
    return Profiler(model, name, policy, settings)


def _compare_contexts(largest: list[dict[str, Any]]) -> None:
    """Set how many times the full cache's largest context each method's is, where both were found."""
    full = next((row for row in largest if row["method"] == "full" and row["n"]), None)
    for row in largest if full else ():
        row["context_ratio"] = row["tokens"] / full["tokens"] if full and row["n"] else None
        if row["context_ratio"]:
            print(f"{row['method']}: {row['context_ratio']:.2f} times the context of the full cache")


def _command(options: argparse.Namespace) -> str:
    """The command that makes the file again."""
    words = ["lkv", "profile"]
    for key, value in vars(options).items():
        if key == "run" or value is None or value is False:
            continue
        words.append("--" + key.replace("_", "-"))
        if value is not True:
            words += map(str, value) if isinstance(value, list) else [str(value)]
    return shlex.join(words)


def _shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        start = f"{row['tokens']:8,} {row['method']:16}"
        if row["kv_bytes"] is None:
            print(f"{start} {row['reason']}", flush=True)
            continue
        parts = [
            f"{row['realised']:.3f} kept, {row['kv_bytes'] / 2**20:9,.1f} MiB of k and v",
            f"{row['peak_bytes'] / 2**20:10,.1f} MiB at most",
        ]
        if row["prefill_seconds"] is not None:
            parts += [f"prefill {row['prefill_seconds']:8.3f} s", f"decode {row['decode_ms']:8.2f} ms a token"]
        if row["prefill_ratio"] is not None:
            parts.append(f"({row['prefill_ratio']:.3f} and {row['decode_ratio']:.3f} of full)")
        largest = "largest context: " if row.get("largest") else ""
        print(f"{start} {largest}{', '.join(parts)}", flush=True)
    return rows
