"""What all tests of kernels share."""

from collections.abc import Iterator

import pytest

from tests.kernels.fast_interpreter import speed_up_interpreter


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter() -> Iterator[None]:
    with speed_up_interpreter():
        yield
