"""lkv eval: measure methods side by side on RULER or LongBench."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from os.path import exists
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lkv.cli.command import option
from lkv.cli.options import (
    GPU_DEVICE,
    PATTERN_FILE,
    Memory,
    MethodName,
    PolicyOptions,
    PositiveInt,
    Retention,
    RunOptions,
    check_methods,
    check_policy_exists,
    find_needs,
    load_pattern,
)
from lkv.errors import DEFAULT_RETENTION, LkvError
from lkv.evaluation.example import PROTOCOLS, Example
from lkv.methods.targets import MemoryTarget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lkv.policy.policy import Policy

_RULER_SAMPLES, _RULER_LENGTH = 50, 4096
LADDER = (0.5, 0.25, 0.125, 0.0625)
PRESETS = {"kvpress": (0.9, 0.75, 0.5, 0.25, 0.1)}  # retentions of its leaderboard, 1 - compression_ratio
_PATTERN_SOURCES = {
    "attention": "by the attention that a window would miss",
    "kvpress": "as kvpress does, by mean q and k",
}
_Protocol = Literal[tuple(PROTOCOLS)]  # type: ignore[valid-type]


class Eval(PolicyOptions, RunOptions):
    """Measure methods on RULER or LongBench, or resume a measurement."""

    suite: Literal["ruler", "longbench"] = option("benchmark", ..., positional=True)
    data: Path | None = option("folder with the sources (default: from the Hub)")
    haystack: Path | None = option("RULER: text file, or folder of them, to hide needles in")
    tasks: tuple[str, ...] = option("tasks (default: all)", ())
    lengths: tuple[PositiveInt, ...] = option(
        f"most tokens of prompt and answer (default: {_RULER_LENGTH} for RULER, else what the model reads)", ()
    )
    samples: PositiveInt | None = option(f"samples per task (default: {_RULER_SAMPLES} for RULER, else all)")
    methods: tuple[MethodName, ...] = option("names from `lkv methods`", ("lkv", "snapkv"))
    retention: tuple[Retention, ...] = option("fractions of the KV entries to keep (default: 0.15)", ())
    memory: tuple[Memory, ...] = option("shares of the 16-bit cache's bytes (0.1 or 10%), instead of --retention", ())
    ladder: bool = option(f"retentions {', '.join(map(str, LADDER))}", False)
    preset: Literal["kvpress"] | None = option("retentions and protocol of a leaderboard")
    protocol: _Protocol | None = option("how prompts are made (default: kvpress)")  # type: ignore[valid-type]
    device: str | None = GPU_DEVICE
    policy: tuple[str, ...] = option(  # type: ignore[assignment]
        "folder or Hub id (default: the model's, shipped or fitted); several, with names, are compared",
        (),
        metavar="[NAME=]PATH",
    )
    pattern: Path | None = PATTERN_FILE
    pattern_by: Literal["attention", "kvpress"] = option(
        "how the pattern is estimated: attention outside the window, or as in kvpress", "attention"
    )
    seed: int = option("RULER: another seed makes other samples", 0)
    rows_at_once: PositiveInt = option("methods x retentions per batch; fewer need less memory", 64)
    out: Path = option("JSON lines file; an interrupted run resumes", ...)

    @property
    def retentions(self) -> tuple[float, ...]:
        """The retentions to measure, from --retention, --ladder or --preset, or the memory shares of --memory."""
        if self.memory:
            return tuple(MemoryTarget.parse(value).share or 0.0 for value in self.memory)
        return self.retention or (LADDER if self.ladder else PRESETS.get(self.preset or "", (DEFAULT_RETENTION,)))

    @property
    def all_lengths(self) -> tuple[int | None, ...]:
        """The lengths to measure at, each once; None for all that the model reads."""
        return tuple(dict.fromkeys(self.lengths)) or ((_RULER_LENGTH,) if self.suite == "ruler" else (None,))

    def run(self) -> None:
        """Measure, and print the table."""
        from lkv.evaluation import longbench, ruler
        from lkv.methods.registry import PATTERN
        from lkv.utils.extras import require
        from lkv.utils.files import check_writable_file

        require("evals", "lkv eval")
        check_writable_file(self.out, LkvError, "the samples")
        if self.memory and (self.retention or self.ladder or self.preset):
            raise LkvError("--memory sets what is kept; leave --retention, --ladder and --preset out.")
        if large := [value for value in self.memory if MemoryTarget.parse(value).share is None]:
            raise LkvError(f"--memory {large[0]} is a number of bytes, but samples differ in length: give a share.")
        if self.ladder and (self.retention or self.preset):
            raise LkvError("--ladder sets the retentions; leave --retention and --preset out.")
        if self.preset and (self.retention or self.protocol):
            raise LkvError("--preset sets retentions and protocol; leave --retention and --protocol out.")
        if self.suite == "longbench":
            self.refuse_unread("longbench", "--haystack", "--seed")
        paths = _parse_policies(self.policy)
        for path in paths.values():
            check_policy_exists(path)
        suite = longbench if self.suite == "longbench" else ruler
        for task in self.tasks:
            suite.check_task(task)
        tasks = tuple(dict.fromkeys(self.tasks)) or suite.TASKS
        methods = _name_policies(self.methods, paths)
        check_methods(self, methods)
        if not any(PATTERN in find_needs(method) for method in methods):
            self.refuse_unread("an evaluation without duo", "--pattern", "--pattern-by")
        elif self.pattern is not None and self.pattern.suffix == ".tsv":
            self.refuse_unread("--pattern with a .tsv file", "--pattern-by")
        make_examples = _read_longbench(self, tasks) if self.suite == "longbench" else _read_ruler(self, tasks)
        _evaluate(self, methods, paths, make_examples)


def _evaluate(
    options: Eval, methods: list[str], paths: dict[str, str], make_examples: Callable[[Any], list[Example]]
) -> None:
    """Load policies and model, measure, and print the table."""
    from lkv.evaluation.runner import EvaluationConfig, evaluate
    from lkv.evaluation.statistics import summarize
    from lkv.hf.attention import patch_attention
    from lkv.methods.registry import POLICY
    from lkv.policy.lookup import default_policy, load_policy
    from lkv.utils.devices import distributed_state
    from lkv.utils.files import strip_parent_dirs

    needs_policy = any(POLICY in find_needs(method) for method in methods)
    policies: dict[str, Policy] = {}
    if needs_policy:
        policies = {name: load_policy(path, options.strict, options.policy_revision) for name, path in paths.items()}
    policy = policies.pop("", None)
    state = distributed_state("evals", "an evaluation")
    model, tokenizer = options.load_model(str(state.device))
    spec = patch_attention(model).spec
    if needs_policy and policy is None and not policies:
        policy = default_policy(model, name=options.model)
    if (length := max(filter(None, options.all_lengths), default=0)) > spec.max_positions:
        raise LkvError(
            f"--lengths has {length}, but {options.model_name} reads at most {spec.max_positions} tokens; give less."
        )
    pattern, pattern_source = None, None
    if options.pattern:
        pattern = load_pattern(options.pattern, model, tokenizer, options.pattern_by)
        pattern_source = f"estimated on {options.pattern.name}, {_PATTERN_SOURCES[options.pattern_by]}"
        if options.pattern.suffix == ".tsv":
            pattern_source = f"read from {options.pattern.name}, as DuoAttention's authors publish theirs"
    config = EvaluationConfig(
        methods,
        options.retentions,
        options.protocol or options.preset or PROTOCOLS[0],
        policy,
        policies,
        pattern=pattern,
        pattern_source=pattern_source,
        by_memory=bool(options.memory),
        model_name=strip_parent_dirs(options.model_name),
        seed=options.seed,
        max_rows=options.rows_at_once,
    )
    # The first sample of every task, then the second: an interrupted run has some of each.
    examples = sorted(make_examples(tokenizer), key=lambda example: example.number)
    evaluate(model, tokenizer, examples, config, options.out)
    if state.is_main_process:
        print(summarize(options.out), end="")
    state.destroy_process_group()


def _parse_policies(words: Sequence[str]) -> dict[str, str]:
    """Return paths by name from words [NAME=]PATH; a path without a name has the name ""."""
    pairs: list[tuple[str, str]] = []
    for word in words:
        name, equals, path = word.partition("=")
        pairs.append((name, path) if equals and not exists(word) else ("", word))
    paths = dict(pairs)
    if len(paths) < len(pairs) or (len(pairs) > 1 and "" in paths):
        raise LkvError("several policies need different names: give --policy first=PATH second=PATH.")
    if invalid := [name for name in paths if set(name) & set("@+ ")]:
        raise LkvError(f"the policy name {invalid[0]!r} contains a space, '@' or '+'; use another.")
    return paths


def _name_policies(methods: Sequence[str], policies: Collection[str]) -> list[str]:
    """Return `methods`, those that read a policy and name none once for each of the named `policies`.

    Raises LkvError if a method names a policy that is not there.
    """
    from lkv.methods.registry import POLICY

    names, named = [name for name in policies if name], list[str]()
    for method in methods:
        _, names_one, name = method.partition("@")
        if names_one and POLICY in find_needs(method) and name not in names:
            raise LkvError(
                f"{method!r} names a policy that is not there; give it as --policy {name or 'NAME'}=PATH, or leave "
                f"@{name} out."
            )
        is_each = names and not names_one and POLICY in find_needs(method)
        named += [f"{method}@{each}" for each in names] if is_each else [method]
    return list(dict.fromkeys(named))


def _read_longbench(options: Eval, tasks: Sequence[str]) -> Callable[[Any], list[Example]]:
    """Read the examples now; the returned function gives them for a tokenizer."""
    from lkv.evaluation.longbench import load_examples

    examples = [example for task in tasks for example in load_examples(task, options.data, options.samples)]
    return lambda tokenizer: [
        replace(example, length=length, max_tokens=length) for length in options.all_lengths for example in examples
    ]


def _read_ruler(options: Eval, tasks: Sequence[str]) -> Callable[[Any], list[Example]]:
    """Read the sources now; the returned function makes the examples for a tokenizer."""
    from lkv.evaluation import ruler

    if options.haystack and not exists(options.haystack):
        raise LkvError(f"{options.haystack} does not exist; give --haystack a text file or a folder of .txt files.")
    if options.data:
        sources = ruler.Sources.from_folder(options.data, options.haystack)
    else:
        sources = ruler.Sources(options.haystack)
    ruler.check_sources(tasks, sources)

    def make_examples(tokenizer: "PreTrainedTokenizerBase") -> list[Example]:
        from lkv.utils.progress import ProgressBar

        grid = [(length, task) for length in options.all_lengths if length for task in dict.fromkeys(tasks)]
        count = options.samples or _RULER_SAMPLES
        return [
            example
            for length, task in ProgressBar(grid, desc="making the samples", leave=False)
            for example in ruler.make_examples(task, length, count, tokenizer, sources, options.seed)
        ]

    return make_examples
