"""A compressed context as one safetensors file: written whole or not at all, and checked when it is read."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lkv.errors import ContextFileError

_FORMAT = 1
_KEY = "lkv-context"


def write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write `tensors` and the JSON `about`; a failed save leaves an older file at `path` as it was."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"format": _FORMAT, "sha256": _digest(tensors), **about}
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(save(tensors, {_KEY: json.dumps(header)}))
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ContextFileError(
            f"the context cannot be saved as {path} ({error}); nothing was changed there."
        ) from error


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and the JSON written with them. Raises ContextFileError for a missing, foreign or damaged file."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = json.loads(metadata[_KEY])
        whole = header["sha256"] == _digest(tensors)
    except FileNotFoundError:
        raise ContextFileError(f"there is no file {path}; give one that Context.save wrote.") from None
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ContextFileError(f"{path} is no saved context ({error}); give a file that Context.save wrote.") from error
    if header.get("format") != _FORMAT:
        raise ContextFileError(
            f"{path} has format {header.get('format')!r}, but this version reads {_FORMAT}; update lkv-cache."
        )
    if not whole:
        raise ContextFileError(f"{path} was damaged or changed after it was saved; compress the text again.")
    return tensors, header


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
