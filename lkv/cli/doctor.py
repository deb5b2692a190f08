"""lkv doctor: check the installation and suggest fixes."""

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lkv.cli.command import Command, option
from lkv.errors import BackendError, LkvError
from lkv.utils.extras import extras, install_command, minimum_versions
from lkv.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

OK, OFF, BAD = "ok", "off", "bad"
_MARKS = {OK: "ok ", OFF: "-  ", BAD: "BAD"}
_MIN_FREE_BYTES = 2e9  # for the converted default model, and to convert it
_TOLERANCE = 1e-4  # of float32 kernels, against the reference in float64
_PURPOSES = {
    "default-model": "the demo model",
    "gguf": "models in GGUF files",
    "train": "`lkv train`",
    "data": "Parquet files and data sets of the Hub",
    "documents": "HTML, PDF and other encodings than UTF-8",
    "plots": "figures and intervals",
    "serve": "`lkv serve`",
    "vllm": "`lkv serve --engine vllm`",
    "lm-eval": "tasks of lm-eval",
    "evals": "`lkv eval` and the benchmarks",
}  # of the extras
_REPORT = "report it with the output of `lkv doctor --json`"


class Doctor(Command):
    """Check the installation and suggest fixes."""

    json_: bool = option("print one JSON object, for issue reports", False, alias="json")

    def run(self) -> None:
        """Print every finding; raises LkvError, after them, if something is wrong."""
        findings = examine()
        bad = [finding.name for finding in findings if finding.status == BAD]
        if self.json_:
            print(json.dumps({"ok": not bad, "findings": [asdict(finding) for finding in findings]}, indent=1))
        else:
            width = max(len(finding.name) for finding in findings)
            for finding in findings:
                fix = f"  -> {finding.fix}" if finding.fix else ""
                print(f"{_MARKS[finding.status]} {finding.name:{width}}  {finding.detail}{fix}")
            print("ok: works; -: optional, and not there; BAD: LKV needs it")
        if bad:
            raise LkvError(f"{', '.join(bad)} must be fixed first; the lines above say how.")


@dataclass(frozen=True)
class Finding:
    """One line of `lkv doctor`: what was checked, its status ("off": optional and not available), and how to fix it."""

    name: str
    status: str
    detail: str
    fix: str = ""


def examine() -> list[Finding]:
    """Run all checks, in seconds and without a model; only the compiled CPU kernel is written."""
    return [*_check_packages(), *_check_devices(), *_check_kernels(), *_check_disk()]


def _check_packages() -> Iterator[Finding]:
    yield Finding("lkv", OK, f"{__version__}, {Path(__file__).parents[1]}")
    yield Finding("python", OK, f"{platform.python_version()}, {platform.platform()}")
    for name in ("torch", "transformers"):
        installed, least = metadata.version(name), minimum_versions().get(name, "0")
        fits = _release(installed) >= _release(least)
        fix = "" if fits else f"pip install '{name}>={least}'"
        yield Finding(name, OK if fits else BAD, installed, fix)
    for extra, packages in extras().items():
        needed = ("vllm", *packages) if extra == "vllm" else packages  # which the extra does not install
        if missing := [name for name in needed if find_spec(name) is None]:
            detail = f"not installed: {', '.join(missing)} (only for {_PURPOSES.get(extra, extra)})"
            fix = "docs/guides/vllm.md" if "vllm" in missing else install_command(extra)
            yield Finding(f"extra {extra}", OFF, detail, fix)
        else:
            yield Finding(f"extra {extra}", OK, ", ".join(packages))


def _release(version: str) -> list[int]:
    return [int(part) for part in version.split("+")[0].split(".")[:2]]


def _check_devices() -> Iterator[Finding]:
    import torch

    threads = torch.get_num_threads()
    yield Finding("device cpu", OK, f"{threads} thread{'s' * (threads > 1)} of {os.cpu_count()} cores")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        detail = f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
        fix = "LKV runs on it, but its Triton kernels need compute capability 8.0" if gpu.major < 8 else ""
        yield Finding(f"device cuda:{index}", OK, detail, fix)
    if not torch.cuda.device_count():
        if built := torch.version.cuda or torch.version.hip:
            problem, fix = f"this PyTorch is built for {built}, but the driver reports no GPU", "nvidia-smi"
        else:
            problem, fix = "not available: this PyTorch has no CUDA", "only if there is a GPU: install a PyTorch for it"
        yield Finding("device cuda", OFF, problem, fix)
    if torch.backends.mps.is_available():
        yield Finding("device mps", OK, "no float64 there: Soft-TopK is computed on the CPU")


