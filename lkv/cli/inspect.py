"""lkv inspect: show a policy's budgets, or what is kept of a text."""

import json
import sys
from os.path import exists, isfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from lkv.cli.arguments import Argument, Command
from lkv.cli.options import (
    DeviceOptions,
    ModelOptions,
    PolicyOptions,
    PositiveInt,
    Retention,
    check_methods,
    check_names,
    check_policy_options,
    find_needs,
)
from lkv.config import asdict
from lkv.errors import LkvError
from lkv.policy.shipped import describe_card, shipped_policies

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lkv.context.inspection import MethodAnswer
    from lkv.policy.policy import Policy

_BASELINES = ("snapkv", "streaming-llm")
_PAGE = Argument(group="of a text")


class Inspect(PolicyOptions, ModelOptions, DeviceOptions, Command):
    """Show a policy's budgets, or what is kept of a text."""

    what: Annotated[str | None, Argument(positional=True, nargs="?", metavar="[TEXT | POLICY]")] = Field(
        default=None, description="a text, to write an HTML page, or a policy (default: the shipped one)"
    )
    retention: Retention = Field(
        default=0.15, description="fraction of the KV cache to keep; where the page's slider starts"
    )
    json_: bool = Field(default=False, alias="json", description="of a policy: print card and budgets as JSON")
    figure: Path | None = Field(default=None, description="of a policy: draw the budgets into this file")
    question: Annotated[list[str], Argument(append=True, group="of a text", metavar="TEXT")] = Field(
        default=[], description="question that all methods answer; may be repeated"
    )
    method: Annotated[str, _PAGE] = Field(default="lkv", description="method whose selection is shown")
    against: Annotated[tuple[str, ...], Argument(nargs="*", group="of a text", metavar="METHOD")] = Field(
        default=_BASELINES, description="baselines"
    )
    out: Annotated[Path | None, _PAGE] = Field(
        default=None, description="the page (default: the text's name with .html)"
    )
    max_new_tokens: Annotated[PositiveInt, _PAGE] = Field(default=64, description="tokens of an answer")

    def run(self) -> None:
        """Print or draw a policy's budgets, or write the page of a text."""
        if self.what is not None and (self.what == "-" or isfile(self.what)):
            _check_page(self)
            _write_page(self, self.what)
        elif self.question or self.out:
            problem = "none was given" if self.what is None else f"{self.what!r} does not exist"
            raise LkvError(f"--question and --out need a text, but {problem}; give a file.")
        else:
            _show_budgets(self)


def _show_budgets(options: Inspect) -> None:
    policy = _load_policy(options)
    ratios = policy.inference_ratios(options.retention).tolist()
    if options.json_:
        description = {"model": asdict(policy.spec), "inputs": asdict(policy.inputs), "card": policy.card}
        print(json.dumps(description | {"retention": options.retention, "shares": ratios}, indent=1))
    else:
        print("\n".join(_describe_card(policy)))
        print(f"\nshare of the tokens that each KV head keeps, on average {options.retention:g}:")
        for layer, row in enumerate(ratios):
            print(f"layer {layer:3}: " + " ".join(f"{ratio:.3f}" for ratio in row))
    if options.figure:
        from lkv.evaluation.report.figures import draw_budgets

        draw_budgets(ratios, options.retention, options.figure)
        print(f"the figure is in {options.figure}", file=sys.stderr)


def _load_policy(options: Inspect) -> "Policy":
    """Load the policy that is named, or the one shipped for the model."""
    name = options.what or options.policy
    if name is not None and options.model is not None:
        raise LkvError(f"--model selects the policy shipped for it, but {name!r} is given too; leave one of them out.")
    names = [policy.name for policy in shipped_policies()]
    if options.what and "/" not in options.what and not exists(options.what) and options.what not in names:
        raise LkvError(
            f"there is no file or folder {name!r}, nor a shipped policy of that name (`lkv policies` lists them); "
            "give a text, or a policy by its folder or Hub id."
        )
    if name is None:
        check_policy_options(options)
    from lkv.models.loading import load_model
    from lkv.policy.lookup import default_policy, load_policy

    if name is not None:
        return load_policy(name, options.strict, options.policy_revision)
    if options.model is None:
        return default_policy()
    return default_policy(load_model(options.model, revision=options.revision)[0])


