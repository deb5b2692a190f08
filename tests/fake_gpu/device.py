"""The fake GPU in PyTorch: `load` registers it as "fake", `watched` tells what a block of code asks of it."""

import ctypes
import functools
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from lkv.utils.cpp_compiler import build_library

NAME = "fake"
PACKAGE = Path(__file__).parents[2] / "lkv"
MEMORY = 2**40
_WATCH = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p)


@functools.cache
def load() -> ctypes.CDLL:
    """Register the devices "fake:0" and "fake:1" and the module `torch.fake`; once a process, for good."""
    own = ctypes.CDLL(str(build_library(Path(__file__).with_name("backend.cpp"), ["-O1"])))
    for name in ("fake_gpu_held", "fake_gpu_most"):
        getattr(own, name).restype = ctypes.c_size_t
    for name in ("fake_gpu_limit", "fake_gpu_fail_after"):
        getattr(own, name).argtypes = [ctypes.c_size_t]
    own.fake_gpu_register()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(own))
    torch.utils.generate_methods_for_privateuse1_backend()
    return own


def _module(own: ctypes.CDLL) -> ModuleType:
    """What `torch.cuda` is to CUDA, as far as the package asks."""

    def index_of(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return own.fake_gpu_current() if index is None else index

    @contextmanager
    def device(wanted: Any) -> Iterator[None]:
        before = own.fake_gpu_current()
        own.fake_gpu_use(index_of(wanted))
        try:
            yield
        finally:
            own.fake_gpu_use(before)

    properties = SimpleNamespace(name="Fake GPU", major=9, minor=0, multi_processor_count=2, total_memory=MEMORY)
    module: Any = ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 2
    module.current_device = own.fake_gpu_current
    module.set_device = lambda wanted: own.fake_gpu_use(index_of(wanted))
    module.device = device
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.synchronize = lambda device=None: None
    module.empty_cache = lambda: None
    module.memory_allocated = lambda device=None: own.fake_gpu_held(index_of(device))
    module.max_memory_allocated = lambda device=None: own.fake_gpu_most(index_of(device))
    module.reset_peak_memory_stats = lambda device=None: own.fake_gpu_forget_most(index_of(device))
    module.get_device_properties = lambda device=None: properties
    module.get_device_name = lambda device=None: properties.name
    module.set_per_process_memory_fraction = lambda share, device=None: own.fake_gpu_limit(int(share * MEMORY))
    return module


@contextmanager
def memory_limit(nbytes: int) -> Iterator[None]:
    """In the block a device runs out of memory beyond `nbytes`."""
    load().fake_gpu_limit(nbytes)
    try:
        yield
    finally:
        load().fake_gpu_limit(2 * MEMORY)


@dataclass(frozen=True)
class Event:
    """One thing asked of a device: its kind ("launch", "alloc", "copy", "wait"), operator, tensors, and the line of the
    package that asked ("" where none did)."""

    kind: str
    name: str
    detail: str
    place: str


@dataclass
class Log:
    """What a block asked of the devices, in order."""

    events: list[Event] = field(default_factory=list)

    def add(self, kind: str, name: str, detail: str = "") -> None:
        self.events.append(Event(kind, name, detail, _place()))

    def ours(self, *kinds: str) -> list[Event]:
        """Events of `kinds` that a line of the package asked for itself, the model's own layers left out."""
        return [event for event in self.events if event.place and (not kinds or event.kind in kinds)]

    def count(self, *kinds: str) -> int:
        return len(self.ours(*kinds))

    def summary(self, *kinds: str) -> str:
        """For the message of an assertion: how often which line asked what."""
        lines = Counter((e.kind, e.name, e.place) for e in self.ours(*kinds)).most_common()
        return "\n".join(f"{number} {kind} {name} {place}" for (kind, name, place), number in lines)


def _place() -> str:
    """The innermost line of the package, unless a module of the model, or its mask, was called from there."""
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        name = frame.f_code.co_filename
        if name.startswith(str(PACKAGE)):
            return f"{Path(name).relative_to(PACKAGE)}:{line}"
        if any(part in name for part in ("/transformers/models/", "/transformers/masking_utils", "/torch/nn/modules/")):
            return ""
    return ""


_watching: list[tuple[Any, Log]] = []


def logs() -> list[Log]:
    """The log of the innermost `watched` block, if any."""
    return [log for _, log in _watching[-1:]]


@contextmanager
def watched() -> Iterator[Log]:
    """Log what the block asks of the fake devices; a block within it has a log of its own."""
    log, own = Log(), load()

    def add(kind: bytes, name: bytes, detail: bytes) -> None:
        log.add(kind.decode(), name.decode().removeprefix("aten::"), detail.decode())

    callback = _WATCH(add)
    _watching.append((callback, log))
    own.fake_gpu_watch(callback)
    try:
        yield log
    finally:
        _watching.pop()
        own.fake_gpu_watch(_watching[-1][0] if _watching else _WATCH())
