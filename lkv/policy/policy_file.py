"""Policy files: one safetensors file with everything, and the description again as config.json for people.

Format 1 kept the description in config.json alone; such folders still load.
"""

import hashlib
import json
import os
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

from torch import Tensor

from lkv.errors import PolicyFileError
from lkv.utils import tensor_file
from lkv.utils.files import as_path, error_reason, is_path, write_text
from lkv.utils.tensor_file import FileKind

_WEIGHTS, _CONFIG = "policy.safetensors", "config.json"
_KIND = FileKind("lkv-policy", 2, "policy", PolicyFileError, "download or save the policy again")


def save(name: str | os.PathLike[str], tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write a policy into the folder `name`. Whenever that is interrupted, it holds the old policy or the new one."""
    folder = as_path(name, PolicyFileError, "the policy's place")
    tensor_file.write(folder / _WEIGHTS, _KIND, tensors, about)
    text = json.dumps({"format": _KIND.version, **about}, indent=1) + "\n"
    write_text(folder / _CONFIG, text, PolicyFileError, "the policy")


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and description of the policy in a folder. Raises PolicyFileError."""
    if tensor_file.has_kind(folder / _WEIGHTS, _KIND):
        return tensor_file.read(folder / _WEIGHTS, _KIND)
    return _read_format_1(folder)


def is_policy(folder: Path) -> bool:
    """Whether `folder` holds a policy that `save` wrote."""
    return isfile(folder / _WEIGHTS) and (isfile(folder / _CONFIG) or tensor_file.has_kind(folder / _WEIGHTS, _KIND))


def _read_format_1(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        about = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        version, digest = about["format"], about.get("sha256")
    except FileNotFoundError:
        raise PolicyFileError(
            f"{folder} has no {_CONFIG}; give the folder that Policy.save_pretrained wrote."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise PolicyFileError(f"{folder / _CONFIG} cannot be read ({error}); download or save it again.") from error
    if version != 1:
        raise PolicyFileError(
            f"{folder / _CONFIG} has format {version!r}, but the {_WEIGHTS} beside it is not of that format; "
            "download both again, or update lkv-cache."
        )
    weights = folder / _WEIGHTS
    try:
        data = weights.read_bytes()
    except FileNotFoundError:
        raise PolicyFileError(f"{folder} has no {_WEIGHTS}; download or save the policy again.") from None
    except OSError as error:
        raise PolicyFileError(f"{weights} cannot be read ({error_reason(error)}); download it again.") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise PolicyFileError(
            f"{weights} is not the file its {_CONFIG} was written for (truncated or changed); download it again."
        )
    try:
        return tensor_file.parse_tensors(data), about
    except ValueError as error:
        raise PolicyFileError(f"{weights} holds no tensors ({error}); download it again.") from error


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
