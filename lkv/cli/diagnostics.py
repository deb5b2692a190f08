"""Checks of the installation: versions, extras, devices, kernels against their references, disk."""

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from lkv.errors import BackendError
from lkv.kernels.ragged_attention import ragged_attention
from lkv.kernels.soft_mask_attention import soft_mask_attention
from lkv.kernels.soft_topk import soft_topk
from lkv.models.loading import DEFAULT, cache_folder
from lkv.policy.token_score_formula import ContentWeights, content_formula, content_scores
from lkv.utils.extras import EXTRAS, install_command
from lkv.version import __version__

OK, OFF, BAD = "ok", "off", "bad"
_MIN_VERSIONS = {"torch": (2, 8), "transformers": (5, 2)}
_MIN_FREE_BYTES = 2e9  # for the converted default model, and to convert it
_TOLERANCE = 1e-4  # of float32 kernels, against the reference in float64


@dataclass(frozen=True)
class Finding:
    """One line of `lkv doctor`.

    Args:
        name: What was checked.
        status: "ok", "off" (optional and not available) or "bad".
        detail: What was found.
        fix: How to fix it, if needed.
    """

    name: str
    status: str
    detail: str
    fix: str = ""


def examine() -> list[Finding]:
    """Run all checks; takes seconds, loads no model and writes nothing but the compiled CPU kernel."""
    return [*_versions(), *_extras(), *_devices(), *_kernels(_default_device()), *_disk()]


def _versions() -> Iterator[Finding]:
    yield Finding("lkv", OK, f"{__version__}, {Path(__file__).parents[1]}")
    yield Finding("python", OK, f"{platform.python_version()}, {platform.platform()}")
    for name, least in _MIN_VERSIONS.items():
        installed = metadata.version(name)
        fits = tuple(int(part) for part in installed.split("+")[0].split(".")[:2]) >= least
        wanted = ".".join(map(str, least))
        yield Finding(name, OK if fits else BAD, installed, "" if fits else f"pip install '{name}>={wanted}'")


def _extras() -> Iterator[Finding]:
    for extra, packages in EXTRAS.items():
        missing = [name for name in packages if find_spec(name) is None]
        detail = f"missing {', '.join(missing)}" if missing else ", ".join(packages)
        yield Finding(f"extra {extra}", OFF if missing else OK, detail, install_command(extra) if missing else "")


def _devices() -> Iterator[Finding]:
    threads = torch.get_num_threads()
    yield Finding("device cpu", OK, f"{threads} thread{'s' * (threads > 1)} of {os.cpu_count()} cores")
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        old = about.major < 8
        detail = f"{about.name}, compute capability {about.major}.{about.minor}, {about.total_memory / 2**30:.0f} GiB"
        fix = "LKV runs on it, but its Triton kernels need compute capability 8.0" if old else ""
        yield Finding(f"device cuda:{index}", OK, detail, fix)
    if not torch.cuda.device_count():
        built = torch.version.cuda or torch.version.hip
        why = (
            f"this PyTorch is built for {built}, but the driver reports no GPU" if built else "this PyTorch has no CUDA"
        )
        yield Finding("device cuda", OFF, why, "install a PyTorch built for your GPU" if not built else "nvidia-smi")
    if torch.backends.mps.is_available():
        yield Finding("device mps", OK, "no float64 there: Soft-TopK is computed on the CPU")


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _kernels(device: torch.device) -> Iterator[Finding]:
    """Compare every backend of every operator with the operator's reference on the same random numbers."""
    for name in ("loop", "cpp", "varlen", "triton"):
        yield _check_kernel(f"ragged attention, {name}", device, partial(_ragged_error, name, device))
    for name in ("sdpa", "triton"):
        yield _check_kernel(f"soft-masked attention, {name}", device, partial(_soft_mask_error, name, device))
    yield _check_kernel("LKV-T scores", device, partial(_scores_error, device))
    yield _check_kernel("Soft-TopK", device, partial(_topk_error, device))


def _check_kernel(name: str, device: torch.device, measure_error: Callable[[], float]) -> Finding:
    try:
        error = measure_error()
    except BackendError as problem:
        return Finding(name, OFF, problem.reason)
    # A kernel that does not compile or launch raises anything.
    except Exception as problem:
        first = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        return Finding(name, BAD, f"fails on {device} ({first})", "report it with the output of `lkv doctor --json`")
    if error <= _TOLERANCE:
        return Finding(name, OK, f"on {device}, within {error:.0e} of the reference")
    return Finding(
        name,
        BAD,
        f"on {device}, differs by {error:.1e} from the reference",
        "report it with the output of `lkv doctor --json`",
    )


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def _distance(computed: Tensor, wanted: Tensor) -> float:
    distance = (computed.double().cpu() - wanted.double().cpu()).abs().max().item()
    return distance if distance == distance else float("inf")


def _ragged_error(backend: str, device: torch.device) -> float:
    """Two KV heads of 40 and 90 entries with free slots after them, two query heads each."""
    half = backend == "varlen"  # flash attention takes half precision alone: its own error is taken off
    dtype = torch.float16 if half else torch.float32
    q, keys, values = (_random(*shape, device=device).to(dtype) for shape in ((1, 4, 1, 64), (200, 64), (200, 64)))
    starts, lens = (torch.tensor([row], dtype=torch.int32, device=device) for row in ([0, 100], [40, 90]))
    computed = ragged_attention(q, keys, values, starts, lens, 0.125, backend)
    wanted = ragged_attention(q, keys, values, starts, lens, 0.125, "reference")
    return max(0.0, _distance(computed, wanted) - (1e-3 if half else 0.0))


def _soft_mask_error(backend: str, device: torch.device) -> float:
    q, k, v = (_random(*shape, device=device) for shape in ((1, 4, 16, 64), (1, 2, 48, 64), (1, 2, 48, 64)))
    log_mask = -_random(1, 2, 48, device=device).abs()
    computed = soft_mask_attention(q, k, v, log_mask, backend=backend)
    wanted = soft_mask_attention(q.cpu().double(), k.cpu().double(), v.cpu().double(), log_mask.cpu().double(),
                                 backend="reference")  # fmt: skip
    return _distance(computed, wanted)


def _scores_error(device: torch.device) -> float:
    shapes = ((1, 2, 300, 8), (1, 2, 300, 8), (2, 16), (2, 16), (2, 16, 8), (2, 8), (2, 8))
    tensors = [_random(*shape, device=device) for shape in shapes]
    tensors[3] = tensors[3].abs() + 0.5  # a standard deviation
    key, value, *weights = tensors
    computed = content_scores(ContentWeights(*weights), key, value)
    return _distance(computed, content_formula(*(x.cpu().double() for x in tensors)))


def _topk_error(device: torch.device) -> float:
    """The mask must sum to k."""
    mask = soft_topk(_random(4, 500, device=device), 75.0, 0.1).mask
    return _distance(mask.double().sum(-1) / 75, torch.ones(4))


def _disk() -> Iterator[Finding]:
    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    writable = os.access(existing, os.W_OK)
    fix = "" if writable and free > _MIN_FREE_BYTES else "set LKV_CACHE to a folder that is writable and has 2 GB free"
    yield Finding("cache folder", OK if not fix else BAD, f"{folder}, {free / 1e9:.0f} GB free", fix)
    ready = (folder / DEFAULT / "config.json").is_file()
    yield Finding("default model", OK if ready else OFF, "converted" if ready else "not downloaded yet",
                  "" if ready else "`lkv ask` downloads it at its first use")  # fmt: skip
