"""What a decode step costs the host: microseconds of update and attention a layer, where the driver launches nothing.

TRITON_INTERPRET=0 python -m tests.cache.host_time [--arch 90] [--layers 4] [--steps 2000] [--tiers 84 43] [--profile]

Kernels are compiled for a GPU that need not be there, and every launch goes through Triton's own code up to the driver;
memory comes from the CPU's allocator. Prints one JSON line, of processor time: the least of ten rounds, and the median.
"""

import argparse
import cProfile
import json
import os
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from triton.runtime import driver

import lkv.kernels.ragged_attention.api as api
import lkv.kernels.ragged_attention.triton as launch
from lkv.cache.layer import RaggedLayer
from lkv.cache.ragged_cache import RaggedCache
from lkv.hf.prompt_kv import LayerKV
from lkv.kernels import triton_helpers
from lkv.methods.base import TierBudget
from lkv.methods.budgets import Uniform
from lkv.methods.method import Method
from lkv.methods.selectors import Knorm
from lkv.methods.targets import Precision
from lkv.utils import devices
from tests.conftest import tiny_llama
from tests.kernels.compile_kernels import GPUS, Driver

HEADS, KV_HEADS, DIM = 32, 8, 128
ROUNDS = 10


class Launcher:
    """Takes what a kernel would be launched with, and does nothing; `made` are the first launches."""

    made: ClassVar[list[tuple[Any, ...]]] = []
    kept = 0

    def __init__(self, source: Any, metadata: Any):
        self._name = source.fn.__name__

    def __call__(self, *args: Any) -> None:
        if len(self.made) < self.kept:
            grid, given = args[:3], args[9:]
            self.made.append((self._name, grid, *(x.data_ptr() if isinstance(x, Tensor) else x for x in given)))


class StubbedDriver(Driver):
    """A driver that loads and launches nothing."""

    launcher_cls = Launcher

    def load_binary(self, *args: Any) -> tuple[int, int, int, int, int]:
        return 0, 0, 0, 0, 1024


def stub(arch: int) -> None:
    """For the rest of the process the CPU is a GPU of this architecture, which has the kernels run nowhere."""
    driver.set_active(StubbedDriver(arch))
    properties = SimpleNamespace(
        name=f"sm_{arch}", major=arch // 10, minor=arch % 10, multi_processor_count=GPUS[arch][1]
    )
    module = SimpleNamespace(
        get_device_properties=lambda device: properties, current_device=lambda: 0, device=lambda device: nullcontext()
    )
    devices.is_gpu = lambda device: True
    devices.runtime = lambda device: module
    for cached in (
        api._available_backend,
        launch._launch,
        triton_helpers.shared_memory,
        triton_helpers.multiprocessors,
    ):
        cached.cache_clear()


def layers_of(count: int, tokens: int, tiers: list[str]) -> list[RaggedLayer]:
    """Layers that hold a compressed prompt of `tokens` random tokens."""
    model = tiny_llama(
        dtype=torch.bfloat16, num_hidden_layers=count, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        head_dim=DIM, max_position_embeddings=2**20,
    )  # fmt: skip
    budgets = [
        TierBudget(Precision(*map(int, bits)), Uniform(0.15 * (at + 1) / len(tiers))) for at, bits in enumerate(tiers)
    ]
    method = Method("knorm", Uniform(0.15), Knorm(), tiers=tuple(budgets))
    cache = RaggedCache(model, method=method, slack=2**14)
    for layer in cache.ragged_layers:
        key, value = (torch.randn(1, KV_HEADS, tokens, DIM, dtype=torch.bfloat16) for _ in range(2))
        layer.fill(LayerKV(key, value, DIM**-0.5))
    return cache.ragged_layers


def step(layers: list[RaggedLayer], query: Tensor, key: Tensor, value: Tensor) -> None:
    for layer in layers:
        seen, _ = layer.update(key, value)
        layer.attend(query, seen, value, None, DIM**-0.5, None)


def assert_alike(first: list[tuple[Any, ...]], second: list[tuple[Any, ...]]) -> None:
    assert len(first) == len(second) == Launcher.kept // 2
    for one, other in zip(first, second, strict=True):
        differ = {place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]}
        assert differ <= {9}, (one, other)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, choices=GPUS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tiers", nargs="*", default=[], help="bits of k and v of each quantised tier")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    options = parser.parse_args()
    assert os.environ.get("TRITON_INTERPRET") == "0", "set TRITON_INTERPRET=0"
    layers = layers_of(options.layers, options.tokens, options.tiers)
    stub(options.arch)
    # As a model gives them: heads inside the tokens.
    query, key, value = (
        torch.randn(1, 1, heads, DIM, dtype=torch.bfloat16).transpose(1, 2) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    # The first step goes through Triton, later ones launch what it compiled: with the same, but for the new output.
    Launcher.kept = 2 * options.layers
    for _ in range(2):
        step(layers, query, key, value)
    assert_alike(Launcher.made[: options.layers], Launcher.made[options.layers :])
    rounds = []
    profile = cProfile.Profile()
    for _ in range(ROUNDS):
        started = time.thread_time()
        if options.profile:
            profile.enable()
        for _ in range(options.steps // ROUNDS):
            step(layers, query, key, value)
        profile.disable()
        rounds.append((time.thread_time() - started) / (options.steps // ROUNDS) / options.layers * 1e6)
    if options.profile:
        profile.print_stats("tottime")
    rounds.sort()
    print(json.dumps({"arch": options.arch, "tiers": options.tiers, "least": rounds[0], "median": rounds[ROUNDS // 2]}))


if __name__ == "__main__":
    main()
