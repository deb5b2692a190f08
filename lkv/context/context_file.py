"""A compressed context as one file."""

from pathlib import Path
from typing import Any

from torch import Tensor

from lkv.errors import ContextFileError
from lkv.utils import tensor_file
from lkv.utils.tensor_file import Kind

_KIND = Kind("lkv-context", 2, "context", ContextFileError, "give a file that Context.save wrote, or compress again")


def write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write `tensors` and the JSON `about`; a failed save leaves an older file at `path` as it was."""
    tensor_file.write(path, _KIND, tensors, about)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and the JSON written with them. Raises ContextFileError for a missing, foreign or damaged file."""
    return tensor_file.read(path, _KIND)
