"""lkv eval: methods side by side on RULER or LongBench."""

import argparse
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from os.path import exists
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lkv.cli.options import add_model, add_policy_revision, add_revision, check_policy, positive
from lkv.errors import LkvError, check_retention
from lkv.evaluation.example import PROTOCOLS, Example

SUITES = ("ruler", "longbench")
_RULER_SAMPLES = 50
LADDER = [0.5, 0.25, 0.125, 0.0625]
PRESETS = {"kvpress": [0.9, 0.75, 0.5, 0.25, 0.1]}  # what its leaderboard keeps: 1 - compression_ratio
_PIECE = 4096  # tokens of a piece of the text, for a pattern as kvpress estimates it
_ESTIMATES = ("attention", "kvpress")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--data", type=Path, default=None, help="folder with the sources (default: from the hub)")
    parser.add_argument("--haystack", type=Path, default=None, help="RULER: text file, or folder of them, for needles")
    parser.add_argument("--tasks", nargs="+", default=None, help="(default: all)")
    parser.add_argument(
        "--lengths", nargs="+", type=positive, default=[4096], help="RULER: tokens, prompt and answer (default: 4096)"
    )
    parser.add_argument("--samples", type=positive, default=None, help=f"a task (RULER: {_RULER_SAMPLES}, else all)")
    parser.add_argument(
        "--methods", nargs="+", default=["lkv", "snapkv"], help="of `lkv methods` (default: lkv snapkv)"
    )
    parser.add_argument("--retention", nargs="+", type=float, default=None, help="shares to keep (default: 0.15)")
    parser.add_argument("--protocol", choices=PROTOCOLS, default=None, help="how prompts are made (default: kvpress)")
    add_model(parser)
    add_revision(parser)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default=None,
        help="of the model (default: float32 if embedded, else as stored)",
    )
    parser.add_argument(
        "--policy",
        nargs="+",
        default=None,
        metavar="[NAME=]PATH",
        help="folder or hub id (default: the one shipped); several, each with a name, are measured side by side",
    )
    add_policy_revision(parser)
    parser.add_argument(
        "--no-strict", dest="strict", action="store_false", help="warn, not refuse, if --policy was trained for others"
    )
    parser.add_argument(
        "--ladder", action="store_const", dest="retention", const=LADDER, help="retentions 0.5, 0.25, 0.125, 0.0625"
    )
    parser.add_argument("--preset", choices=PRESETS, default=None, help="retentions and protocol of a leaderboard")
    parser.add_argument("--pattern", type=Path, default=None, help="for duo: full_attention_heads.tsv, or a long text")
    parser.add_argument(
        "--pattern-by",
        choices=_ESTIMATES,
        default=_ESTIMATES[0],
        help="how a text's pattern is estimated: attention outside the window, or as kvpress does it",
    )
    parser.add_argument("--seed", type=int, default=0, help="RULER: another makes other samples (default: 0)")
    parser.add_argument(
        "--rows-at-once", type=positive, default=64, help="methods x retentions held at a time (default: 64)"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; a run that was interrupted goes on")


def run(options: argparse.Namespace) -> None:
    """Measure what is asked for, and print the table of it."""
    from lkv.utils.extras import require

    require("evals", "lkv eval")
    import torch

    from lkv.evaluation.runner import EvaluationConfig, distributed_state, evaluate
    from lkv.integrations.transformers.attention import patch_attention
    from lkv.methods.registry import FULL, parse_method
    from lkv.models.loading import DEFAULT, load_model
    from lkv.policy.lookup import load_policy, policy_for
    from lkv.utils.files import check_writable_file

    # What is wrong with the command is told before a model is loaded.
    check_writable_file(options.out, LkvError, "the samples")
    tasks = _tasks(options.suite, options.tasks)
    if options.preset and (options.retention or options.protocol):
        raise LkvError("--preset says what is kept and how prompts are made; leave --retention and --protocol out.")
    check_policy(options)
    options.protocol = options.protocol or options.preset or PROTOCOLS[0]
    options.retention = options.retention or PRESETS.get(options.preset, [0.15])
    paths = _policies(options.policy)
    options.methods = _of_each(options.methods, [name for name in paths if name])
    for name in options.methods:
        if name != FULL:
            parse_method(name)
    for retention in options.retention:
        check_retention(retention)
    if options.pattern is None and any(parse_method(name).needs_pattern for name in options.methods if name != FULL):
        raise LkvError(
            "DuoAttention must know the retrieval heads of the model: give --pattern with a full_attention_heads.tsv, "
            "or with a long text file to estimate them from."
        )
    examples = _longbench(options, tasks) if options.suite == "longbench" else _ruler(options, tasks)
    needed = any(parse_method(name).needs_policy for name in options.methods if name != FULL)
    revision = options.policy_revision
    loaded = {name: load_policy(path, options.strict, revision) for name, path in paths.items()} if needed else {}
    policy = loaded.pop("", None)
    state = distributed_state()
    name = options.model or DEFAULT
    model, tokenizer = load_model(name, getattr(torch, options.dtype) if options.dtype else None, options.revision)
    model.to(state.device)
    spec = patch_attention(model).spec
    if needed and policy is None and not loaded:
        policy = policy_for(spec)
    limit = spec.max_positions
    if options.suite == "ruler" and max(options.lengths) > limit:
        raise LkvError(f"a length of {max(options.lengths)} is asked for, but {name} reads {limit} tokens at most.")
    pattern = _pattern(options.pattern, model, tokenizer, options.pattern_by) if options.pattern else None
    config = EvaluationConfig(
        options.methods,
        options.retention,
        options.protocol,
        policy,
        loaded,
        pattern,
        pattern_source=_pattern_from(options.pattern, options.pattern_by) if options.pattern else None,
        model_name=Path(name).name if exists(name) else name,
        seed=options.seed,
        max_rows=options.rows_at_once,
    )
    # Of every task the first, then of every task the second: an interrupted run has some of each.
    ordered = sorted(examples(tokenizer), key=lambda example: example.number)
    evaluate(model, tokenizer, ordered, config, options.out)
    if state.is_main_process:
        _print_table(options.out)
    state.destroy_process_group()


def _policies(given: Sequence[str] | None) -> dict[str, str]:
    """Paths by name; one without a name has the name "". Raises LkvError where several are not told apart."""
    pairs = [("", text) if exists(text) else _split(text) for text in given or ()]
    named = dict(pairs)
    if len(named) < len(pairs) or (len(pairs) > 1 and "" in named):
        raise LkvError("several policies are told apart by names: give --policy first=PATH second=PATH.")
    if bad := [name for name in named if set(name) & set("@+ ")]:
        raise LkvError(f"the policy's name {bad[0]!r} holds a space, '@' or '+'; give another.")
    return named


def _split(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    return (name, path) if equals else ("", text)


def _of_each(methods: Sequence[str], names: Sequence[str]) -> list[str]:
    """Methods that read a policy once for each of `names`."""
    from lkv.methods.registry import FULL, parse_method

    named: list[str] = []
    for method in methods:
        several = names and method != FULL and parse_method(method).needs_policy
        named += [f"{method}@{name}" for name in names] if several else [method]
    return named


def _tasks(suite: str, tasks: Sequence[str] | None) -> Sequence[str]:
    from lkv.evaluation import longbench, ruler

    known = ruler.TASKS if suite == "ruler" else longbench.TASKS
    for task in tasks or ():
        if task not in known:
            near = get_close_matches(task, known, n=2) or known
            raise LkvError(f"{suite} has no task {task!r}; did you mean {' or '.join(map(repr, near))}?")
    return tasks or known


def _longbench(options: argparse.Namespace, tasks: Sequence[str]) -> Callable[[Any], list[Example]]:
    """What makes the examples for a tokenizer; they are read now."""
    from lkv.evaluation.longbench import load_examples

    examples = [example for task in tasks for example in load_examples(task, options.data, options.samples)]
    return lambda tokenizer: examples


def _ruler(options: argparse.Namespace, tasks: Sequence[str]) -> Callable[[Any], list[Example]]:
    """What makes the examples for a tokenizer; their sources are read now."""
    from lkv.evaluation import ruler

    if options.haystack and not exists(options.haystack):
        raise LkvError(f"there is no {options.haystack}; give a text file or a folder of .txt files with --haystack.")
    if options.data:
        sources = ruler.Sources.from_folder(options.data, options.haystack)
    else:
        sources = ruler.Sources(options.haystack)
    ruler.check_sources(tasks, sources)
    count = options.samples or _RULER_SAMPLES

    def make(tokenizer: Any) -> list[Example]:
        wanted = [(length, task) for length in dict.fromkeys(options.lengths) for task in dict.fromkeys(tasks)]
        return [
            example
            for length, task in tqdm(wanted, desc="making the samples", leave=False)
            for example in ruler.make_examples(task, length, count, tokenizer, sources, options.seed)
        ]

    return make


def _pattern(path: Path, model: Any, tokenizer: Any, by: str) -> list[list[float]]:
    """DuoAttention's alphas from a pattern file, or estimated once on a text."""
    from lkv.integrations.transformers.attention import patch_attention
    from lkv.methods.budgets import estimate_mean_pattern, estimate_pattern, read_pattern
    from lkv.utils.prompts import encode_context

    spec = patch_attention(model).spec
    if path.suffix == ".tsv":
        return read_pattern(path, spec.layers, spec.kv_heads)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LkvError(f"{path} cannot be read as text ({error}); give a .tsv file or a UTF-8 text file.") from error
    ids = encode_context(tokenizer, text)[: spec.max_positions]
    if by == "attention":
        return estimate_pattern(model, [ids])
    # The mean of several texts, as there: pieces of the one that is given.
    return estimate_mean_pattern(model, [ids[start : start + _PIECE] for start in range(0, len(ids), _PIECE)])


def _pattern_from(path: Path, by: str) -> str:
    """Where the pattern is from, for tables: the file's name, never its place."""
    if path.suffix == ".tsv":
        return f"read from {path.name}, as DuoAttention's authors publish theirs"
    ways = {"attention": "by the attention that a window would miss", "kvpress": "as kvpress does, by mean q and k"}
    return f"estimated on {path.name}, {ways[by]}"


def _print_table(path: Path) -> None:
    """What `lkv report` shows of the file."""
    from lkv.evaluation.report.builders import TableRequest, build_table
    from lkv.evaluation.report.results import read_results
    from lkv.evaluation.report.tables import to_terminal

    results = read_results([path])
    table = "main" if len(results.header["retentions"]) == 1 else "sweep"
    print(to_terminal(build_table(table, results, TableRequest())), end="")
