"""lkv inspect: show a policy's budgets, or the kept tokens of a text."""

import json
import os
import sys
import time
from dataclasses import asdict
from os.path import exists, isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lkv.cli.command import option
from lkv.cli.options import (
    Memory,
    MethodName,
    PolicyOptions,
    PositiveInt,
    Retention,
    RunOptions,
    check_methods,
    find_needs,
    log,
    show_reading,
)
from lkv.errors import DEFAULT_MEMORY, DEFAULT_RETENTION, LkvError
from lkv.policy.shipped import describe_card, named_policy
from lkv.utils.durations import format_duration
from lkv.utils.extras import optional_import

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lkv.context.inspection import MethodAnswer
    from lkv.policy.policy import Policy

_BASELINES = ("snapkv", "streaming-llm")
_PAGE = "of a text"
_OF_A_TEXT = ("--question", "--out", "--memory", "--method", "--against", "--max-new-tokens", "--dtype", "--device")


class Inspect(PolicyOptions, RunOptions):
    """Show a policy's budgets, or the kept tokens of a text."""

    what: str | None = option(
        "a text, to write an HTML page, or a policy (default: the shipped one)",
        positional=True,
        nargs="?",
        metavar="[TEXT | POLICY]",
    )
    json_: bool = option("of a policy: print card and budgets as JSON", False, alias="json")
    figure: Path | None = option("of a policy: draw the budgets into this file")
    retention: Retention | None = option(
        f"of a policy: the average share that its heads keep (default: {DEFAULT_RETENTION}); of a text: what the "
        "answers keep of the KV entries, instead of --memory"
    )
    memory: Memory | None = option(
        "what the answers keep, where the slider starts: 10% of the 16-bit cache's bytes, or 2MB (default: "
        f"{DEFAULT_MEMORY} without --retention)",
        group=_PAGE,
    )
    question: list[str] = option(
        "question that all methods answer; may be repeated", [], append=True, group=_PAGE, metavar="TEXT"
    )
    method: MethodName = option("method whose selection is shown", "lkv", group=_PAGE)
    against: tuple[MethodName, ...] = option("baselines", _BASELINES, nargs="*", group=_PAGE, metavar="METHOD")
    out: Path | None = option("the page (default: the text's name with .html)", group=_PAGE)
    max_new_tokens: PositiveInt = option("tokens of an answer", 64, group=_PAGE)

    @property
    def is_text(self) -> bool:
        """Whether the positional argument is a text, not a policy."""
        return self.what is not None and (self.what == "-" or isfile(self.what))

    @property
    def has_policy(self) -> bool:
        """Whether a policy is given, as an option or as the positional argument."""
        return bool(self.policy or (self.what and not self.is_text))

    def run(self) -> None:
        """Print or draw a policy's budgets, or write the page of a text."""
        if self.what is not None and self.is_text:
            _write_page(self, self.what)
            return
        problem = "none was given" if self.what is None else f"{self.what!r} is not a text file"
        self.refuse_unread(f"lkv inspect without a text ({problem})", *_OF_A_TEXT, advice="give a file")
        _show_budgets(self)


def _show_budgets(options: Inspect) -> None:
    policy = _load_policy(options)
    retention = options.retention or DEFAULT_RETENTION
    ratios = policy.inference_ratios(retention).tolist()
    if options.json_:
        description = {"model": asdict(policy.spec), "inputs": asdict(policy.inputs), "card": policy.card}
        print(json.dumps(description | {"retention": retention, "shares": ratios}, indent=1))
    else:
        print("\n".join(describe_card(policy.spec, policy.card)))
        print(f"\nshare of the tokens that each KV head keeps, on average {retention:g}:")
        for layer, row in enumerate(ratios):
            print(f"layer {layer:3}: " + " ".join(f"{ratio:.3f}" for ratio in row))
    if options.figure:
        draw_budgets(ratios, retention, options.figure)
        print(f"the figure is in {options.figure}", file=sys.stderr)


