"""What a method costs: prefill and decode latency, peak memory, and bytes of k and v (Sec. 4.5)."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import LkvError
from lkv.evaluation.profiling.memory import measure_peak
from lkv.integrations.transformers.attention import patch_attention
from lkv.integrations.transformers.cache_layers import kv_nbytes
from lkv.methods.registry import FULL, parse_method
from lkv.policy.policy import Policy
from lkv.utils import devices
from lkv.utils.results import describe_machine
from lkv.utils.statistics import bootstrap

OUT_OF_MEMORY = "out of memory"
_PRECISION = 1 / 16  # how closely the largest context is found, as a share of it


@dataclass(frozen=True)
class ProfileSettings:
    """How to measure. `chunk`: tokens read at a time (None: all at once); `streaming`: evict after every chunk;
    `limit`: bytes allowed beside the weights (None: what the device has)."""

    retention: float = 0.15
    batch: int = 1
    new_tokens: int = 16
    repeats: int = 3
    chunk: int | None = None
    streaming: bool = False
    seed: int = 0
    limit: int | None = None


@dataclass(frozen=True)
class ProfileRun:
    """One prompt read and some tokens generated; `peak_bytes` counts everything but the weights."""

    prefill_seconds: float
    decode_seconds: float  # a token
    kv_bytes: int
    realised: float
    peak_bytes: int


class Profiler:
    """Measures methods on one model; every row it gives is flat JSON."""

    def __init__(self, model: Any, name: str, policy: Policy | None = None, settings: ProfileSettings | None = None):
        """`name`: what the rows call the model. `policy` is needed by the methods that read one.

        Raises LkvError for settings that cannot be measured.
        """
        self._model, self._name, self._settings = model, name, settings or ProfileSettings()
        self._device: torch.device = model.device
        self._spec = patch_attention(model).spec
        self._policy = policy.on(self._device) if policy is not None else None
        if self._settings.streaming and self._settings.chunk is None:
            raise LkvError("streaming reads the prompt in parts: give their size in tokens as chunk, for example 4096.")

    def rows(self, tokens: int, methods: Sequence[str]) -> list[dict[str, Any]]:
        """One row a method for a context of `tokens` tokens.

        The methods take turns, so that a noisy moment falls on all alike; the first round warms up and is the one whose
        memory is watched. A method that cannot run has a `reason` in its row instead of numbers.
        """
        first = {method: self.attempt(method, tokens, watched=True) for method in dict.fromkeys(methods)}
        runs: dict[str, list[ProfileRun]] = {method: [] for method, run in first.items() if isinstance(run, ProfileRun)}
        for _ in range(self._settings.repeats):
            for method in list(runs):
                run = self.attempt(method, tokens)
                if isinstance(run, ProfileRun):
                    runs[method].append(run)
                else:
                    first[method] = run
                    del runs[method]
        full = runs.get(FULL)
        return [
            self._row(method, tokens, run, runs[method], full)
            if isinstance(run, ProfileRun)
            else self._refused(method, tokens, run)
            for method, run in first.items()
        ]

    def largest(self, method: str, start: int, most: int) -> dict[str, Any]:
        """The row of the largest context that the device has room for, found between `start` and `most` tokens to
        within 1/16; `failed_at` is the smallest that it had no room for (None where all fitted)."""
        held: dict[int, ProfileRun] = {}
        reasons: list[str] = []

        def fits(tokens: int) -> bool:
            run = self.attempt(method, tokens, watched=True)
            if isinstance(run, ProfileRun):
                held[tokens] = run
            else:
                reasons.append(run)
            return isinstance(run, ProfileRun)

        good, bad = find_largest(fits, start, most)
        if good is None:
            return self._refused(method, start, reasons[-1]) | {"largest": True, "failed_at": bad}
        row = self._row(method, good, held[good], [held[good]], None)
        # Watched runs are slowed down by the counting on a CPU: their times are no result.
        timeless = dict.fromkeys(("prefill_seconds", "decode_ms")) if self._device.type == "cpu" else {}
        return row | timeless | {"largest": True, "failed_at": bad, "reason": reasons[-1] if reasons else None}

    def attempt(self, method: str, tokens: int, watched: bool = False) -> ProfileRun | str:
        """Read a prompt of `tokens` random tokens and generate, or the reason why that cannot be done.

        `watched`: with the peak memory, which costs time on a CPU.
        """
        try:
            return self._run(method, tokens, watched)
        except LkvError as error:
            reason = OUT_OF_MEMORY if devices.is_out_of_memory(error) else str(error)
        except (MemoryError, RuntimeError) as error:
            if not devices.is_out_of_memory(error):
                raise
            reason = OUT_OF_MEMORY
        # Out of the handler, where the traceback still held the tensors.
        devices.release(self._device)
        return reason

    @torch.no_grad()
    def _run(self, method: str, tokens: int, watched: bool) -> ProfileRun:
        settings = self._settings
        generator = torch.Generator("cpu").manual_seed(settings.seed)
        vocabulary = self._model.get_input_embeddings().weight.shape[0]
        shape = (settings.batch, tokens + settings.new_tokens)
        ids = torch.randint(vocabulary, shape, generator=generator, device="cpu")
        ids = ids.to(self._device)
        cache = self._cache(method, tokens)
        if not watched:
            return self._timed(cache, ids, tokens)
        with measure_peak(self._device, settings.limit) as peak:
            run = self._timed(cache, ids, tokens)
        return ProfileRun(run.prefill_seconds, run.decode_seconds, run.kv_bytes, run.realised, peak.nbytes)

    def _timed(self, cache: Any, ids: Tensor, tokens: int) -> ProfileRun:
        started = self._now()
        # The base model: logits of a whole prompt would be larger than its cache.
        for part in ids[:, :tokens].split(self._settings.chunk or tokens, 1):
            self._model.base_model(input_ids=part, past_key_values=cache, use_cache=True)
        read = self._now()
        ragged = isinstance(cache, RaggedCache)
        held = cache.nbytes() if ragged else kv_nbytes(cache)
        realised = cache.realised_retention() if ragged else 1.0
        resumed = self._now()
        for step in ids[:, tokens:].split(1, 1):
            self._model(input_ids=step, past_key_values=cache, use_cache=True)
        decoded = (self._now() - resumed) / self._settings.new_tokens
        return ProfileRun(read - started, decoded, held, realised, 0)

    def _now(self) -> float:
        if devices.is_gpu(self._device):
            devices.runtime(self._device).synchronize(self._device)
        return time.perf_counter()

    def _cache(self, method: str, tokens: int) -> Any:
        if method == FULL:
            return DynamicCache()
        settings, pattern = self._settings, None
        if parse_method(method).needs_pattern:
            generator = torch.Generator("cpu").manual_seed(settings.seed)
            pattern = torch.rand(self._spec.layers, self._spec.kv_heads, generator=generator, device="cpu").tolist()
        return RaggedCache(
            self._model,
            policy=self._policy,
            retention=settings.retention,
            method=method,
            prompt_tokens=tokens if settings.chunk else None,
            streaming=settings.streaming,
            pattern=pattern,
        )

    def _row(
        self, method: str, tokens: int, first: ProfileRun, runs: list[ProfileRun], full: list[ProfileRun] | None
    ) -> dict[str, Any]:
        row = self._frame(method, tokens) | {
            "realised": first.realised,
            "prefill_seconds": statistics.median(run.prefill_seconds for run in runs),
            "decode_ms": 1e3 * statistics.median(run.decode_seconds for run in runs),
            "peak_bytes": first.peak_bytes,
            "kv_bytes": first.kv_bytes,
            "n": len(runs),
        }
        if full is None:
            return row
        pairs = list(zip(runs, full, strict=True))
        prefill = bootstrap([[run.prefill_seconds / alone.prefill_seconds] for run, alone in pairs])
        decode = bootstrap([[run.decode_seconds / alone.decode_seconds] for run, alone in pairs])
        return row | {
            "prefill_ratio": prefill.value,
            "prefill_low": prefill.low,
            "prefill_high": prefill.high,
            "decode_ratio": decode.value,
        }

    def _refused(self, method: str, tokens: int, reason: str) -> dict[str, Any]:
        return self._frame(method, tokens) | {"n": 0, "reason": reason}

    def _machine(self) -> str:
        gpu = devices.is_gpu(self._device)
        return devices.runtime(self._device).get_device_name(self._device) if gpu else describe_machine()

    def _frame(self, method: str, tokens: int) -> dict[str, Any]:
        """What the rows of a method share, measured or not; a number that was not taken is None."""
        settings = self._settings
        shared = {
            "model": self._name,
            "device": self._machine(),
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "method": method,
            "tokens": tokens,
            "batch": settings.batch,
            "retention": 1.0 if method == FULL else settings.retention,
            "new_tokens": settings.new_tokens,
            "chunk": settings.chunk,
            "streaming": settings.streaming and method != FULL,
            "weight_bytes": sum(p.numel() * p.element_size() for p in self._model.parameters()),
        }
        numbers = (
            "realised", "prefill_seconds", "prefill_ratio", "prefill_low", "prefill_high", "decode_ms", "decode_ratio",
            "peak_bytes", "kv_bytes",
        )  # fmt: skip
        return shared | dict.fromkeys(numbers)


def find_largest(fits: Callable[[int], bool], start: int, most: int) -> tuple[int | None, int | None]:
    """The largest length that fits and the smallest that does not, no further apart than 1/16 of the former, between
    `start` and `most`: doubling, then halving the gap.

    (None, start) where not even `start` fits; (most, None) where everything does.
    """
    good, bad = None, None
    tokens = min(start, most)
    while bad is None:
        if not fits(tokens):
            bad = tokens
        elif tokens == most:
            return most, None
        else:
            good, tokens = tokens, min(2 * tokens, most)
    while good is not None and bad - good > max(1, int(good * _PRECISION)):
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good, bad
