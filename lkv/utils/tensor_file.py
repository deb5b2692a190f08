"""Tensors and JSON in one safetensors file: written whole or not at all, with one checksum over all of it."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import _TYPES, load
from torch import Tensor

from lkv.errors import LkvError
from lkv.utils.devices import is_out_of_memory
from lkv.utils.files import atomic_write, error_reason

_DIGEST = "sha256"
_MAX_HEADER = 16 * 2**20  # bytes; LKV's own headers are thousands of times smaller


class FileKind(NamedTuple):
    """A kind of file."""

    header: str  # the key of its JSON in the file's header
    version: int  # its format number
    noun: str  # its name in messages
    error: type[LkvError]  # to raise for a missing, foreign or damaged file
    remedy: str  # advice, as the end of a sentence
    mode: int = 0o666  # permissions of a new file


def write(path: Path, kind: FileKind, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write `tensors` and the JSON `about`; a failed save leaves an older file at `path` as it was."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps({"format": kind.version, **about})
    with atomic_write(path, kind.error, f"the {kind.noun}", kind.mode) as temporary:
        _write_tensors(temporary, tensors, {kind.header: text, _DIGEST: _digest(tensors, text)})


def read(path: Path, kind: FileKind) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and the JSON written with them. Raises the kind's error for a missing, foreign or damaged file.

    The tensors are copies, independent of later changes to the file.
    """
    try:
        # A mapped file would change under the tensors, and take the process with it when it is cut short.
        data = path.read_bytes()
        metadata = _header(data)["__metadata__"]
        text, digest = metadata[kind.header], metadata.get(_DIGEST)
        about = json.loads(text)
        version = about["format"]
    except FileNotFoundError:
        raise kind.error(f"there is no file {path}; {kind.remedy}.") from None
    except OSError as error:
        raise kind.error(f"{path} cannot be read ({error_reason(error)}); {kind.remedy}.") from error
    except KeyError as error:
        raise kind.error(f"{path} is not a saved {kind.noun} (its header has no {error}); {kind.remedy}.") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise kind.error(f"{path} is not a saved {kind.noun} ({error}); {kind.remedy}.") from error
    except MemoryError as error:
        raise _too_large(path, kind) from error
    if type(version) is not int or version != kind.version:
        raise kind.error(
            f"{path} has format {version!r}, but this version reads {kind.version}; use the lkv-cache version that "
            f"wrote it, or {kind.remedy}."
        )
    try:
        tensors = _parse_tensors(data)
    except (ValueError, MemoryError) as error:
        if is_out_of_memory(error):
            raise _too_large(path, kind) from error
        raise kind.error(f"{path} is not a saved {kind.noun} ({error}); {kind.remedy}.") from error
    if digest != _digest(tensors, text):
        raise kind.error(f"{path} was damaged or changed after it was saved; {kind.remedy}.")
    return tensors, about


def _too_large(path: Path, kind: FileKind) -> LkvError:
    return kind.error(f"{path} takes more memory than is free; free some, or read it on another machine.")


def _parse_tensors(data: bytes) -> dict[str, Tensor]:
    """Parse the tensors of a safetensors file's bytes. Raises ValueError for other bytes and for dtypes torch lacks."""
    try:
        for name, entry in _header(data).items():
            if name != "__metadata__" and entry["dtype"] not in _TYPES:
                raise ValueError(f"its tensor {name!r} has the dtype {entry['dtype']!r}, which torch cannot hold")
        with torch.device("cpu"):  # where empty tensors would else be on the default device
            return load(data)
    except (SafetensorError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error).strip() or type(error).__name__) from error


def _write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file from the tensors' own memory; safetensors makes a copy, or hides the system's errors."""
    dtypes = {dtype: name for name, dtype in _TYPES.items()}
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # so that all are aligned
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        tensor, start, end = tensors[name], end, end + tensors[name].nbytes
        header[name] = {"dtype": dtypes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(_bytes(tensors[name]))


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.flatten().view(torch.uint8).numpy().data


def _header(data: bytes) -> dict[str, Any]:
    """Return the JSON at the beginning of a safetensors file. Raises ValueError if there is none."""
    size = int.from_bytes(data[:8], "little")
    if size > len(data) - 8:
        raise ValueError("its header is cut short")
    if size > _MAX_HEADER:
        raise ValueError(f"its header has {size:,} bytes, more than the {_MAX_HEADER:,} that are read")
    header = json.loads(data[8 : 8 + size])
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header


def _digest(tensors: dict[str, Tensor], about: str) -> str:
    digest = hashlib.sha256(f"{len(about)} {about}".encode(errors="surrogatepass"))
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(errors="surrogatepass"))
        digest.update(_bytes(tensor))
    return digest.hexdigest()
