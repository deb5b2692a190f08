"""Whether all that the scripts of this folder need is there: every missing thing is named before anything is paid for.

python -m experiments.runs.preflight --model NAME --out FOLDER [--text FILE] ...    (preflight.sh llama|qwen)

Reads the first rows of each set and the model's configuration, asks the hub whether what is not here may be downloaded,
and compares kernels, memory and disk with what the model needs. Takes seconds, and minutes where LongBench is fetched.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from experiments.data.hub import HUB_SOURCES
from experiments.data.loom import LOOM_RATIOS
from experiments.profile.predict import kv_bytes
from lkv.cli.doctor import BAD, examine
from lkv.context.document_reader import read_document
from lkv.errors import DataError, LkvError, ModelLoadError
from lkv.evaluation import longbench, ruler
from lkv.hf.loading import load_config, load_tokenizer
from lkv.hf.shapes import Shape
from lkv.methods.budgets import read_pattern
from lkv.policy.lookup import load_policy
from lkv.training.data.public_datasets import PUBLIC_DATASETS, index_folder
from lkv.utils.extras import extras, require
from lkv.utils.files import nearest_folder

_EXTRAS = ("train", "data", "evals", "plots")
_DATA_GIB, _SCRATCH_GIB = 5.0, 2.0  # rows of the sets with what is built of them; checkpoints and results
_PROMPTS = 4  # full caches of the longest prompt that fit beside the weights, at least


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 where something is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--out", type=Path, required=True, help="where everything will be written")
    for name in ("text", "pattern", "ruler", "longbench", "data"):
        parser.add_argument(f"--{name}", type=Path, help="as the variable of this name in experiments/runs/common.sh")
    parser.add_argument("--policy", help="folder or hub id, in place of the one that is trained")
    parser.add_argument("--launch", nargs="*", default=[], help="programs that start training and measurements")
    parser.add_argument("--tokens", type=int, default=32768, help="of the longest prompt")
    parser.add_argument("--processes", type=int, default=1, help="that load the model at once")
    options = parser.parse_args(arguments)
    missing = list(problems(options))
    for problem in missing:
        print(f"- {problem}", file=sys.stderr)
    if missing:
        number = f"{len(missing)} thing" + "s" * (len(missing) > 1)
        print(f"preflight: {number} above must be put right first; nothing was started.", file=sys.stderr)
    return int(bool(missing))


def problems(options: argparse.Namespace, api: Any = None) -> Iterator[str]:
    """A sentence for each thing that is missing; `api` stands in for the hub's."""
    api = api or HfApi()
    checks: dict[str, Callable[[], Iterator[str]]] = {
        "the installation": lambda: _installation(options.launch),
        "TEXT": lambda: _text(options.text, "a long text file, which Fig. 1 reads as a prompt"),
        "RULER": lambda: _ruler(options.ruler),
        "LONGBENCH": lambda: _longbench(options.longbench),
        "DATA": lambda: _training_data(options.data, api),
        "MODEL": lambda: _model(options, api),
        "PATTERN": lambda: _pattern(options),
        "POLICY": lambda: _policy(options),
    }
    for name, check in checks.items():
        try:
            yield from (f"{name}: {problem}" for problem in check())
        except LkvError as error:
            yield f"{name}: {error}"


def _installation(launch: Sequence[str]) -> Iterator[str]:
    for extra in _EXTRAS:
        if any(find_spec(package) is None for package in extras()[extra]):
            try:
                require(extra, "a script of experiments/runs/")
            except LkvError as error:
                yield str(error)
    for program in dict.fromkeys(launch):
        if shutil.which(program) is None:
            yield f"there is no program {program!r} to start with; set LAUNCH, TRAIN and PYTHON to programs that exist."
    yield from (f"{found.name} {found.detail}; {found.fix}." for found in examine() if found.status == BAD)


def _text(path: Path | None, expected: str) -> Iterator[str]:
    if path is None:
        yield f"not set; give {expected}."
    elif not read_document(str(path)).strip():
        yield f"{path} is empty; give a long text file."


def _ruler(folder: Path | None) -> Iterator[str]:
    sources = ruler.Sources.from_folder(folder) if folder else ruler.Sources()
    for task in ruler.TASKS:
        try:
            ruler.check_sources([task], sources)
        except DataError as error:
            yield f"{task}: {error}"
            return  # the other tasks read the same files


