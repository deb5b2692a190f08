"""What a model's steps take on a GPU: decoding, eviction as a share of prefill, and a step of training.

python -m experiments.gpu_steps    (needs CUDA; writes gpu_steps.json)
python -m experiments.gpu_steps --device cpu --dtype float32 --config CONFIG.json --tokens 64 --train-tokens 40

Random weights of a published shape, or of a model's config.json. The full cache is a StaticCache under every fast
attention that is installed. Decode steps are launched by the host (eager), and replayed as a CUDA graph (graphed); over
as many entries as the retention says, and over as many bytes of entries in tiers of precision. Prompts longer than
--longest-prompt are not read: their k and v are random. What does not fit into the memory, or cannot run, has a
`reason` in its row.
"""

import argparse
import copy
import functools
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from experiments.common import interleaved, paired_ratio, parse_options, save_rows, wall_clock
from experiments.profile.memory import measure_peak
from experiments.profile.random_models import extend_positions, random_model, random_policy, read_config
from experiments.static_cache import ATTENTIONS, attention_by, attention_replaced, static_cache
from lkv.cache.graphed import GraphedStep
from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import LkvError
from lkv.hf.attention import patch_attention
from lkv.hf.cache_argument import cache_argument, find_cache
from lkv.hf.prompt_kv import LayerKV, read_prompt
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.training.config import TrainingConfig, schedule
from lkv.training.data.samples import TokenizedSample
from lkv.training.distillation import SampleGroup, distillation_losses
from lkv.utils import devices

Row = dict[str, Any]
Step = Callable[[], Any]
Way = tuple[str, str, str]  # method, attention, and how its kernels are launched
_WARMUPS = 2
_TIMED_TOKENS = 65_536  # of prompts that are read, in all turns but the first
_CONTINUATIONS, _CONTINUATION = 4, 120  # of a training step: how many, and their tokens
_EAGER, _GRAPHED = "eager", "graphed"


