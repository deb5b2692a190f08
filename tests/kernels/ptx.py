"""The few PTX instructions of `restore_ptx` for Triton's interpreter, so that tests run the code that a GPU runs."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest


def unpack(words: np.ndarray) -> np.ndarray:
    """The two float16 numbers of each word in float64, [2, n]."""
    return np.stack([words & 0xFFFF, words >> 16]).astype(np.uint16).view(np.float16).astype(np.float64)


def pack(numbers: np.ndarray) -> np.ndarray:
    """Words of pairs of numbers [2, n], rounded once."""
    halves = numbers.astype(np.float16).view(np.uint16).astype(np.uint32)
    return halves[0] | halves[1] << 16


@functools.cache
def parse(code: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Instructions and their operands."""
    lines = [line.strip() for line in code.strip()[1:-1].split(";") if line.strip()]
    found = [line.split(" ", 1) for line in lines if not line.startswith(".reg")]
    return tuple((name, tuple(x.strip() for x in operands.split(","))) for name, operands in found)


def run(code: str, inputs: list[np.ndarray], outputs: int) -> list[np.ndarray]:
    """Run `code` over words uint32 [n]; registers $0 and following are the outputs, those behind them the inputs."""
    registers = {f"${outputs + number}": words for number, words in enumerate(inputs)}

    def value(operand: str) -> np.ndarray:
        word = registers[operand] if operand in registers else np.uint32(int(operand, 0))
        return np.broadcast_to(word, inputs[0].shape)

    for name, (out, *operands) in parse(code):
        operation = name.split(".")[0]
        if operation in ("mul", "fma"):
            assert name in ("mul.rn.f16x2", "fma.rn.f16x2"), name
            x, y, *z = (unpack(value(operand)) for operand in operands)
            registers[out] = pack(x * y + (z[0] if z else 0.0))
            continue
        x = value(operands[0])
        match operation:
            case "mov":
                registers[out] = x
            case "shl":
                registers[out] = x << value(operands[1])
            case "shr":
                registers[out] = x >> value(operands[1])
            case "lop3":
                assert operands[3] == "0xEA"
                registers[out] = x & value(operands[1]) | value(operands[2])
            case "prmt":
                selected = [int(operands[2], 0) >> 4 * byte & 15 for byte in range(4)]
                assert max(selected) < 8
                words = [(x if at < 4 else value(operands[1])) >> 8 * (at % 4) & 0xFF for at in selected]
                registers[out] = words[0] | words[1] << 8 | words[2] << 16 | words[3] << 24
            case _:
                raise ValueError(f"{name} is not known")
    return [registers[f"${number}"] for number in range(outputs)]


@contextmanager
def ptx_interpreted() -> Iterator[None]:
    """In the block the interpreter runs inline PTX over pairs of elements, and kernels restore codes by it."""
    pytest.importorskip("triton")
    import triton.language as tl
    from triton.runtime import interpreter

    import lkv.kernels.ragged_attention.triton as ragged

    class Results:
        """What the semantics of Triton ask of an operation with several results."""

        def __init__(self, handles: list[Any]):
            self.get_result = handles.__getitem__

    def create_inline_asm(self, code: str, constraints: str, values: Any, types: Any, is_pure: bool, pair: int) -> Any:
        assert pair == 2 and constraints.count("=r") == len(types)
        shape, inputs = values[0].data.shape, []
        for x in values:  # two elements a register, or a register for each
            words = np.ascontiguousarray(np.broadcast_to(x.data, shape)).reshape(-1, 2)
            assert words.dtype in (np.int16, np.int32)
            columns = words.view(np.uint32).T if words.dtype == np.int32 else [words.view(np.uint32)[:, 0]]
            inputs += [np.ascontiguousarray(column) for column in columns]
        assert constraints.count("r") - len(types) == len(inputs)
        handles = []
        for words in run(code, inputs, len(types)):
            halves = np.stack([words & 0xFFFF, words >> 16], 1).astype(np.uint16)
            handles.append(interpreter.TensorHandle(halves.view(np.float16).reshape(shape), tl.float16))
        return Results(handles)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", create_inline_asm)
        patch.setattr(ragged, "_ALLOWS_PTX", True)
        ragged._launch.cache_clear()
        yield
    ragged._launch.cache_clear()