def _describe_card(policy: "Policy") -> list[str]:
    """Return the card's lines, or its JSON where `lkv train` did not write it."""
    try:
        return describe_card(policy.spec, policy.card)
    except (AttributeError, KeyError, TypeError, ValueError):
        return [f"model     {policy.spec.architecture}", "card      " + json.dumps(policy.card)]


def _check_page(options: Inspect) -> None:
    from lkv.methods.registry import FULL, SECOND_PASS

    check_policy_options(options)
    check_names([options.method, *options.against])
    if options.json_ or options.figure:
        raise LkvError("--json and --figure show a policy, but a text was given; leave out either.")
    if options.method == FULL or SECOND_PASS in find_needs(options.method):
        problem = "keeps everything" if options.method == FULL else "needs a second pass over the text"
        raise LkvError(f"{options.method!r} {problem}, so there is no selection to show; use a one-pass method.")
    check_methods([options.method, *(options.against if options.question else ())], takes_pattern=False)


def _write_page(options: Inspect, source: str) -> None:
    from lkv.context.documents import STDIN, read_document

    name = "standard input" if source == STDIN else Path(source).name
    out = options.out or Path("stdin.html" if source == STDIN else f"{Path(source).stem}.html")
    if exists(out) and source != STDIN and out.samefile(source):
        raise LkvError(f"the page would overwrite {out} itself; give another name with --out.")
    text = read_document(source)
    from lkv.context.inspection import inspect_text, render_page
    from lkv.models.loading import DEFAULT, load_model
    from lkv.policy.lookup import load_policy
    from lkv.utils.devices import on_device, torch_dtype
    from lkv.utils.files import check_writable_file, write_text

    check_writable_file(out, LkvError, "the page")
    policy = load_policy(options.policy, options.strict, options.policy_revision) if options.policy else None
    model_name = options.model or DEFAULT
    model, tokenizer = load_model(model_name, torch_dtype(options.dtype), options.revision)
    model = on_device(model, options.device)
    _log("reading the text, to see what every head keeps of it")
    inspected = inspect_text(model, tokenizer, text, options.method, policy)
    answers = _answer(options, model, tokenizer, text, policy) if options.question else {}
    shown = Path(model_name).name if exists(model_name) else model_name
    write_text(out, render_page(inspected, name, shown, options.retention, answers), LkvError, "the page")
    _log(f"{len(inspected.pieces):,} tokens in {inspected.layers} x {inspected.heads} heads")
    print(f"the page is in {out}")


def _answer(
    options: Inspect,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    policy: "Policy | None",
) -> "dict[str, list[MethodAnswer]]":
    """Answer each question with the full cache, the inspected method and the baselines."""
    from lkv.context.context import compress
    from lkv.context.inspection import MethodAnswer
    from lkv.methods.registry import FULL, POLICY, method_label

    answers: dict[str, list[MethodAnswer]] = {question: [] for question in options.question}
    for method in dict.fromkeys((FULL, options.method, *options.against)):
        title = "Full cache" if method == FULL else method_label(method)
        _log(f"{title}: reading, then {len(answers)} answer{'s' * (len(answers) > 1)}")
        context = compress(
            model,
            tokenizer,
            text,
            method=method,
            retention=None if method == FULL else options.retention,
            policy=policy if POLICY in find_needs(method) else None,
        )
        kept = (title, context.realised_retention(), context.nbytes(), context.full_nbytes())
        for question, row in answers.items():
            row.append(MethodAnswer(*kept, context.ask(question, options.max_new_tokens)))
    return answers


def _log(line: str) -> None:
    print(f"[{line}]", file=sys.stderr, flush=True)


COMMAND = Inspect
