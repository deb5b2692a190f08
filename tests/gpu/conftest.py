"""The fake GPU, and one tiny model beside and on it."""

import copy

import pytest
import torch

from tests.conftest import tiny_llama
from tests.fake_gpu.device import load
from tests.kernels.conftest import fast_interpreter  # noqa: F401 (a fixture)


@pytest.fixture(scope="module")
def fake_gpu():
    """Its library, once its devices are registered."""
    # Autograd has a thread for each device that was there at its first use, which may have been before.
    with torch.autograd.set_multithreading_enabled(False):
        yield load()


@pytest.fixture(scope="module")
def base():
    return tiny_llama(dtype=torch.float32)


@pytest.fixture(scope="module")
def on_fake(base, fake_gpu):
    return copy.deepcopy(base).to("fake:0")


@pytest.fixture(scope="module")
def shallow():
    """Two layers, for tests that interpret kernels in every layer."""
    return tiny_llama(dtype=torch.float32, num_hidden_layers=2)


@pytest.fixture(scope="module")
def shallow_on_fake(shallow, fake_gpu):
    return copy.deepcopy(shallow).to("fake:0")
