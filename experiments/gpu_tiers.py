"""Attention of a decode step over tiers on a GPU: correctness, then time at several occupancies, against 16 bits.

python -m experiments.gpu_tiers    (needs CUDA, under four minutes; writes gpu_tiers.json)

Outputs are compared with those over restored entries first, in processes side by side, which also compile the kernels.
Then steps are replayed as CUDA graphs in turn. There are --layers, divided by the tokens of all rows / 4,096.
With --device cpu and small sizes the same path runs over the CPU's kernel.
"""

import argparse
import functools
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from experiments.common import interleaved, parse_options, save_rows
from experiments.gpu_model import INSTRUCTIONS, KV_HEADS, ROTATIONS, attention_seconds, entries
from experiments.ragged_attention import seconds_of
from lkv.cache.ragged_store import RaggedStore
from lkv.cache.tiered_store import TieredStore
from lkv.cache.tiers import TierSplit
from lkv.methods.targets import UNQUANTIZED, Precision
from lkv.utils import devices

Tiers = dict[tuple[int, int], float]
# Bits of k and v and their shares of the bytes: of memory=0.15, and of smaller budgets.
TIERS: tuple[Tiers, ...] = ({(8, 8): 0.3, (4, 4): 0.7}, {(8, 4): 0.3, (4, 3): 0.7})
PLAIN = {(16, 16): 1.0}
# Programs of a multiprocessor, and the registers of a thread that they leave.
OCCUPANCIES = ((2, 255), (3, 168), (4, 128))
_POOLED = 64  # entries of a span beside those in tiers, which are not quantised
_LARGEST_ERROR = 0.02


class Layer:
    """One layer's random entries, and a new token."""

    def __init__(self, options: argparse.Namespace, tokens: int, batch: int, tiers: Tiers, seed: int):
        """Draw entries, as many as `tiers` have by the budget."""
        generator = torch.Generator(device=options.device).manual_seed(seed)
        draw = partial(torch.randn, device=options.device, generator=generator)
        shape, dtype = (batch, options.kv_heads), getattr(torch, options.dtype)
        in_tiers = [int(n / KV_HEADS) for n in entries(tokens, 1, options.memory, tiers).values()]
        counts = torch.tensor(in_tiers if tiers == PLAIN else [_POOLED, *in_tiers])
        lens = counts.sum().expand(shape).contiguous()
        free_slots = len(OCCUPANCIES) * (options.repeats + devices.STEPS_OF_CAPTURE + 2)
        key, value = (draw(int(lens.sum()), options.dim).to(dtype) for _ in range(2))
        store = RaggedStore(lens, free_slots, key, value)
        store.fill(key, value)
        self.store: RaggedStore | TieredStore = store
        if tiers != PLAIN:
            numbers = torch.arange(len(counts)).repeat_interleave(counts).repeat(lens.numel()).to(options.device)
            order = numbers.argsort(stable=True)
            precisions = UNQUANTIZED, *(Precision(*bits) for bits in tiers)
            split = TierSplit(precisions, counts[:, None, None].expand(-1, *shape).contiguous(), order)
            self.store = TieredStore.from_ragged(store, split, free_slots, [])
        self.query, self.key, self.value = (
            draw(batch, heads, 1, options.dim).to(dtype) for heads in (options.heads, *shape[1:] * 2)
        )

    def step(self, buffers: dict[Any, Any]) -> Tensor:
        return self.store.extend(self.query, self.key, self.value, self.query.shape[-1] ** -0.5, buffers)


@contextmanager
def occupancy(programs: int, registers: int) -> Iterator[None]:
    """In the block, kernels over tiers run with so many programs a multiprocessor."""
    import lkv.kernels.ragged_attention.triton as kernels  # where Triton is installed

    plain = kernels._launch

    @functools.cache
    def launch(*shapes: Any) -> kernels.Launch:
        found = plain(*shapes)
        if not found.slice_options["BITS"]:
            return found
        tuned = {"maxnreg": registers, "num_stages": 2, "STAGES": 2} if programs > 2 else {}
        programs_in_all = found.programs * programs // 2
        return replace(found, programs=programs_in_all, slice_options=found.slice_options | tuned, compiled={})

    with patch.object(kernels, "_launch", launch):
        yield


def check(options: argparse.Namespace, tiers: Tiers, setting: tuple[int, int], batch: int) -> None:
    """End the process if outputs differ from those over restored entries; compiles what is timed."""
    layer, exact = (Layer(options, 1000, batch, tiers, 1) for _ in range(2))
    if isinstance(exact.store, TieredStore):
        exact.store = exact.store.restore().reallocate(1)
    with torch.no_grad(), occupancy(*setting):
        expected, out = (x.step({}) for x in (exact, layer))
    error = float((out - expected).abs().max() / expected.abs().max())
    if not error <= _LARGEST_ERROR:
        sys.exit(f"{[*tiers]}, {setting}: off by {error:.1e} of the largest output, so nothing was timed.")


def settings(options: argparse.Namespace) -> list[tuple[Tiers, tuple[int, int]]]:
    """What is timed."""
    tuned = OCCUPANCIES if options.device == "cuda" else OCCUPANCIES[:1]
    return [(tiers, setting) for tiers in TIERS for setting in tuned] + [(PLAIN, OCCUPANCIES[0])]


def step_all(layers: Sequence[Layer], buffers: dict[Any, Any]) -> None:
    for layer in layers:
        layer.step(buffers)


def timed_rows(options: argparse.Namespace, tokens: int, batch: int) -> Iterator[dict[str, Any]]:
    device, count = torch.device(options.device), max(1, options.layers * 4096 // (tokens * batch))
    for tiers in (*TIERS, PLAIN):
        layers, runs = [Layer(options, tokens, batch, tiers, seed) for seed in range(count)], {}
        for setting in (setting for other, setting in settings(options) if other == tiers):
            step = partial(step_all, layers, {})
            with occupancy(*setting):
                runs["{} x {}".format(*setting)] = step if device.type == "cpu" else devices.capture(step, device)[0]
        kept = entries(tokens, batch, options.memory, tiers)
        estimated = 1e6 * (attention_seconds(kept, 1, INSTRUCTIONS) + (0.0 if tiers == PLAIN else ROTATIONS))
        for name, times in interleaved(runs, options.repeats, partial(seconds_of, device=options.device)).items():
            value, low, high = (1e6 * x / count for x in (median(times), min(times), max(times)))
            print(f"{tokens:,} x {batch}, {[*tiers]}, {name}: {value:.1f} us a layer, {estimated:.1f} estimated")
            yield {
                "tiers": [*tiers], "programs x registers": name, "tokens": tokens, "batch": batch, "n": len(times),
                "value": value, "low": low, "high": high, "estimated": estimated,
                "unit": "microseconds a layer: median, least and most",
            }  # fmt: skip


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    options = parse_options(
        __doc__, "gpu_tiers", "", arguments, device="cuda", tokens=[4096, 32_768, 131_072], batches=[1, 8], memory=0.15,
        layers=32, heads=32, kv_heads=8, dim=128, dtype="bfloat16", repeats=30,
    )  # fmt: skip
    jobs = [(options, tiers, setting, batch) for batch in options.batches for tiers, setting in settings(options)]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(check, *zip(*jobs, strict=True)))
    rows = [row for tokens in options.tokens for batch in options.batches for row in timed_rows(options, tokens, batch)]
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    save_rows(options, "gpu_tiers", [row | {"device": device} for row in rows])


if __name__ == "__main__":
    main()
