"""Triton's interpreter as the tests of kernels use it: without repeated work, and with the PTX that restores codes."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.kernels.ptx import ptx_interpreted


class EmptyScope:
    """A patch of nothing."""

    def restore(self) -> None:
        pass


@contextmanager
def speed_up_interpreter() -> Iterator[None]:
    """In the block the interpreter patches `triton.language` once a launch, not once a device function as well.

    The launch has patched it already; what a second patch does takes a third of an interpreted kernel's time. NumPy's
    dtype of a scalar type is looked up once, too.
    """
    try:
        import triton.language as tl
        import triton.runtime.interpreter as interpreter
    except ImportError:
        yield
        return
    if not {"_patch_lang", "_get_np_dtype"} <= set(vars(interpreter)):  # of another Triton
        yield
        return
    plain, plain_dtype, dtypes = interpreter._patch_lang, interpreter._get_np_dtype, {}

    def patch_unless_patched(function: Any) -> Any:
        modules = [x for x in function.__globals__.values() if x is tl or x is tl.core]
        # Where the language is patched, `range` is a function.
        is_patched = modules and not any(inspect.isclass(module.range) for module in modules)
        return EmptyScope() if is_patched else plain(function)

    def get_dtype(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if scalar.name not in dtypes:
            dtypes[scalar.name] = plain_dtype(scalar)
        return dtypes[scalar.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_unless_patched)
        patch.setattr(interpreter, "_get_np_dtype", get_dtype)
        yield


@contextmanager
def round_to_bfloat16() -> Iterator[None]:
    """In the block the interpreter rounds float32 to bfloat16 as a GPU does; by itself it cuts off."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    plain = interpreter._convert_float

    def convert(numbers: Any, kind: Any, new_kind: Any, mode: Any) -> Any:
        if (kind, new_kind) != (tl.float32, tl.bfloat16):
            return plain(numbers, kind, new_kind, mode)
        rounded = torch.from_numpy(numbers.reshape(-1).copy()).bfloat16().view(torch.int16).numpy()
        return rounded.view("uint16").reshape(numbers.shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        yield


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter() -> Iterator[None]:
    """For all tests of kernels."""
    with speed_up_interpreter(), ptx_interpreted():
        yield
