"""What kernels do to memory, seen in Triton's interpreter: bounds, races between programs, traffic, int32 overflow.

`watched` runs the programs of each launch in random order. An access outside of the tensors that the launch was given
fails, and so does one to a number that another program writes (or, for a write, reads) unless an atomic orders the two:
an atomic acquires what was released at its address, and releases what its program has done so far.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch import Tensor


class Area:
    """One tensor's storage: who wrote each number last, and when; when each program read it; and whether it was read
    from memory or written there."""

    def __init__(self, tensor: Tensor, programs: int):
        storage = tensor.untyped_storage()
        self.low, self.high, self.size = storage.data_ptr(), storage.data_ptr() + storage.nbytes(), tensor.itemsize
        numbers = storage.nbytes() // self.size
        self.writer, self.written_at = np.full(numbers, -1, np.int32), np.full(numbers, -1, np.int32)
        self.read_at = np.full((programs, numbers), -1, np.int32)
        self.is_fetched, self.is_stored = np.zeros(numbers, bool), np.zeros(numbers, bool)


@dataclass
class Traffic:
    """Bytes of all launches of a block, each number counted once a launch: what must come from memory and go there."""

    fetched: int = 0
    stored: int = 0
    accesses: int = 0
    launches: list[str] = field(default_factory=list)


class Memory:
    """The memory of one launch, in place of the interpreter's own loads and stores."""

    def __init__(self, plain: Any, tensors: list[Tensor], programs: int, traffic: Traffic):
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.numel()}
        self.areas = [Area(tensor, programs) for tensor in storages.values()]
        self.program, self._plain, self._traffic = 0, plain, traffic
        # Of each program: how many atomics it has made, and up to which of the others' it knows what they did.
        self._clock = np.zeros(programs, np.int32)
        self._known = np.full((programs, programs), -1, np.int32)
        self._released: dict[int, np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        for area, numbers in self._numbers(pointers, mask, np.dtype(dtype).itemsize):
            self._check_writers(area, numbers)
            area.read_at[self.program, numbers] = self._clock[self.program]
            # What the launch wrote itself does not come from memory.
            area.is_fetched[numbers] |= ~area.is_stored[numbers]
        return self._plain.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        for area, numbers in self._numbers(pointers, mask):
            self._check_writers(area, numbers)
            late = area.read_at[:, numbers] > self._known[self.program][:, None]
            late[self.program] = False
            assert not late.any(), f"program {self.program} writes what programs {np.nonzero(late)[0][:5]} read"
            area.writer[numbers], area.written_at[numbers] = self.program, self._clock[self.program]
            area.is_stored[numbers] = True
        return self._plain.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        assert order == interpreter._interpreter.MEM_SEMANTIC.ACQUIRE_RELEASE
        (address,) = np.asarray(pointers)[np.broadcast_to(np.asarray(mask), np.asarray(pointers).shape)].tolist()
        known = self._known[self.program]
        np.maximum(known, self._released.get(address, known), out=known)
        for area, numbers in self._numbers(pointers, mask):
            self._check_writers(area, numbers)
            area.read_at[self.program, numbers] = self._clock[self.program]
        known[self.program] = self._clock[self.program]
        self._released[address] = known.copy()
        self._clock[self.program] += 1
        return self._plain.atomic_rmw(operation, pointers, value, mask, order)

    def finish(self) -> None:
        for area in self.areas:
            self._traffic.fetched += int(area.is_fetched.sum()) * area.size
            self._traffic.stored += int(area.is_stored.sum()) * area.size

    def _numbers(self, pointers: Any, mask: Any, width: int = 1) -> Iterator[tuple[Area, np.ndarray]]:
        """The numbers that lanes which are not masked off touch, by the areas in which they lie.

        A lane touches `width` bytes, but at least one number.
        """
        addresses = np.asarray(pointers).astype(np.int64)
        addresses = addresses[np.broadcast_to(np.asarray(mask).astype(bool), addresses.shape)]
        self._traffic.accesses += len(addresses)
        left = len(addresses)
        for area in self.areas:
            size = max(width, area.size)
            inside = (addresses >= area.low) & (addresses + size <= area.high)
            if inside.any():
                left -= int(inside.sum())
                first = (addresses[inside] - area.low) // area.size
                yield area, (first[:, None] + np.arange(size // area.size)).ravel()
        assert not left, f"program {self.program} touches {left} numbers outside of the tensors"

    def _check_writers(self, area: Area, numbers: np.ndarray) -> None:
        writer = area.writer[numbers]
        others = (writer >= 0) & (writer != self.program)
        late = area.written_at[numbers][others] > self._known[self.program][writer[others]]
        assert not late.any(), f"program {self.program} touches what programs {set(writer[others][late])} write"


def _converted(x: Any, annotation: str | None) -> Any:
    """An argument as the interpreter takes it; a number of 64 bits where the kernel asks for that, as Triton has it."""
    if annotation != "tl.int64":
        return interpreter._implicit_cvt(x)
    return tl.tensor(interpreter.TensorHandle(np.array([x], np.int64), tl.int64), tl.int64)


@contextmanager
def _replaced_launches(run: Callable[[Any, dict[str, Any], list[Tensor]], None]) -> Iterator[None]:
    """In the block, `run(executor, arguments, tensors)` runs the programs of each launch."""

    def launch(self: Any, *args: Any, **options: Any) -> None:
        options = {name: x for name, x in options.items() if name in inspect.getfullargspec(self.fn).args}
        tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
        scope = interpreter._patch_lang(self.fn)
        try:
            given = inspect.getcallargs(self.fn, *args, **options).items()
            arguments = {
                n: x if n in self.constexprs else _converted(x, self.fn.__annotations__.get(n)) for n, x in given
            }
            interpreter.interpreter_builder.set_grid_dim(*self.grid, *(1,) * (3 - len(self.grid)))
            run(self, arguments, tensors)
        finally:
            scope.restore()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        yield


@contextmanager
def watched(seed: int = 0) -> Iterator[Traffic]:
    """In the block, launches on the CPU are checked, and their programs run in an order that `seed` decides."""
    traffic, generator, plain = Traffic(), np.random.default_rng(seed), interpreter._interpreter

    def run(executor: Any, arguments: dict[str, Any], tensors: list[Tensor]) -> None:
        programs = int(np.prod(executor.grid))
        memory = Memory(plain, tensors, programs, traffic)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter, "_interpreter", memory)
            for memory.program in generator.permutation(programs).tolist():
                place = np.unravel_index(memory.program, (*executor.grid, 1, 1)[:3])
                interpreter.interpreter_builder.set_grid_idx(*map(int, place))
                executor.fn(**arguments)
        memory.finish()
        traffic.launches.append(executor.fn.__name__)

    with _replaced_launches(run):
        yield traffic


class Endless:
    """A tensor of any size, far from everything else, which reads as zero and is not written."""

    _count = itertools.count(1)

    def __init__(self, dtype: torch.dtype):
        self.dtype, self._address = dtype, next(self._count) << 50

    def data_ptr(self) -> int:
        return self._address


@contextmanager
def unlimited_memory() -> Iterator[None]:
    """In the block only the first and the last program of a launch run, and int32 that overflows raises."""
    plain = interpreter._interpreter

    class Shim:
        def __init__(self, tensors: list[Tensor]):
            storages = [tensor.untyped_storage() for tensor in tensors]
            self._ranges = [(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages]

        def __getattr__(self, name: str) -> Any:
            return getattr(plain, name)

        def _inside(self, pointers: Any, mask: Any) -> Any:
            addresses = np.asarray(pointers).astype(np.int64)
            inside = np.zeros(addresses.shape, bool)
            for low, high in self._ranges:
                inside |= (addresses >= low) & (addresses < high)
            return np.broadcast_to(np.asarray(mask).astype(bool), addresses.shape) & inside

        def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
            other = np.broadcast_to(np.asarray(other), np.asarray(pointers).shape).astype(dtype)
            return plain.load(pointers, self._inside(pointers, mask), np.ascontiguousarray(other), dtype)

        def store(self, pointers: Any, value: Any, mask: Any) -> Any:
            return plain.store(pointers, value, self._inside(pointers, mask))

    def run(executor: Any, arguments: dict[str, Any], tensors: list[Tensor]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter, "_interpreter", Shim(tensors))
            patch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(debug=True))
            grid = (*executor.grid, 1, 1)[:3]
            for place in {(0, 0, 0), tuple(n - 1 for n in grid)}:
                interpreter.interpreter_builder.set_grid_idx(*place)
                executor.fn(**arguments)

    with _replaced_launches(run):
        yield
