"""What the benchmark scripts share."""

import argparse
import hashlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from experiments.bootstrap import bootstrap
from experiments.journal import open_journal
from experiments.report.names import method_label
from experiments.result_file import write_results
from experiments.samples import keep_samples
from lkv.errors import DataError, LkvError, PolicyMismatchError
from lkv.evaluation.comparison import MethodGrid
from lkv.hf.loading import DEFAULT, load_model
from lkv.hf.prompt_kv import LayerKV
from lkv.methods.method import Method
from lkv.methods.registry import FULL
from lkv.policy.lookup import default_policy, load_policy
from lkv.policy.policy import Policy
from lkv.utils import devices
from lkv.utils.files import check_writable_file
from lkv.utils.provenance import collect_provenance

_FOLDERS = ("data", "train", "work", "out")
RESULTS = Path(__file__).parent / "results"
PAPER_SCORER = "lkv-paper"  # LKV with the paper's own scorer (k as cached, no other component) as a row's method
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Subject:
    """The model that is measured: with its policy, and called as on the hub."""

    model: Any
    tokenizer: Any
    policy: Policy
    name: str


def parse_options(
    doc: str | None, name: str, data: str = "", arguments: list[str] | None = None, /, **defaults: Any
) -> argparse.Namespace:
    """The options of a benchmark: --data, one for every keyword with its default, then --out.

    Args:
        doc: The script's docstring, shown as help.
        name: Of the result file.
        data: What --data is a folder of; empty for none.
        arguments: Of the command line (default: those of the process).
        defaults: By option; a list takes several values, a tuple some of its own, False makes a flag, a type has no
            default, and ... is a path that is required.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data:
        parser.add_argument("--data", type=Path, required=True, help=f"folder {data}")
    for key, default in {"out": RESULTS / f"{name}.json", **defaults}.items():
        option = "--" + key.replace("_", "-")
        if default is ...:
            parser.add_argument(option, type=Path, required=True)
        elif default is False:
            parser.add_argument(option, action="store_true")
        elif isinstance(default, type):
            parser.add_argument(option, type=default)
        else:
            values = [*default] if isinstance(default, list | tuple) else None
            choices = ("float32", "bfloat16", "float16") if key == "dtype" else None
            parser.add_argument(
                option, type=type(values[0] if values else default), default=values or default,
                nargs="+" if values else None, choices=default if isinstance(default, tuple) else choices,
            )  # fmt: skip
    options = parser.parse_args(arguments)
    if getattr(options, "device", "cpu").startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"PyTorch sees no device {options.device!r} here; run it where it does, or with --device cpu.")
    if options.out is not None:
        try:
            check_writable_file(options.out, DataError, "the results")
        except DataError as error:
            parser.error(str(error))
    return options


def save_rows(options: argparse.Namespace, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write a benchmark's result with the command that makes it again."""
    write_results(options.out, name, rows, 0, command_of(f"experiments.{name}", options))


def row_label(method: str) -> str:
    """The name of a row's method in tables and figures."""
    return "LKV, the paper's scorer" if method == PAPER_SCORER else method_label(method)


# Options of every benchmark of several models: a folder, GGUF file or hub id, and its policy's folder.
SUBJECT: dict[str, Any] = {"model": str, "policy": Path, "dtype": "float32"}


def subject_of(options: argparse.Namespace, kind: str) -> Subject:
    """The model and policy that the options name; `options.model` becomes what the hub calls it.

    Without --out, results of this `kind` go to a file of the model's own, but for the demo model.
    """
    model, tokenizer = load_model(options.model or DEFAULT, getattr(torch, options.dtype))
    policy = load_policy(options.policy) if options.policy else default_policy(model)
    hub_names = policy.card.get("hub") or [Path(options.model or DEFAULT).name]
    if options.model:
        options.model = hub_names[0]
    short = hub_names[0].rpartition("/")[2].lower()
    options.out = options.out or RESULTS / (f"{kind}.json" if short == DEFAULT else f"{kind}-{short}.json")
    return Subject(model, tokenizer, policy, hub_names[0])


def per_length(tokens: Sequence[int], counts: Sequence[int]) -> dict[int, int]:
    """How many samples each length gets: one number for all of them, or one each. Raises LkvError for another count."""
    if len(counts) not in (1, len(tokens)):
        raise LkvError(f"{len(counts)} numbers for {len(tokens)} lengths; give one, or one for each length.")
    return dict(zip(tokens, counts if len(counts) > 1 else [*counts] * len(tokens), strict=True))


def method_grids(
    subject: Subject, names: Sequence[str], retentions: Sequence[float], has_paper: bool = True, **settings: Any
) -> dict[str, MethodGrid]:
    """The methods `names` and, if `has_paper`, LKV with the paper's own scorer where it ships for the model, by what is
    put behind their names. `settings` are further ones of `MethodGrid`."""
    model, tokenizer = subject.model, subject.tokenizer
    grids = {"": MethodGrid(model, tokenizer, names, retentions, subject.policy, **settings)}
    with suppress(PolicyMismatchError):
        if has_paper:
            grids["-paper"] = MethodGrid(model, tokenizer, ["lkv"], retentions, default_policy(model, paper=True))
    return grids


