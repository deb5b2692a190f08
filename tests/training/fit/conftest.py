"""A tiny model, and a cache folder of its own for each test of `lkv fit`."""

import itertools
import time

import pytest
import torch

from lkv.hf.loading import load_model
from lkv.training import fit_run, fitting, warm_start
from tests.conftest import save_model
from tests.training.fit.helpers import comparison_rows


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


@pytest.fixture
def ticking(cache, monkeypatch):
    """A small fit that takes the same steps on any machine, and a comparison in which its policy is better.

    Its clock advances by 0.06 s at each call. What the contexts, the regression and the comparison compute is checked
    where they have their own lengths.
    """
    monkeypatch.setattr(fitting, "clock", itertools.count(0.0, 0.06).__next__)
    monkeypatch.setattr(fitting, "longest_context", lambda tokens: 200)
    monkeypatch.setattr(fitting, "seconds_per_token", lambda *_: 0.0007)  # a regression on 2 texts
    monkeypatch.setattr(warm_start, "WARM_START_UPDATES", 5)
    monkeypatch.setattr(warm_start, "_HEAD_UPDATES", 20)
    rows = comparison_rows({"lkv": (0.1, 0.5), "snapkv": (0.2, 0.8)})
    monkeypatch.setattr(fit_run, "compare", lambda *_: rows)
