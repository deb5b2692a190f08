"""Compile a C++ file against PyTorch into a shared library, once per user."""

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch


def find_compiler() -> list[str] | None:
    """Return the command of the C++ compiler: $CXX, else g++ or clang++; None if there is none."""
    for command in (os.environ.get("CXX", ""), "g++", "clang++"):
        try:
            words = shlex.split(command)
        except ValueError:  # an open quote
            continue
        if words and shutil.which(words[0]):
            return words
    return None


def build_library(source: Path, flags: Sequence[str] = (), rebuild: bool = False) -> Path:
    """Compile `source` unless a library of the same source, flags and PyTorch is there already.

    Libraries are kept in $TORCH_EXTENSIONS_DIR or ~/.cache/torch_extensions, or in a temporary folder where neither
    can be written to.

    Args:
        source: The C++ file.
        flags: Compiler flags in addition to the paths of PyTorch.
        rebuild: Compile in any case.

    Returns:
        The path of the library.

    Raises:
        RuntimeError: There is no compiler, or it fails.
    """
    identity = repr((torch.__version__, list(flags), source.read_text(encoding="utf-8")))
    name = f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(base, "torch_extensions"), "lkv")
    target = folder / name
    if target.exists() and not rebuild:
        return target
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("there is no C++ compiler (g++ or clang++) to compile it with; install one, or set CXX")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(suffix=".so", dir=folder)
    except OSError:
        target = Path(tempfile.mkdtemp(prefix="lkv-"), name)
        handle, unfinished = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    root = Path(torch.__file__).parent
    command = [
        *compiler, "-shared", "-fPIC", "-std=c++20", "-w", *flags, str(source), "-o", unfinished,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}",
        f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            errors = [line for line in run.stderr.splitlines() if "error" in line]
            raise RuntimeError(f"{compiler[0]} fails: {(errors or run.stderr.splitlines() or ['no message'])[0]}")
        # Other processes may compile at the same time: each replaces a whole file. One that is cut short by a power cut
        # would end every process that loads it.
        with open(unfinished, "rb") as written:
            os.fsync(written.fileno())
        os.chmod(unfinished, 0o755)  # other users of a shared folder load it
        os.replace(unfinished, target)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return target
