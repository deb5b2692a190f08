"""lkv ask: a question about a text file, answered from a compressed cache."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from lkv.commands.options import add_model, add_policy, add_revision, positive
from lkv.errors import LkvError, check_retention


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("file", type=Path)
    parser.add_argument("question")
    parser.add_argument("--retention", type=float, default=0.15, help="share of the cache to keep, in (0, 1]")
    parser.add_argument("--method", default="lkv", help="a name that `lkv methods` lists, or full")
    add_model(parser)
    add_revision(parser)
    add_policy(parser)
    parser.add_argument("--pattern", type=Path, default=None, help="DuoAttention's full_attention_heads.tsv (rule duo)")
    parser.add_argument("--max-new-tokens", type=positive, default=None, help="(default: 128 at most)")


def run(options: argparse.Namespace) -> None:
    """Read the text, compress it, and stream the answer; raises LkvError for what the user can mend."""
    from lkv.context import check_text, compress
    from lkv.host.attention import attach
    from lkv.methods.budget import read_pattern
    from lkv.methods.catalogue import FULL, find
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
    policy = load_policy(options.policy, options.strict, options.policy_revision) if options.policy else None
    model, tokenizer = load_model(options.model or DEFAULT, revision=options.revision)
    spec = attach(model).spec
    extra: dict[str, Any] = {"pattern": read_pattern(options.pattern, spec.layers, spec.kv_heads)} if duo else {}
    started = time.perf_counter()
    retention = None if options.method == FULL else options.retention
    context = compress(model, tokenizer, text, options.method, retention, policy, **extra)
    seconds = time.perf_counter() - started
    asked = 1.0 if options.method == FULL else options.retention
    print(
        f"[{context.tokens} tokens read in {seconds:.1f} s; {context.realised_retention():.4f} of the entries kept, "
        f"{asked:g} asked for; {context.nbytes():,} of {context.full_nbytes():,} bytes of k and v held]",
        file=sys.stderr,
    )
    context.ask(options.question, options.max_new_tokens, stream=True)
