"""Tensors and JSON as one safetensors file: written whole or not at all, with one checksum over all of it."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lkv.errors import LkvError
from lkv.utils.files import atomic_write, error_reason

_DIGEST = "sha256"


class Kind(NamedTuple):
    """A kind of file: the name of its JSON in the file's header, its format number, its noun, the error for what is
    wrong with one, and what to do then."""

    header: str
    version: int
    noun: str
    error: type[LkvError]
    mend: str


def write(path: Path, kind: Kind, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write `tensors` and the JSON `about`; a failed save leaves an older file at `path` as it was."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps({"format": kind.version, **about})
    with atomic_write(path, kind.error, f"the {kind.noun}") as temporary:
        temporary.write_bytes(save(tensors, {kind.header: text, _DIGEST: _digest(tensors, text)}))


def read(path: Path, kind: Kind) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and the JSON written with them. Raises the kind's error for a missing, foreign or damaged file.

    The tensors are copies: what happens to the file afterwards does not touch them.
    """
    try:
        # A mapped file would change under the tensors, and take the process with it when it is cut short.
        data = path.read_bytes()
        metadata = _metadata(data)
        text, digest = metadata[kind.header], metadata.get(_DIGEST)
        about = json.loads(text)
        version = about["format"]
    except FileNotFoundError:
        raise kind.error(f"there is no file {path}; {kind.mend}.") from None
    except OSError as error:
        raise kind.error(f"{path} cannot be read ({error_reason(error)}); {kind.mend}.") from error
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise kind.error(f"{path} is no saved {kind.noun} ({error}); {kind.mend}.") from error
    if version != kind.version:
        raise kind.error(
            f"{path} has format {version!r}, but this version reads {kind.version}; use the lkv-cache version that "
            f"wrote it, or {kind.mend}."
        )
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, TypeError) as error:
        raise kind.error(f"{path} is no saved {kind.noun} ({error}); {kind.mend}.") from error
    if digest != _digest(tensors, text):
        raise kind.error(f"{path} was damaged or changed after it was saved; {kind.mend}.")
    return tensors, about


def holds(path: Path, kind: Kind) -> bool:
    """Whether the file at `path` says that it is of this kind."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return kind.header in json.loads(file.read(min(size, _LONGEST_HEADER)))["__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


_LONGEST_HEADER = 100_000_000  # as safetensors itself has it


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