class Bench:
    """The model that is measured, and how often."""

    def __init__(self, options: argparse.Namespace):
        """Make the model and the policy that the options describe."""
        self.device, self.repeats, self.retention = torch.device(options.device), options.repeats, options.retention
        self.model: Any = random_model(read_config(options.config), getattr(torch, options.dtype), self.device)
        extend_positions(self.model, max(*options.tokens, *options.train_tokens) + _CONTINUATION + self.slots)
        patched = patch_attention(self.model)
        self.spec, self._rotations = patched.spec, patched.rotations
        # The scorer that `lkv fit` trains, which reads and computes more than the paper's.
        self.policy = random_policy(self.spec, inputs=ScorerInputs("unrotated", "learned", 13)).on(self.device)

    @property
    def slots(self) -> int:
        """Free slots for the steps of one way to decode, eager and graphed."""
        return 2 * (self.repeats + _WARMUPS) + devices.STEPS_OF_CAPTURE + 1

    def draw_ids(self, *shape: int) -> Tensor:
        return torch.randint(self.model.get_input_embeddings().weight.shape[0], shape, device=self.device)

    def make_cache(self, by_memory: bool = False) -> RaggedCache:
        """An empty cache of LKV; `by_memory`: of as many bytes, in tiers of precision."""
        budget = {"memory" if by_memory else "retention": self.retention}
        return RaggedCache(self.model, policy=self.policy, **budget)

    def compress(self, batch: int, tokens: int, by_memory: bool = False) -> RaggedCache:
        """A cache that evicted from random k and v, layer by layer: those of all layers need not fit at once."""
        cache, spec = self.make_cache(by_memory), self.spec
        shape, options = (batch, spec.kv_heads, tokens, spec.head_dim), {"dtype": self.model.dtype}
        for layer, rotation in zip(cache.ragged_layers, self._rotations, strict=True):
            key, value = (torch.randn(shape, device=self.device, **options) for _ in range(2))
            layer.fill(LayerKV(key, value, spec.head_dim**-0.5, rotation=rotation))
            layer.reserve(self.slots)
        return cache

    def time(self, runs: dict[str, Step], tokens: int = 1) -> dict[str, list[float]]:
        """Seconds of each run in turn, to its end on the device; runs over many `tokens` at once take fewer turns."""
        turns = max(1, min(self.repeats, _TIMED_TOKENS // tokens))
        return interleaved(runs, turns, partial(wall_clock, device=self.device), _WARMUPS if tokens == 1 else 1)


class Ways:
    """The ways to do one thing that can be timed, and why the others cannot."""

    def __init__(self, bench: Bench):
        self._bench = bench
        self.steps: dict[Way, Step] = {}
        self.reasons: dict[Way, str] = {}

    def add(self, way: Way, make: Callable[[], Step]) -> None:
        """Add what `make` returns; a package that is missing, or of another version, ends no other measurement."""
        try:
            self.steps[way] = make()
            return
        except (AttributeError, ImportError, LkvError, MemoryError, RuntimeError, TypeError) as error:
            self.reasons[way] = reason_of(error)
        # Outside the handler, whose traceback keeps tensors alive.
        devices.release(self._bench.device)

    def rows(self, tokens: int = 1) -> Iterator[Row]:
        """A row of each way; its time is by that of the fastest full cache whose kernels are launched alike.

        `tokens`: how many are read at once.
        """
        seconds = self._bench.time({" ".join(way): step for way, step in self.steps.items()}, tokens)
        for way, reason in self.reasons.items():
            yield row_of(way) | {"n": 0, "reason": reason}
        for way in self.steps:
            own, launch = seconds[" ".join(way)], way[2]
            full = [seconds[" ".join(other)] for other in self.steps if other[0] == "full" and other[2] == launch]
            ratio = {"value": None, "n": len(own), "seconds": median(own)}
            unit = {"unit": "time by that of the fastest full cache, mean of pairs", "baseline": "full"}
            yield row_of(way) | unit | (paired_ratio(own, min(full, key=median)) if full else ratio)


def reason_of(error: BaseException) -> str:
    """Why something could not be measured, in one line."""
    reason = "out of memory" if devices.is_out_of_memory(error) else f"{type(error).__name__}: {error}"
    return reason.splitlines()[0][:200]


def row_of(way: Way) -> Row:
    return dict(zip(("method", "attention", "launch"), way, strict=True))


@torch.no_grad()
def decode_rows(bench: Bench, tokens: int, batch: int) -> Iterator[Row]:
    """Steps behind `tokens` tokens, over all their entries and over those that LKV keeps."""
    ids, positions = bench.draw_ids(batch, 1), torch.full((batch, 1), tokens, device=bench.device)

    @functools.cache
    def full_cache() -> Any:
        return static_cache(bench.model, bench.spec, batch, tokens, len(ATTENTIONS) * bench.slots)

    @functools.cache
    def full_step(attention: str) -> Step:
        attend = attention_by(attention, bench.spec, tokens + 1, full_cache().layers[0].keys)

        def step() -> None:
            with attention_replaced(bench.model, attend):
                bench.model(input_ids=ids, position_ids=positions, **cache_argument(full_cache()), use_cache=True)

        step()
        return step

    def graphed_full_step(attention: str) -> Step:
        step = full_step(attention)
        if not devices.can_capture(bench.device):
            raise LkvError(f"the model is on {bench.device.type!r}, but CUDA graphs need a CUDA device.")
        return devices.capture(step, bench.device)[0]

    @functools.cache
    def given(by_memory: bool) -> dict[str, Any]:
        return {"input_ids": ids, **cache_argument(bench.compress(batch, tokens, by_memory)), "use_cache": True}

    def eager_step(by_memory: bool) -> Step:
        return partial(bench.model, **given(by_memory))

    def graphed_step(by_memory: bool) -> Step:
        step = GraphedStep(bench.model, find_cache(given(by_memory)), bench.slots)
        reason = step.unsupported_reason((), given(by_memory)) or step.capture(bench.model.forward, given(by_memory))
        if reason:
            raise LkvError(reason)
        return partial(step.replay, given(by_memory))

    ways = Ways(bench)
    for attention in ATTENTIONS:
        ways.add(("full", attention, _EAGER), partial(full_step, attention))
        ways.add(("full", attention, _GRAPHED), partial(graphed_full_step, attention))
    for attention, by_memory in (("ragged", False), ("tiers", True)):
        ways.add(("lkv", attention, _GRAPHED), partial(graphed_step, by_memory))
        ways.add(("lkv", attention, _EAGER), partial(eager_step, by_memory))
    yield from ways.rows()


@torch.no_grad()
def prefill_rows(bench: Bench, tokens: int) -> Iterator[Row]:
    """Reading a prompt with the full cache, with LKV, and LKV's eviction alone."""
    ids, read = bench.draw_ids(1, tokens), bench.model.base_model

    def full() -> None:
        read(input_ids=ids, **cache_argument(DynamicCache()), use_cache=True)

    def compressed() -> None:
        read(input_ids=ids, **cache_argument(bench.make_cache()), use_cache=True)

    def evict() -> None:
        bench.make_cache().fill(prompt)

    prompt = read_prompt(bench.model, ids)
    ways = Ways(bench)
    ways.add(("full", "sdpa", "prefill"), lambda: full)
    ways.add(("lkv", "sdpa", "prefill"), lambda: compressed)
    ways.add(("lkv, eviction alone", "none", "prefill"), lambda: evict)
    yield from ways.rows(tokens)


def training_rows(bench: Bench, tokens: int) -> Iterator[Row]:
    """Losses and gradients of one context, as a training step computes them; the optimiser's part is small."""
    text = bench.draw_ids(tokens).tolist()
    continuations = [(bench.draw_ids(_CONTINUATION).tolist(), _CONTINUATION // 2) for _ in range(_CONTINUATIONS)]
    group = SampleGroup([(0, TokenizedSample("random", text, continuations))])
    config, policy = TrainingConfig(), copy.deepcopy(bench.policy).requires_grad_(True)

    def step() -> None:
        policy.zero_grad(set_to_none=True)
        kl, hidden = distillation_losses(bench.model, policy, group, config, schedule(config, config.steps / 2))
        (kl + config.beta * hidden).backward()

    bench.model.requires_grad_(False)
    with measure_peak(bench.device) as peak:
        step()
    own = bench.time({"step": step}, tokens)["step"]
    yield row_of(("lkv", "soft mask", "training")) | {
        "seconds": median(own), "value": median(own), "low": min(own), "high": max(own), "n": len(own), "unit": "s",
        "peak_bytes": peak.nbytes,
    }  # fmt: skip


def measured(bench: Bench, what: str, about: Row, measure: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """The rows of a measurement, printed; one row with the reason where it cannot be made."""
    devices.release(bench.device)
    try:
        rows = list(measure())
    except (LkvError, MemoryError, RuntimeError) as error:
        rows = [{"n": 0, "reason": reason_of(error)}]
    for row in rows:
        row = {"what": what, **about} | row
        print(markdown(row), flush=True)
        yield row


_COLUMNS = ("what", "tokens", "batch", "method", "attention", "launch")


def markdown(row: Row) -> str:
    """A row of the table that is printed."""
    ratio = row["value"] if row.get("baseline") else None
    result = row.get("reason") or f"{1e3 * row['seconds']:.3f}"
    cells = [*(row.get(name, "") for name in _COLUMNS), result, "" if ratio is None else f"{ratio:.3f}"]
    return f"| {' | '.join(map(str, cells))} |"


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(
        __doc__, "gpu_steps", "", arguments, device="cuda", config="llama-3.1-8b", dtype="bfloat16",
        tokens=[4096, 32_768, 131_072], batches=[1, 8], longest_prompt=32_768, train_tokens=[2000, 16_000], repeats=10,
        retention=0.15,
    )  # fmt: skip
    torch.manual_seed(0)
    bench = Bench(options)
    gpu = devices.is_gpu(bench.device)
    about: Row = {
        "model": options.config, "dtype": options.dtype, "retention": options.retention,
        "device": devices.runtime(bench.device).get_device_name(bench.device) if gpu else options.device,
    }  # fmt: skip
    print(f"| {' | '.join((*_COLUMNS, 'milliseconds', 'of the fastest full cache'))} |\n{'|---' * 8}|")
    rows: list[Row] = []
    for tokens in options.tokens:
        for batch in options.batches:
            shape = about | {"tokens": tokens, "batch": batch}
            rows += measured(bench, "decode", shape, partial(decode_rows, bench, tokens, batch))
        if tokens <= options.longest_prompt:
            rows += measured(bench, "prefill", about | {"tokens": tokens}, partial(prefill_rows, bench, tokens))
        save_rows(options, "gpu_steps", rows)
    for tokens in options.train_tokens:
        rows += measured(bench, "training", about | {"tokens": tokens}, partial(training_rows, bench, tokens))
    save_rows(options, "gpu_steps", rows)


if __name__ == "__main__":
    main()