def _check_kernels() -> Iterator[Finding]:
    """Compare every backend of every operator with the operator's reference on the same random numbers."""
    import torch

    from lkv.kernels.ragged_attention import RaggedKV, ragged_attention
    from lkv.kernels.soft_mask_attention import soft_mask_attention
    from lkv.kernels.soft_topk import soft_topk
    from lkv.policy.score_formula import ContentWeights, content_formula, content_scores

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def random(*shape: int) -> "Tensor":
        return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)

    def ragged_error(backend: str) -> float:
        """Two KV heads of 40 and 90 entries with free slots after them, two query heads each."""
        q, k, v = (random(*shape) for shape in ((1, 4, 1, 64), (200, 64), (200, 64)))
        starts, lens = (torch.tensor([row], dtype=torch.int32, device=device) for row in ([0, 100], [40, 90]))
        kv = RaggedKV(k, v, starts, lens)
        computed, expected = (ragged_attention(q, kv, 0.125, name) for name in (backend, "reference"))
        return _distance(computed, expected)

    def soft_mask_error(backend: str) -> float:
        q, k, v = (random(*shape) for shape in ((1, 4, 16, 64), (1, 2, 48, 64), (1, 2, 48, 64)))
        log_mask = -random(1, 2, 48).abs()
        exact_q, exact_k, exact_v, exact_mask = (x.cpu().double() for x in (q, k, v, log_mask))
        expected = soft_mask_attention(exact_q, exact_k, exact_v, exact_mask, backend="reference")
        return _distance(soft_mask_attention(q, k, v, log_mask, backend=backend), expected)

    def scores_error() -> float:
        shapes = ((1, 2, 300, 8), (1, 2, 300, 8), (2, 16), (2, 16), (2, 16, 8), (2, 8), (2, 8))
        key, value, *weights = tensors = [random(*shape) for shape in shapes]
        tensors[3] = weights[1] = weights[1].abs() + 0.5  # a standard deviation
        exact_key, exact_value, *exact = (x.cpu().double() for x in tensors)
        expected = content_formula(exact_key, exact_value, ContentWeights(*exact))
        return _distance(content_scores(ContentWeights(*weights), key, value), expected)

    def soft_topk_error() -> float:  # the mask must sum to k
        return _distance(soft_topk(random(4, 500), 75.0, 0.1).mask.double().sum(-1) / 75, torch.ones(4))

    checks: dict[str, Callable[[], float]] = {
        **{f"ragged attention, {name}": partial(ragged_error, name) for name in ("loop", "cpp", "triton")},
        **{f"soft-masked attention, {name}": partial(soft_mask_error, name) for name in ("sdpa", "triton")},
        "LKV-T scores": scores_error,
        "Soft-TopK": soft_topk_error,
    }
    for name, measure_error in checks.items():
        try:
            error = measure_error()
        except BackendError as problem:
            purpose = " (only for GPUs)" if name.endswith("triton") else ""
            yield Finding(name, OFF, f"not available{purpose}: {problem.reason}")
        except Exception as problem:  # a kernel that does not compile or launch raises anything
            first = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            yield Finding(name, BAD, f"fails on {device} ({first})", _REPORT)
        else:
            if error <= _TOLERANCE:
                yield Finding(name, OK, f"on {device}, within {error:.0e} of the reference")
            else:
                yield Finding(name, BAD, f"on {device}, differs by {error:.1e} from the reference", _REPORT)


def _distance(computed: "Tensor", expected: "Tensor") -> float:
    distance = (computed.double().cpu() - expected.double().cpu()).abs().max().item()
    return distance if distance == distance else float("inf")


def _check_disk() -> Iterator[Finding]:
    from lkv.hf.loading import DEFAULT
    from lkv.utils.files import cache_folder, nearest_folder

    folder = cache_folder()
    existing = nearest_folder(folder)
    free = shutil.disk_usage(existing).free
    fits = os.access(existing, os.W_OK) and free > _MIN_FREE_BYTES
    fix = "" if fits else "set LKV_CACHE to a folder that is writable and has 2 GB free"
    yield Finding("cache folder", OK if fits else BAD, f"{folder}, {free / 1e9:.0f} GB free", fix)
    if os.path.isfile(folder / DEFAULT / "config.json"):
        yield Finding("default model", OK, "converted")
    else:
        yield Finding("default model", OFF, "not downloaded yet", "`lkv ask` downloads it at its first use")
