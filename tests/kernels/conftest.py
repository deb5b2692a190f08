"""What all tests of kernels share."""

from collections.abc import Iterator

import pytest

from tests.kernels.fast_interpreter import speed_up_interpreter
from tests.kernels.ptx import ptx_interpreted


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter() -> Iterator[None]:
    """Triton's interpreter without repeated work, and with the PTX that restores codes."""
    with speed_up_interpreter(), ptx_interpreted():
        yield
