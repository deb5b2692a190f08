"""Threads beside other programs: fewer where waiting costs more than they compute, all of them again afterwards."""

import os
import subprocess
import sys
import time

import pytest
import torch

from lkv.context.compress_prefill import compress_prefill
from lkv.context.compression import compress
from lkv.hf.loading import load_model
from lkv.utils import cpu_threads
from lkv.utils.cpu_threads import adapted_threads
from tests.conftest import save_model, tiny_llama
from tests.context.test_compression import TEXT, Words

CPU = torch.device("cpu")


@pytest.fixture
def seconds(monkeypatch, threads):
    """Set what an operation takes by its number of threads; the list of numbers that were measured."""
    measured = []

    def set_seconds(by_threads, allowed):
        threads(allowed)
        now = [0.0]

        def negate(*_, **__):
            measured.append(torch.get_num_threads())
            now[0] += by_threads[torch.get_num_threads()]

        monkeypatch.setattr(torch, "neg", negate)
        monkeypatch.setattr(cpu_threads.time, "perf_counter", lambda: now[0])
        monkeypatch.setattr(cpu_threads, "_COUNT", cpu_threads._ThreadCount())
        return measured

    return set_seconds


@pytest.mark.parametrize(
    ("by_threads", "allowed", "useful"),
    [
        ({1: 0.001, 2: 0.0006}, 2, 2),
        ({1: 0.001, 2: 0.0015}, 2, 2),  # no faster, but nobody waits
        ({1: 0.001, 2: 0.015}, 2, 1),
        ({1: 0.001, 8: 0.02, 4: 0.0003}, 8, 4),
        ({1: 0.001, 6: 0.02, 3: 0.02}, 6, 1),
    ],
)
def test_threads_that_wait_are_left_out_and_come_back(seconds, by_threads, allowed, useful):
    seconds(by_threads, allowed)
    with adapted_threads(CPU):
        assert torch.get_num_threads() == useful
        with adapted_threads(CPU):
            assert torch.get_num_threads() == useful
    assert torch.get_num_threads() == allowed
    with pytest.raises(ValueError), adapted_threads(CPU):  # noqa: PT011
        raise ValueError
    assert torch.get_num_threads() == allowed


def test_one_measurement_serves_for_ten_seconds_and_none_a_gpu_or_one_thread(seconds, monkeypatch, threads):
    measured = seconds({1: 0.001, 2: 0.015}, 2)
    now = time.monotonic()
    monkeypatch.setattr(cpu_threads.time, "monotonic", lambda: now)
    with adapted_threads(torch.device("cuda")), adapted_threads(None):
        assert torch.get_num_threads() == 2 and not measured
    for _ in range(3):
        with adapted_threads(CPU):
            assert torch.get_num_threads() == 1
    count = len(measured)
    now += 10.1
    with adapted_threads(CPU):
        pass
    assert 0 < count < len(measured)
    threads(1)
    with adapted_threads(CPU):
        assert len(measured) == 2 * count


def test_loading_compressing_and_answering_use_the_measured_number(monkeypatch, tmp_path, threads):
    used = []

    monkeypatch.setattr(cpu_threads._ThreadCount, "useful", lambda self, allowed: 1)
    model = tiny_llama(dtype=torch.float32)
    model.register_forward_pre_hook(lambda *_: used.append(torch.get_num_threads()))
    model.base_model.register_forward_pre_hook(lambda *_: used.append(torch.get_num_threads()))
    threads(2)
    context = compress(model, Words(), TEXT, method="knorm", retention=0.4)
    passes = len(used)
    context.ask("what ?", 2)
    context.predict("what ?", "who")
    list(context.stream("what ?", 2))
    with compress_prefill(model, method="knorm", retention=0.4):
        model.generate(torch.arange(3, 40)[None], max_new_tokens=2)
    assert passes and len(used) > passes + 3 and set(used) == {1} and torch.get_num_threads() == 2
    save_model(tmp_path)
    plain = torch.nn.Module.__init__
    loading = []
    monkeypatch.setattr(
        torch.nn.Module, "__init__", lambda *args, **kw: loading.append(torch.get_num_threads()) or plain(*args, **kw)
    )
    load_model(str(tmp_path))
    assert set(loading) == {1} and torch.get_num_threads() == 2


@pytest.mark.slow
def test_beside_busy_processes_few_threads_are_used(threads):
    """What is measured, with real contention: a process for each core, and an idle moment of it or two."""
    allowed = max(2, os.cpu_count() or 1)
    threads(allowed)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(allowed)]
    try:
        time.sleep(0.5)
        found = [cpu_threads._measure(allowed) for _ in range(9)]
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert sorted(found)[4] < allowed and torch.get_num_threads() == allowed
