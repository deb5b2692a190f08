"""The fake GPU's library, compiled once into the user's cache folder."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("backend.cpp")


def compiler() -> str | None:
    """The C++ compiler: $CXX, else g++ or clang++; None where there is none."""
    names = [os.environ.get("CXX"), "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def library() -> Path:
    """The compiled library, of this source and this PyTorch."""
    key = hashlib.sha256(f"{torch.__version__} {SOURCE.read_text(encoding='utf-8')}".encode()).hexdigest()[:16]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = base / "lkv-tests" / f"fake_gpu-{key}.so"
    if not target.exists():
        _compile(target)
    return target


def _compile(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    # Under a name of its own first: test processes may compile at the same time.
    work = target.with_suffix(f".{os.getpid()}")
    command = [
        compiler(), "-shared", "-fPIC", "-O1", "-std=c++20", "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}", str(SOURCE), "-o", str(work),
        f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    subprocess.run([part for part in command if part], check=True)
    os.replace(work, target)
