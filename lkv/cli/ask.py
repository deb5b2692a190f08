"""lkv ask: questions about a document, answered from a compressed cache."""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lkv.cli.options import add_device, add_dtype, add_model, add_policy, add_revision, check_policy, positive
from lkv.errors import LkvError, check_retention

if TYPE_CHECKING:
    from lkv.context.chat import Chat
    from lkv.context.context import Context

_PART = 1024  # tokens that streaming reads at a time, unless --chunk says otherwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FILE QUESTION",
        help="text, Markdown, HTML or PDF, or - for stdin (none with --load); then questions, or none for a chat",
    )
    parser.add_argument("--retention", type=float, default=None, help="share of the cache to keep (default: 0.15)")
    parser.add_argument("--method", default=None, help="a name that `lkv methods` lists, or full (default: lkv)")
    add_model(parser)
    add_revision(parser)
    add_policy(parser)
    add_dtype(parser)
    add_device(parser)
    parser.add_argument("--pattern", type=Path, default=None, help="DuoAttention's full_attention_heads.tsv (rule duo)")
    parser.add_argument("--chunk", type=positive, default=None, help="read the text in parts of that many tokens")
    parser.add_argument("--streaming", action="store_true", help="evict after every part: for texts too long to hold")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=None, help="hold what is kept in so many bits")
    parser.add_argument("--save", type=Path, default=None, help="write the compressed text to this file")
    parser.add_argument("--load", type=Path, default=None, help="go on from a file of --save, instead of FILE")
    parser.add_argument("--max-new-tokens", type=positive, default=None, help="(default: 128 at most)")


def run(options: argparse.Namespace) -> None:
    """Read and compress the document, or load it, then answer; raises LkvError for what the user can mend."""
    from lkv.context.context import check_text
    from lkv.utils.files import check_writable_file

    _check(options)
    questions = options.words[0 if options.load else 1 :]
    for question in questions:
        check_text(question, "the question", "ask something about the text")
    if options.save:
        check_writable_file(options.save, LkvError, "the compressed text")
    context = _loaded(options) if options.load else _compressed(options)
    if options.save:
        context.save(options.save)
        print(f"[saved to {options.save}, {options.save.stat().st_size / 1e6:.1f} MB]", file=sys.stderr)
    for question in questions:
        if len(questions) > 1:
            print(f"\n> {question}", flush=True)
        context.ask(question, options.max_new_tokens, stream=True)
        _tell_if_cut_off(context)
    if not questions and (not options.save or sys.stdin.isatty()):
        _talk(context, options.max_new_tokens)


def _check(options: argparse.Namespace) -> None:
    """Raise LkvError for options that do not go together, before anything is loaded."""
    from lkv.methods.registry import FULL, parse_method

    compressing = ("retention", "method", "policy", "pattern", "chunk", "bits")
    given = [f"--{name}" for name in compressing if getattr(options, name) is not None] + [
        "--streaming"
    ] * options.streaming
    check_policy(options)
    if options.load and options.words and isfile(options.words[0]):
        raise LkvError(f"--load reads the text that was saved, instead of FILE; leave {options.words[0]} out.")
    if options.load and given:
        raise LkvError(f"what --load reads is compressed already; leave {' and '.join(given)} out.")
    if not options.load and not options.words:
        raise LkvError("give a file to read (or - for stdin), or --load with one that --save wrote.")
    if options.words[:1] == ["-"] and not options.load and not options.words[1:] and not options.save:
        raise LkvError("with the text on stdin there is no room for a chat there; give the question too.")
    if options.save and options.method == FULL:
        raise LkvError(f"the uncompressed cache of {FULL!r} is not saved; leave --save out, or use another method.")
    if options.retention is not None:
        check_retention(options.retention)
    duo = options.method not in (None, FULL) and parse_method(options.method).needs_pattern
    if duo != (options.pattern is not None):
        wanted = "needs --pattern FILE" if duo else "takes no --pattern, which is for the rule duo"
        raise LkvError(f"the method {options.method or 'lkv'!r} {wanted}; `lkv methods` says what each method needs.")


def _model(options: argparse.Namespace) -> tuple[Any, Any]:
    from lkv.models.loading import DEFAULT, load_model
    from lkv.utils.devices import on_device, torch_dtype

    model, tokenizer = load_model(options.model or DEFAULT, torch_dtype(options.dtype), options.revision)
    return on_device(model, options.device), tokenizer


