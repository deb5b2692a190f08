"""A compressed context as one safetensors file: written whole or not at all, and checked when it is read."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lkv.errors import ContextFileError
from lkv.files import reason, replacing

_FORMAT = 2
_ABOUT, _DIGEST = "lkv-context", "sha256"


def write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write `tensors` and the JSON `about`; a failed save leaves an older file at `path` as it was."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps({"format": _FORMAT, **about})
    with replacing(path, ContextFileError, "the context") as temporary:
        temporary.write_bytes(save(tensors, {_ABOUT: text, _DIGEST: _digest(tensors, text)}))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and the JSON written with them. Raises ContextFileError for a missing, foreign or damaged file.

    The tensors are copies: what happens to the file afterwards does not touch them.
    """
    try:
        # A mapped file would change under the tensors, and take the process with it when it is cut short.
        data = path.read_bytes()
        metadata = _metadata(data)
        text, digest = metadata[_ABOUT], metadata.get(_DIGEST)
        about = json.loads(text)
        version = about["format"]
    except FileNotFoundError:
        raise ContextFileError(f"there is no file {path}; give one that Context.save wrote.") from None
    except OSError as error:
        raise ContextFileError(
            f"{path} cannot be read ({reason(error)}); give a file that Context.save wrote."
        ) from error
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise ContextFileError(f"{path} is no saved context ({error}); give a file that Context.save wrote.") from error
    if version != _FORMAT:
        raise ContextFileError(
            f"{path} has format {version!r}, but this version reads {_FORMAT}; use the lkv-cache version that wrote "
            "it, or compress the text again."
        )
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, TypeError) as error:
        raise ContextFileError(f"{path} is no saved context ({error}); give a file that Context.save wrote.") from error
    if digest != _digest(tensors, text):
        raise ContextFileError(f"{path} was damaged or changed after it was saved; compress the text again.")
    return tensors, about


def _metadata(data: bytes) -> dict[str, str]:
    """The texts in the header of a safetensors file. Raises ValueError, KeyError or TypeError where there are none."""
    size = int.from_bytes(data[:8], "little")
    if size > len(data) - 8:
        raise ValueError("its header is cut short")
    return json.loads(data[8 : 8 + size])["__metadata__"]


def _digest(tensors: dict[str, Tensor], about: str) -> str:
    digest = hashlib.sha256(f"{len(about)} {about}".encode(errors="surrogatepass"))
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(errors="surrogatepass"))
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
