"""Optional packages of each extra. Does not import torch."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from lkv.errors import MissingPackageError

_NOT_FEATURES = ("dev", "docs", "triton")  # extras that no feature names


@cache
def minimum_versions() -> dict[str, str]:
    """Return the oldest supported version of each required package that has one."""
    required = (re.match(r"([\w-]+)>=([\d.]+)$", line) for line in _requirements())
    return {match[1]: match[2] for match in required if match}


@cache
def extras() -> dict[str, tuple[str, ...]]:
    """Return the import names of the packages of each extra, from the installed package's metadata."""
    packages: dict[str, list[str]] = {}
    for line in _requirements():
        if match := re.match(r"([\w-]+).*extra == \W([\w-]+)\W", line):
            packages.setdefault(match[2], []).append(match[1].replace("-", "_"))
    return {extra: tuple(names) for extra, names in packages.items() if extra not in _NOT_FEATURES}


def _requirements() -> list[str]:
    try:
        return metadata.requires("lkv-cache") or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return []


def require(extra: str, purpose: str, packages: Sequence[str] = ()) -> None:
    """Check that the packages of an extra are installed.

    Args:
        extra: A key of `extras()`.
        purpose: The feature that needs them, as the subject of the error message.
        packages: Those of the extra that are needed (default: all).

    Raises:
        MissingPackageError: Packages are missing; the message names them and the command that installs them.
    """
    missing = [name for name in packages or extras().get(extra, ()) if find_spec(name) is None]
    if missing:
        names = f"{', '.join(missing[:-1])} and {missing[-1]}" if missing[1:] else missing[0]
        verb = "is" if len(missing) == 1 else "are"
        raise MissingPackageError(
            f"{purpose} needs {names}, which {verb} not installed; run `{install_command(extra)}`."
        )


@contextmanager
def optional_import(extra: str, purpose: str) -> Iterator[None]:
    """Raise MissingPackageError, with the command that installs `extra`, if an import of the block fails."""
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(
            f"{purpose} needs optional packages that cannot be imported ({error}); run `{install_command(extra)}`."
        ) from error


def install_command(extra: str) -> str:
    """Return the command that installs an extra, from where LKV itself comes."""
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{_short_path(checkout)}[{extra}]')}"
    return f"pip install {shlex.quote(_requirement(extra))}"


def _requirement(extra: str) -> str:
    """Name what pip installs to get the extra: the folder, file or address LKV was installed from, else its name."""
    try:
        record = metadata.distribution("lkv-cache").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return f".[{extra}]"  # nothing says where LKV comes from: in a checkout of it
    if record is None:
        return f"lkv-cache[{extra}]"  # from a package index
    origin = json.loads(record)
    if origin["url"].startswith("file:"):
        return f"{_short_path(Path(url2pathname(urlsplit(origin['url']).path)))}[{extra}]"
    vcs = origin.get("vcs_info", {}).get("vcs")
    return f"lkv-cache[{extra}] @ {f'{vcs}+' if vcs else ''}{origin['url']}"


def _short_path(path: Path) -> str:
    """`.` for the working directory and for what is no longer there, else the path."""
    return "." if not path.exists() or os.path.samefile(path, os.curdir) else str(path)
