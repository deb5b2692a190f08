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


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LKV_POLICY_HUB", "")
    monkeypatch.setattr(fitting, "clock", time.process_time)  # a busy machine has no less time
    return tmp_path / "cache"
