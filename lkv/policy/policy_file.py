"""Policy files: one safetensors file with everything, and the description again as config.json for people."""

import json
import os
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

from torch import Tensor

from lkv.errors import PolicyFileError
from lkv.utils import tensor_file
from lkv.utils.files import as_path, is_path, write_text
from lkv.utils.tensor_file import FileKind

_WEIGHTS, _CONFIG = "policy.safetensors", "config.json"
_REMEDY = "give a folder that Policy.save_pretrained wrote, or download it again"
_KIND = FileKind("lkv-policy", 2, "policy", PolicyFileError, _REMEDY)


def save(name: str | os.PathLike[str], tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write a policy into the folder `name`. Whenever that is interrupted, it holds the old policy or the new one."""
    folder = as_path(name, PolicyFileError, "the policy's place")
    tensor_file.write(folder / _WEIGHTS, _KIND, tensors, about)
    text = json.dumps({"format": _KIND.version, **about}, indent=1) + "\n"
    write_text(folder / _CONFIG, text, PolicyFileError, "the policy")


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and description of the policy in a folder. Raises PolicyFileError."""
    return tensor_file.read(folder / _WEIGHTS, _KIND)


def is_policy(folder: Path) -> bool:
    """Whether `folder` holds the file of a policy."""
    return isfile(folder / _WEIGHTS)


def find_folder(name: str | os.PathLike[str], revision: str | None = None) -> tuple[Path, str | None]:
    """Find the folder of a policy, downloading it where `name` is a hub id; its commit for those, else None.

    `revision` is a commit, tag or branch on the hub. Raises PolicyFileError.
    """
    folder, text = as_path(name, PolicyFileError, "the policy"), str(name)
    if isdir(folder):
        if revision is not None:
            raise PolicyFileError(f"{text!r} is a folder and has no revision {revision!r}; leave the revision out.")
        return folder, None
    if "/" not in text or is_path(text):
        raise PolicyFileError(
            f"there is no policy folder {text!r}; give a folder or a hub id such as 'owner/name' (a shipped policy "
            "comes by its name from lkv.default_policy)."
        )
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(snapshot_download(text, revision=revision, allow_patterns=[_WEIGHTS, _CONFIG]))
    except Exception as error:  # the HTTP client's errors have no common type
        place = "" if revision is None else f" at revision {revision!r}"
        raise PolicyFileError(
            f"{text!r}{place} is neither a folder nor a policy on the hub that can be reached."
        ) from error
    return snapshot, snapshot.name
