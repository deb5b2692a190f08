"""lkv inspect: what a policy learned, or what is kept of a text."""

import argparse
import json
import sys
from os.path import exists, isfile
from pathlib import Path
from typing import Any

from lkv.cli.options import add_device, add_dtype, add_model, add_policy, add_revision, check_policy, positive
from lkv.config import asdict
from lkv.errors import LkvError, check_retention
from lkv.policy.shipped import card_lines, shipped

_RIVALS = ("snapkv", "streaming-llm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "what", nargs="?", default=None, help="a text (then a page is written), or a policy (default: the shipped one)"
    )
    parser.add_argument("--retention", type=float, default=0.15, help="where the page's slider starts (default: 0.15)")
    parser.add_argument("--json", action="store_true", help="a policy's whole card and budgets as one JSON object")
    parser.add_argument("--figure", type=Path, default=None, help="write a policy's budgets as a picture")
    page = parser.add_argument_group("of a text")
    page.add_argument("--question", action="append", default=[], help="answered by all methods; may be given again")
    page.add_argument("--method", default="lkv", help="whose choice is shown (default: lkv)")
    page.add_argument("--against", nargs="*", default=_RIVALS, help=f"rivals (default: {' '.join(_RIVALS)})")
    page.add_argument("--out", type=Path, default=None, help="the page (default: the text's name with .html)")
    page.add_argument("--max-new-tokens", type=positive, default=64, help="of an answer (default: 64)")
    add_model(page)
    add_revision(page)
    add_policy(page)
    add_dtype(page)
    add_device(page)


def run(options: argparse.Namespace) -> None:
    """Print or draw a policy's budgets, or write the page of a text."""
    check_retention(options.retention)
    if options.what is not None and (options.what == "-" or isfile(options.what)):
        _check_page(options)
        _page(options)
    elif options.question or options.out:
        why = "none was given" if options.what is None else f"there is no file {options.what!r}"
        raise LkvError(f"questions and pages are of a text, but {why}; give one.")
    else:
        _budgets(options)


def _budgets(options: argparse.Namespace) -> None:
    policy = _policy(options)
    shares = policy.inference_ratios(options.retention).tolist()
    if options.json:
        about = {"model": asdict(policy.spec), "inputs": asdict(policy.inputs), "card": policy.card}
        print(json.dumps(about | {"retention": options.retention, "shares": shares}, indent=1))
    else:
        print("\n".join(_told(policy)))
        print(f"\nshare of the tokens that each KV head keeps, on average {options.retention:g}:")
        for layer, row in enumerate(shares):
            print(f"layer {layer:3}: " + " ".join(f"{share:.3f}" for share in row))
    if options.figure:
        from lkv.evaluation.report.figures import draw_budgets

        draw_budgets(shares, options.retention, options.figure)
        print(f"the picture is in {options.figure}", file=sys.stderr)


def _policy(options: argparse.Namespace) -> Any:
    """The policy that is named, or the one shipped for the model."""
    from lkv.models.loading import load_model
    from lkv.policy.lookup import default_policy, load_policy

    name = options.what or options.policy
    if name is None:
        check_policy(options)
        if options.model is None:
            return default_policy()
        return default_policy(load_model(options.model, revision=options.revision)[0])
    if options.model is not None:
        raise LkvError(f"--model asks for the policy shipped for it, but {name!r} is named; leave one of them out.")
    if options.what and "/" not in name and not exists(name) and name not in [entry.name for entry in shipped()]:
        raise LkvError(
            f"there is no file or folder {name!r}, nor is a policy of that name shipped (`lkv policies` lists them); "
            "give a text, or a policy by its folder or hub id."
        )
    return load_policy(name, options.strict, options.policy_revision)


def _told(policy: Any) -> list[str]:
    """What the card says, as JSON where it is not of the form that `lkv train` writes."""
    try:
        return card_lines(policy.spec, policy.card)
    except (AttributeError, KeyError, TypeError, ValueError):
        return [f"model     {policy.spec.architecture}", "card      " + json.dumps(policy.card)]


def _check_page(options: argparse.Namespace) -> None:
    """Raise LkvError for what cannot be shown of a text, before anything is loaded."""
    from lkv.methods.registry import FULL, parse_method

    check_policy(options)
    if options.json or options.figure:
        raise LkvError("--json and --figure are of a policy, but a text was given; leave out these, or the text.")
    if options.method == FULL or parse_method(options.method).needs_second_pass:
        why = "keeps everything" if options.method == FULL else "sees all layers before it keeps anything"
        raise LkvError(f"{options.method!r} {why}; look at a method that goes by layers.")
    for method in (options.method, *(options.against if options.question else ())):
        if method != FULL and parse_method(method).needs_pattern:
            raise LkvError(f"{method!r} needs a pattern of retrieval heads, which a page takes none of; leave it out.")


def _page(options: argparse.Namespace) -> None:
    from lkv.context.documents import STDIN, read_document
    from lkv.context.inspection import inspect_text, render_page
    from lkv.models.loading import DEFAULT, load_model
    from lkv.policy.lookup import load_policy
    from lkv.utils.devices import on_device, torch_dtype
    from lkv.utils.files import check_writable_file, write_text

    name = "standard input" if options.what == STDIN else Path(options.what).name
    out = options.out or Path("stdin.html" if options.what == STDIN else f"{Path(options.what).stem}.html")
    if exists(out) and options.what != STDIN and out.samefile(options.what):
        raise LkvError(f"the page would take the place of {out} itself; give another name with --out.")
    check_writable_file(out, LkvError, "the page")
    text = read_document(options.what)
    policy = load_policy(options.policy, options.strict, options.policy_revision) if options.policy else None
    chosen = options.model or DEFAULT
    model, tokenizer = load_model(chosen, torch_dtype(options.dtype), options.revision)
    model = on_device(model, options.device)
    _tell("reading the text, to see what every head keeps of it")
    inspected = inspect_text(model, tokenizer, text, options.method, policy)
    answers = _answers(options, model, tokenizer, text, policy) if options.question else {}
    shown = Path(chosen).name if exists(chosen) else chosen
    write_text(out, render_page(inspected, name, shown, options.retention, answers), LkvError, "the page")
    _tell(f"{len(inspected.pieces):,} tokens in {inspected.layers} x {inspected.heads} heads")
    print(f"the page is in {out}")


def _tell(line: str) -> None:
    """To whoever waits."""
    print(f"[{line}]", file=sys.stderr, flush=True)


def _answers(options: argparse.Namespace, model: Any, tokenizer: Any, text: str, policy: Any) -> dict[str, list[Any]]:
    """Each question answered by the full cache, the method looked at, and its rivals."""
    from lkv.context.context import compress
    from lkv.context.inspection import MethodAnswer
    from lkv.methods.registry import FULL, method_label, parse_method

    answers: dict[str, list[MethodAnswer]] = {question: [] for question in options.question}
    for method in dict.fromkeys((FULL, options.method, *options.against)):
        retention = None if method == FULL else options.retention
        learned = policy if method != FULL and parse_method(method).needs_policy else None
        shown = "Full cache" if method == FULL else method_label(method)
        _tell(f"{shown}: reading, then {len(answers)} answer{'s' * (len(answers) > 1)}")
        context = compress(model, tokenizer, text, method=method, retention=retention, policy=learned)
        held = (shown, context.realised_retention(), context.nbytes(), context.full_nbytes())
        for question, given in answers.items():
            given.append(MethodAnswer(*held, context.ask(question, options.max_new_tokens)))
    return answers