def _longbench(folder: Path | None) -> Iterator[str]:
    for task in longbench.TASKS:
        try:
            longbench.load_examples(task, folder, 1)
        except DataError as error:
            yield f"{task}: {error}"
            if folder is None:
                return


def _training_data(folder: Path | None, api: Any) -> Iterator[str]:
    used = index_folder(folder, LOOM_RATIOS).used if folder else {}
    for name in LOOM_RATIOS:
        dataset, source = PUBLIC_DATASETS[name], HUB_SOURCES[name]
        if name not in used and (reason := _no_access(api, source.repository, "dataset")):
            yield (
                f"{dataset.title} is not in the folder, and {source.repository} cannot be downloaded ({reason}); put "
                f"one of {', '.join(dataset.files)} there."
            )


def _no_access(api: Any, repository: str, kind: str) -> str:
    """Why a repository of the hub may not be read here; "" where it may."""
    try:
        api.auth_check(repository, repo_type=kind)
    except HfHubHTTPError as error:
        if type(error).__name__ == "GatedRepoError":
            return "its terms must be accepted on the hub, then `hf auth login`"
        return f"{type(error).__name__}: log in with `hf auth login`"
    except Exception as error:  # whatever keeps it from being reached
        return f"the hub cannot be reached: {type(error).__name__}"
    return ""


def _model(options: argparse.Namespace, api: Any) -> Iterator[str]:
    """The model's files and licence, and whether machine and disk are large enough for it."""
    is_local = Path(options.model).is_dir()
    if not is_local and (reason := _no_access(api, options.model, "model")):
        yield f"{options.model} cannot be read ({reason}); or set MODEL to a folder with it."
        return
    if is_local and not [*Path(options.model).glob("*.safetensors")]:
        yield f"{options.model} has no *.safetensors; download the model's weights again."
    shape = Shape.of(load_config(options.model))
    load_tokenizer(options.model)
    weights = 2.0 * shape.parameters / 2**30
    if torch.cuda.is_available():
        needed = weights + _PROMPTS * kv_bytes(shape, min(options.tokens, shape.positions), 2) / 2**30
        for index in range(torch.cuda.device_count()):
            has = torch.cuda.get_device_properties(index).total_memory / 2**30
            if has < needed:
                yield f"GPU {index} has {has:.0f} GiB, but about {needed:.0f} are needed; use larger GPUs."
    elif os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("true", "1"):
        yield "no GPU is seen (`lkv doctor` says why); set ACCELERATE_USE_CPU=true to go on without one."
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    # Weights go from their files to the GPUs; without one, each process has its own in memory.
    if not torch.cuda.is_available() and memory < weights * options.processes:
        yield (
            f"the machine has {memory:.0f} GiB of memory, but {options.processes} processes load {weights:.0f} GiB of "
            "weights, each its own; use fewer processes."
        )
    space = _SCRATCH_GIB + _DATA_GIB + (0.0 if is_local else weights)
    existing = nearest_folder(options.out)
    if not os.access(existing, os.W_OK):
        yield f"OUT: {options.out} cannot be written to; set OUT to a folder that can."
    if (free := shutil.disk_usage(existing).free / 2**30) < space:
        yield f"OUT: {options.out} has {free:.0f} GiB free, but about {space:.0f} are needed; set OUT to a larger disk."


def _shape(model: str) -> Shape | None:
    """The model's shape; None where `_model` names what is wrong with it."""
    try:
        return Shape.of(load_config(model))
    except ModelLoadError:
        return None


def _pattern(options: argparse.Namespace) -> Iterator[str]:
    if options.pattern is None or options.pattern.suffix != ".tsv":
        yield from _text(options.pattern, "DuoAttention's full_attention_heads.tsv, or a long text to estimate it on")
    elif shape := _shape(options.model):
        read_pattern(options.pattern, shape.layers, shape.kv_heads)


def _policy(options: argparse.Namespace) -> Iterator[str]:
    """Tables with another policy than the trained one: whether it is there and has the model's shape."""
    if options.policy is None:
        return
    spec = load_policy(options.policy).spec
    if not (shape := _shape(options.model)):
        return
    has, needs = ((s.layers, s.kv_heads, s.head_dim) for s in (spec, shape))
    if has != needs:
        yield (
            f"{options.policy} is for a model of {has[0]} layers, {has[1]} KV heads and head dimension {has[2]}, but "
            f"{options.model} has {needs[0]}, {needs[1]} and {needs[2]}; give its own, or leave POLICY unset."
        )


if __name__ == "__main__":
    sys.exit(main())