def _loaded(options: argparse.Namespace) -> "Context":
    from lkv.context.context import Context

    context = Context.load(options.load, *_model(options))
    print(f"[{context.tokens:,} tokens loaded; {_held(context)}]", file=sys.stderr)
    return context


def _compressed(options: argparse.Namespace) -> "Context":
    from lkv.context.context import compress
    from lkv.context.documents import read_document
    from lkv.integrations.transformers.attention import patch_attention
    from lkv.methods.budgets import read_pattern
    from lkv.methods.registry import FULL
    from lkv.policy.lookup import load_policy
    from lkv.utils.prompts import encode_context

    text = read_document(options.words[0])
    policy = load_policy(options.policy, options.strict, options.policy_revision) if options.policy else None
    model, tokenizer = _model(options)
    spec = patch_attention(model).spec
    extra: dict[str, Any] = {"bits": options.bits} if options.bits else {}
    if options.pattern:
        extra["pattern"] = read_pattern(options.pattern, spec.layers, spec.kv_heads)
    if options.streaming:
        extra["streaming"] = True
    method = options.method or "lkv"
    retention = None if method == FULL else options.retention or 0.15
    chunk = options.chunk or (_PART if options.streaming else None)
    started = time.perf_counter()
    with _progress(model, len(encode_context(tokenizer, text))):
        context = compress(
            model, tokenizer, text, method=method, retention=retention, policy=policy, chunk=chunk, **extra
        )
    seconds = time.perf_counter() - started
    print(
        f"[{context.tokens:,} tokens read in {seconds:.1f} s, {context.tokens / seconds:,.0f} a second; "
        f"{context.realised_retention():.4f} of the entries kept, {retention or 1.0:g} asked for; {_held(context)}]",
        file=sys.stderr,
    )
    return context


def _held(context: "Context") -> str:
    """Bytes of k and v held of those of the full cache, slack included."""
    held, full = context.nbytes(), context.full_nbytes()
    return f"held {held / 1e6:.1f} of {full / 1e6:.1f} MB ({held / full:.3f})"


@contextmanager
def _progress(model: Any, tokens: int) -> Iterator[None]:
    """A bar of the tokens read, a second and left, while the block reads them; none where stderr is no terminal."""
    from tqdm import tqdm

    from lkv.integrations.transformers.progress import report_progress

    form = "{desc} {percentage:3.0f}% |{bar}| {n:,.0f} of {total:,} tokens, {rate_fmt}, {remaining} left"
    with tqdm(total=tokens, desc="reading", unit=" tokens", bar_format=form, leave=False, disable=None) as bar:

        def passed(count: float) -> None:
            bar.update(min(count, tokens - bar.n))  # a second pass over the text counts no more

        with report_progress(model, passed):
            yield


def _tell_if_cut_off(answers: "Context | Chat") -> None:
    if answers.is_truncated:
        print(f"[cut off after {answers.answer_tokens:,} tokens; --max-new-tokens allows more]", file=sys.stderr)


def _talk(context: "Context", max_new_tokens: int | None) -> None:
    """A chat: each question follows those before it, where the cache can hold turns."""
    from lkv.context.chat import Chat
    from lkv.errors import CacheError

    try:
        answers: Chat | Context = Chat(context)
    except CacheError:
        answers = context
        print("[each question starts from the text alone: this cache holds no turns]", file=sys.stderr)
    for question in _typed():
        try:
            for piece in answers.stream(question, max_new_tokens):
                print(piece, end="", flush=True)
            print()
            _tell_if_cut_off(answers)
        except LkvError as problem:
            if not sys.stdin.isatty():
                raise
            print(f"lkv: {problem}", file=sys.stderr)  # the turns so far are as they were


def _typed() -> Iterator[str]:
    """Questions typed one after another, until the input ends or an empty line comes from a terminal."""
    prompt = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - the arrow keys edit and recall lines

        print("Ask about the text; Ctrl-D ends.", file=sys.stderr)
        prompt = "> "
    while True:
        try:
            question = input(prompt)
        except EOFError:
            return
        if question.strip():
            yield question
