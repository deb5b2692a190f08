"""The command line: lkv ask | methods | train | inspect | eval | report | profile."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lkv.commands.eval import add_parser as add_eval
from lkv.commands.options import positive
from lkv.commands.profile import add_parser as add_profile
from lkv.commands.report import add_parser as add_report
from lkv.config import HIDDEN_NORMS, PRESETS, TrainingConfig, replace
from lkv.errors import LkvError, TrainingStoppedError, check_retention
from lkv.methods.build import FULL, METHODS, RULES, SELECTORS, describe, find

_TRAINING_OPTIONS = (
    "steps", "batch", "continuations", "lr", "lr_end", "warmup", "tau_start", "tau_end", "seed", "min_tokens",
    "max_tokens", "hidden_norm",
)  # fmt: skip


_INTERRUPTED = 130  # as a shell tells of a program that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status. Errors a user can meet are one sentence on stderr."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
        # Nothing may be left to be written when the interpreter ends: it would print a traceback of its own.
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell tells of a program that a closed pipe ended
    except KeyboardInterrupt:
        print("lkv: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except LkvError as error:
        print(f"lkv: {error}", file=sys.stderr)
        return _INTERRUPTED if isinstance(error, TrainingStoppedError) else 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lkv", description="Learned KV cache eviction for transformers models.")
    commands = parser.add_subparsers(required=True)

    ask = commands.add_parser("ask", help="ask a question about a text file from a compressed cache")
    ask.add_argument("file", type=Path)
    ask.add_argument("question")
    ask.add_argument("--retention", type=float, default=0.15, help="share of the cache to keep, in (0, 1]")
    ask.add_argument("--method", default="lkv", help=f"a name that `lkv methods` lists, or {FULL}")
    ask.add_argument("--model", default=None, help="folder or hub id (default: the embedded SmolLM2-135M)")
    ask.add_argument("--policy", default=None, help="folder or hub id of a policy (default: the one shipped)")
    ask.add_argument("--pattern", type=Path, default=None, help="DuoAttention's full_attention_heads.tsv (rule duo)")
    ask.add_argument("--max-new-tokens", type=positive, default=None, help="(default: 128 at most)")
    ask.set_defaults(run=_ask)

    inspect = commands.add_parser("inspect", help="show what a policy learned")
    inspect.add_argument("policy", nargs="?", default=None, help="folder or hub id (default: the one shipped)")
    inspect.add_argument("--retention", type=float, default=0.15)
    inspect.add_argument("--figure", type=Path, default=None, help="write the budgets as a picture")
    inspect.set_defaults(run=_inspect)

    methods = commands.add_parser("methods", help="list the methods: what they keep, whose they are, what they need")
    methods.set_defaults(run=_methods)

    train = commands.add_parser("train", help="train a policy for a model, or resume the training")
    train.add_argument("--preset", choices=sorted(PRESETS), default="paper")
    train.add_argument("--model", default=None, help="folder or hub id (default: the embedded SmolLM2-135M)")
    train.add_argument("--data", type=Path, required=True, help="folder with data sets, text or code")
    train.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the policy")
    train.add_argument("--init", type=Path, default=None, help="policy or run to start from (preset finish)")
    types = {f.name: type(getattr(TrainingConfig(), f.name)) for f in fields(TrainingConfig)}
    for name in _TRAINING_OPTIONS:
        choices = HIDDEN_NORMS if name == "hidden_norm" else None
        kind = positive if types[name] is int and name != "seed" else types[name]
        train.add_argument("--" + name.replace("_", "-"), type=kind, default=None, choices=choices)
    train.set_defaults(run=_train)

    add_eval(commands)
    add_report(commands)
    add_profile(commands)
    return parser


def _ask(options: argparse.Namespace) -> None:
    from lkv.context import check_text, compress
    from lkv.host.spec import inspect_model
    from lkv.methods.budget import read_pattern
    from lkv.models import DEFAULT, load_model, load_policy

    try:
        text = options.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LkvError(f"{options.file} cannot be read as text ({error}); give a UTF-8 text file.") from error
    check_retention(options.retention)
    duo = options.method != FULL and find(options.method).rule == "duo"
    if duo != (options.pattern is not None):
        wanted = "needs --pattern FILE" if duo else "takes no --pattern, which is for the rule duo"
        raise LkvError(f"the method {options.method!r} {wanted}; `lkv methods` says what each method needs.")
    check_text(options.question, "the question", "ask something about the text")
    policy = load_policy(options.policy) if options.policy else None
    model, tokenizer = load_model(options.model or DEFAULT)
    spec = inspect_model(model)
    extra: dict[str, Any] = {"pattern": read_pattern(options.pattern, spec.layers, spec.kv_heads)} if duo else {}
    started = time.perf_counter()
    retention = None if options.method == FULL else options.retention
    context = compress(model, tokenizer, text, options.method, retention, policy, **extra)
    seconds = time.perf_counter() - started
    asked = 1.0 if options.method == FULL else options.retention
    print(
        f"[{context.tokens} tokens read in {seconds:.1f} s; {context.realised_retention():.4f} of the entries kept, "
        f"{asked:g} asked for; {context.nbytes():,} bytes of k and v]",
        file=sys.stderr,
    )
    context.ask(options.question, options.max_new_tokens, stream=True)


def _inspect(options: argparse.Namespace) -> None:
    from lkv.models import DEFAULT, load_policy

    policy = load_policy(options.policy or DEFAULT)
    ratios = policy.inference_ratios(options.retention)
    print(f"{policy.spec.architecture}: {policy.spec.layers} layers x {policy.spec.kv_heads} KV heads")
    print(f"card: {json.dumps(policy.card)}")
    for layer, row in enumerate(ratios.tolist()):
        print(f"layer {layer:3}: " + " ".join(f"{ratio:.3f}" for ratio in row))
    if options.figure:
        from lkv.report.figures import draw_budgets

        draw_budgets(ratios.tolist(), options.retention, options.figure)
        print(f"the picture is in {options.figure}")


def _methods(options: argparse.Namespace) -> None:
    for name in METHODS:
        print(f"{name:18} {describe(name)}")
    print(f"\nAny budget rule goes with any selector, as RULE+SELECTOR.\nrules: {', '.join(RULES)}")
    print(f"selectors: {', '.join(SELECTORS)}, kvzip")


def _train(options: argparse.Namespace) -> None:
    from lkv.training.recipe import train_policy

    chosen = {name: getattr(options, name) for name in _TRAINING_OPTIONS if getattr(options, name) is not None}
    train_policy(replace(PRESETS[options.preset], **chosen), options.model, options.data, options.out, options.init)


if __name__ == "__main__":
    sys.exit(main())