def rows_of(grids: dict[str, MethodGrid], ids: list[int], prompt: list[LayerKV]) -> list[tuple[str, float, Method]]:
    """(name, retention, method) of all that can serve the prompt; the full cache comes first, once."""
    rows = []
    for end, grid in grids.items():
        ready, _ = grid.bind(ids, prompt)
        rows += [(row.name + end, row.retention, row.method) for row in ready if row.name != FULL or not end]
    return rows


def run_cases(
    module: str,
    options: argparse.Namespace,
    name: str,
    cases: dict[str, tuple[Any, ...]],
    measure: Callable[..., dict[str, Any]],
    summarise: Callable[[dict[str, dict[str, Any]]], list[dict[str, Any]]],
    policy: Policy,
    growing: Sequence[str] = (),
    details: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Call `measure` with each case that an interrupted run has not measured, and write the rows of `summarise`.

    The samples go to a journal beside `options.out`; a finished run keeps them as `samples_path` instead. An
    interrupted run resumes with the same options, except `growing` ones, of which there may be more, the same files and
    the same versions of packages. `details` go into the result beside the policy's digest, and must be the same too.
    """
    details = {"policy": policy.digest(), **(details or {})}
    # Every option but the folders and `growing`, of which more go on where fewer ended.
    given = {key: str(value) for key, value in vars(options).items() if value is not None}
    settings = {key: value for key, value in given.items() if key not in (*_FOLDERS, *growing)}
    settings |= details | files_of(options) | {"versions": collect_provenance()["versions"]}
    with open_journal(options.out.with_suffix(".jsonl"), settings) as journal:
        for key, case in tqdm(cases.items(), desc=name):
            if key not in journal:
                journal.add(key, measure(*case))
        samples = {key: journal[key] for key in cases}
        rows = summarise(samples)
        # Versions as the run began: its environment may have changed since.
        measured = details | {"samples": keep_samples(options.out, samples), "versions": settings["versions"]}
        write_results(options.out, name, rows, options.seed, command_of(module, options), measured)
    return rows


def run_samples(
    name: str, options: argparse.Namespace, cases: dict[str, tuple[Any, ...]], measure: Callable[..., dict[str, Any]],
    summarise: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], subject: Subject, growing: str,
) -> None:  # fmt: skip
    """`run_cases` of the script `name`, whose rows are of one model and of all samples alike."""
    run_cases(
        f"experiments.{name}", options, name, cases, measure,
        lambda samples: [{"model": subject.name, **row} for row in summarise(list(samples.values()))],
        subject.policy, growing.split(),
    )  # fmt: skip


def wall_clock(run: Callable[[], Any], device: torch.device = _CPU) -> float:
    """Seconds of a run, to its end on `device`."""
    started = devices.synchronised_clock(device)
    run()
    return devices.synchronised_clock(device) - started


def interleaved(
    runs: Mapping[str, Callable[[], Any]],
    repeats: int,
    seconds_of: Callable[[Callable[[], Any]], float] = wall_clock,
    warmups: int = 2,
) -> dict[str, list[float]]:
    """Seconds of each run in turn, so that a noisy moment falls on all of them alike; the first rounds warm up."""
    rounds = [{name: seconds_of(run) for name, run in runs.items()} for _ in range(repeats + warmups)]
    return {name: [seconds[name] for seconds in rounds[warmups:]] for name in runs}


def paired_ratio(seconds: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """The mean ratio of times to those of the baseline in the same round, with its interval, and the median time."""
    ratio = bootstrap([[own / other] for own, other in zip(seconds, baseline, strict=True)])
    return {**ratio._asdict(), "seconds": median(seconds)}


def files_of(options: argparse.Namespace) -> dict[str, str]:
    """A digest of the files in each folder that a result is measured on."""
    folders = {key: getattr(options, key, None) for key in ("data", "train")}
    return {f"{key} files": digest_of_names(folder) for key, folder in folders.items() if folder}


def digest_of_names(folder: Path) -> str:
    """A digest of the names and sizes of all files in a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths]
    return hashlib.sha256(repr(files).encode(errors="surrogatepass")).hexdigest()[:16]


def command_of(module: str, options: argparse.Namespace) -> str:
    """The command that makes a result again."""
    words = ["python", "-m", module, *(["--data", "EVAL_FOLDER"] if "data" in options else [])]
    words += ["--train", "TRAIN_FOLDER"] if getattr(options, "train", None) else []
    for key, value in vars(options).items():
        if key not in _FOLDERS and value is not None and value is not False:
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{key.replace('_', '-')}", *map(str, values)]
    return shlex.join(words)
