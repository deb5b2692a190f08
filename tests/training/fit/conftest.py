"""A tiny model, and a cache folder of its own for each test of `lkv fit`."""

import time

import pytest
import torch

from lkv.models.loading import load_model
from lkv.training import fitting
from tests.conftest import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=1024)


@pytest.fixture
def loaded(folder):
    return load_model(str(folder), torch.float32)


@pytest.fixture(scope="session")
def slowness():
    """How much slower this machine is, at small products, than one on which the minutes of these tests suffice."""
    x, start = torch.full((64, 64), 0.01), time.process_time()
    for _ in range(4000):
        x = (x @ x).tanh()
    return max(1.0, (time.process_time() - start) / 0.03)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, slowness):
    monkeypatch.setenv("LKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LKV_POLICY_HUB", "")
    monkeypatch.setattr(fitting, "clock", lambda: time.process_time() / slowness)  # a slow or busy one has no less time
    return tmp_path / "cache"