def draw_budgets(ratios: list[list[float]], retention: float, path: Path) -> None:
    """Write a heat map of the share that each head keeps, layers by KV heads (Fig. 1e), as PNG, PDF or SVG."""
    with optional_import("plots", "--figure"):
        from matplotlib.figure import Figure
    from lkv.utils.files import save_figure

    layers, heads = len(ratios), len(ratios[0])
    figure = Figure(figsize=(max(4.0, 0.28 * layers), 1.2 + 0.35 * heads), layout="constrained")
    axes = figure.subplots()
    by_head = [list(row) for row in zip(*ratios, strict=True)]
    image = axes.imshow(by_head, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
    axes.set_xlabel("layer")
    axes.set_ylabel("KV head")
    axes.set_yticks(range(heads))
    axes.set_title(f"Share of the tokens each head keeps at R = {retention:g}")
    figure.colorbar(image, ax=axes, label="ratio r")
    save_figure(figure, path, LkvError)


def _load_policy(options: Inspect) -> "Policy":
    """Load the policy that is named, or the one shipped for the model."""
    name = options.what or options.policy
    if options.what and options.policy:
        raise LkvError(f"{options.what!r} and --policy both name a policy; leave one of them out.")
    if name is not None and options.model is not None:
        raise LkvError(f"--model selects the policy shipped for it, but {name!r} is given too; leave one of them out.")
    if options.what and "/" not in options.what and not exists(options.what) and named_policy(options.what) is None:
        raise LkvError(
            f"there is no file or folder {name!r}, nor a policy of that name (`lkv policies` lists them); give a text, "
            "or a policy by its folder or Hub id."
        )
    if options.model is None:
        options.refuse_unread("a policy", "--revision", advice="use --policy-revision, or give --model too")
    from lkv.hf.loading import load_model
    from lkv.policy.lookup import default_policy, load_policy

    if name is not None:
        return load_policy(name, options.strict, options.policy_revision)
    if options.model is None:
        return default_policy()
    return default_policy(load_model(options.model, revision=options.revision)[0], name=options.model)


def _write_page(options: Inspect, source: str) -> None:
    from lkv.context.document_reader import STDIN, read_document
    from lkv.methods.registry import FULL, SECOND_PASS
    from lkv.methods.request import CompressionRequest

    if options.json_ or options.figure:
        raise LkvError("--json and --figure show a policy, but a text was given; leave out either.")
    request = CompressionRequest(memory=options.memory, retention=options.retention).with_default_memory()
    if options.method == FULL or SECOND_PASS in find_needs(options.method):
        problem = "keeps everything" if options.method == FULL else "needs a second pass over the text"
        raise LkvError(f"{options.method!r} {problem}, so there is no selection to show; use a one-pass method.")
    if not options.question:
        options.refuse_unread("a page without --question", "--against", "--max-new-tokens")
    methods = [options.method, *(options.against if options.question else ())]
    check_methods(options, methods)
    # A name of any bytes, as UTF-8.
    name = "standard input" if source == STDIN else os.fsencode(Path(source).name).decode(errors="replace")
    out = options.out or Path("stdin.html" if source == STDIN else f"{Path(source).stem}.html")
    if exists(out) and source != STDIN and out.samefile(source):
        raise LkvError(f"the page would overwrite {out} itself; give another name with --out.")
    text = read_document(source)
    from lkv.context.inspection import inspect_text, is_page, render_page
    from lkv.methods.targets import MemoryTarget
    from lkv.utils.files import check_writable_file, strip_parent_dirs, write_text
    from lkv.utils.prompts import encode_context

    check_writable_file(out, LkvError, "the page")
    if isfile(out) and not is_page(out):
        raise LkvError(f"{out} is not a page of lkv inspect and would be overwritten; give another name with --out.")
    policy = options.load_policy()
    model, tokenizer = options.load_model()
    tokens = len(encode_context(tokenizer, text))
    started = time.perf_counter()
    with show_reading(model, tokens, purpose=", to see what every head keeps of them"):
        inspected = inspect_text(model, tokenizer, text, options.method, policy, by_memory=options.retention is None)
    share, budget = request.retention or 0.0, {"retention": request.retention, "memory": request.memory}
    if request.memory is not None:
        share = MemoryTarget.parse(request.memory).share_of(inspected.shape, len(inspected.pieces))
    seconds = time.perf_counter() - started
    answers = _answer(options, model, tokenizer, text, policy, budget, seconds) if options.question else {}
    model_name = strip_parent_dirs(options.model_name)
    write_text(out, render_page(inspected, name, model_name, share, answers), LkvError, "the page")
    log(f"{len(inspected.pieces):,} tokens in {inspected.layers} x {inspected.heads} heads")
    print(f"the page is in {out}")


def _answer(
    options: Inspect,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    policy: "Policy | None",
    budget: "dict[str, Any]",
    seconds: float,
) -> "dict[str, list[MethodAnswer]]":
    """Answer each question with the full cache, the inspected method and the baselines.

    `seconds`: how long the text was read before, for an estimate.
    """
    from lkv.context.compression import compress
    from lkv.context.inspection import MethodAnswer
    from lkv.methods.registry import FULL, POLICY, method_label
    from lkv.utils.progress import ProgressBar

    answers: dict[str, list[MethodAnswer]] = {question: [] for question in options.question}
    methods = tuple(dict.fromkeys((FULL, options.method, *options.against)))
    log(
        f"{len(answers)} question{'s' * (len(answers) > 1)}, {len(methods)} methods: each reads the text again, "
        f"{format_duration(seconds)}, and writes up to {options.max_new_tokens} tokens an answer"
    )
    for method in ProgressBar(methods, desc="answering", unit=" methods", leave=False):
        context = compress(
            model,
            tokenizer,
            text,
            method=method,
            policy=policy if POLICY in find_needs(method) else None,
            **({} if method == FULL else budget),
        )
        title = "Full cache" if method == FULL else method_label(method)
        size = (title, context.realised_retention(), context.nbytes(), context.full_nbytes())
        for question, row in answers.items():
            row.append(MethodAnswer(*size, context.ask(question, options.max_new_tokens)))
    return answers
