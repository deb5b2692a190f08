"""GGUF files as folders of safetensors: dequantised once, safe under several processes at once.

transformers reads GGUF slowly, so a copy is kept. It is made in a temporary folder that is renamed, under a lock: a
broken conversion is never taken for a model, and a second process waits for the first instead of converting as well.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from lkv.errors import ModelLoadError
from lkv.utils.extras import require

_DONE = "conversion.json"
_MAGIC = b"GGUF"
_KEEPS_PACKED = hasattr(transformers, "GgufConfig")


def is_gguf(name: str | os.PathLike[str]) -> bool:
    """Whether `name` is that of a GGUF file."""
    return Path(name).suffix.lower() == ".gguf"


def digest_of(path: Path) -> str:
    """SHA-256 of a GGUF file. Raises ModelLoadError for a file that is missing or no GGUF."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ModelLoadError(f"{path} is not a GGUF file, though its name ends so; fetch it again.")
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error.strerror}); give the path of a GGUF file.") from error


def convert_once(target: Path, source: Callable[[], AbstractContextManager[Path]], dtype: torch.dtype) -> None:
    """Make `target` the converted model, unless it is there whole; `source` gives the GGUF file when it is needed.

    Progress goes to stderr. Raises ModelLoadError for a file that cannot be converted or a folder that cannot be
    written, and MissingPackageError.
    """
    if is_complete(target):
        return
    require("gguf", f"converting {target.name} from GGUF")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            if not is_complete(target):
                for rest in target.parent.glob(f".{target.name}.tmp-*"):  # what a killed process left
                    shutil.rmtree(rest, ignore_errors=True)
                with source() as file:
                    _convert(file, target, dtype)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(
            f"the converted model cannot be kept in {target.parent} ({error}); make room there, or name another folder "
            "in LKV_CACHE."
        ) from error


def is_complete(folder: Path) -> bool:
    """True if every file of the conversion is there with the size it was written with."""
    try:
        sizes = json.loads((folder / _DONE).read_text(encoding="utf-8"))["files"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _locked(target: Path) -> AbstractContextManager[Any]:
    """The lock of one conversion, held; the system frees it when a process ends, however it ends."""
    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        print(f"another process is converting {target.name}; waiting for it ...", file=sys.stderr)
        return lock.acquire()


def _convert(source: Path, target: Path, dtype: torch.dtype) -> None:
    print(f"converting {source.name} to safetensors in {target} (once) ...", file=sys.stderr)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
    try:
        model, tokenizer = _read(source, dtype)
        _unmarked(model).save_pretrained(work)
        tokenizer.save_pretrained(work)
        sizes = {path.name: path.stat().st_size for path in work.iterdir()}
        (work / _DONE).write_text(json.dumps({"source": source.name, "files": sizes}), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        os.rename(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _read(source: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    where: dict[str, Any] = {"gguf_file": source.name, "trust_remote_code": False}
    # Newer ones leave weights packed where they have kernels for them.
    plain = {"quantization_config": transformers.GgufConfig(dequantize=True)} if _KEEPS_PACKED else {}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.parent, dtype=dtype, output_loading_info=True, **where, **plain
        )
        model, report = loaded
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    except Exception as error:  # whatever the bytes of a damaged or newer file lead the readers to
        reason = shorten(str(error), 160) or type(error).__name__
        raise ModelLoadError(
            f"{source} cannot be converted ({reason}); give a whole GGUF file of a language model that transformers "
            "reads, or the folder or hub id of the model itself."
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise ModelLoadError(
            f"{source} lacks {len(missing)} of the model's tensors ({missing[0]}, ...); give the whole model, not one "
            "part of it."
        )
    return model, tokenizer


def _unmarked(model: Any) -> Any:
    """The same weights in a model that is not marked as quantised, since a marked one cannot be saved."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain
