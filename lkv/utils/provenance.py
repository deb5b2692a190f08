"""Where and with which versions something was measured. Does not import torch."""

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy")


def collect_provenance(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return today's date, this machine, and the versions of Python, of the core packages and of `packages`."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in (*_PACKAGES, *packages)}},
    }


def describe_machine() -> str:
    """Return the processor's name and the number of usable cores."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
