"""The cost of a method: prefill and decode latency, peak memory, and bytes of k and v (Sec. 4.5)."""

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import DynamicCache, PreTrainedModel

from experiments.bootstrap import bootstrap
from experiments.profile.memory import Peak, measure_peak
from lkv.cache.full_cache import kv_nbytes
from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import LkvError
from lkv.hf.attention import patch_attention
from lkv.hf.cache_argument import cache_argument
from lkv.hf.spec import unwrap_model
from lkv.methods.registry import FULL, parse_method
from lkv.policy.policy import Policy
from lkv.utils import devices
from lkv.utils.provenance import describe_machine

if TYPE_CHECKING:
    from experiments.profile.__main__ import Profile

OUT_OF_MEMORY = "out of memory"
_PRECISION = 1 / 16  # how closely the largest context is found, as a share of it
_NUMBERS = (
    "realised", "prefill_seconds", "prefill_ratio", "prefill_low", "prefill_high", "decode_ms", "decode_ratio",
    "peak_bytes", "kv_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class ProfileRun:
    """One prompt read and some tokens generated; `peak_bytes` counts everything but the weights."""

    prefill_seconds: float
    decode_seconds: float  # a token
    kv_bytes: int
    realised: float
    peak_bytes: int


class Profiler:
    """Measures methods on one model; its rows are flat JSON."""

    def __init__(self, model: PreTrainedModel, name: str, policy: Policy | None, settings: "Profile"):
        """Prepare the causal language model `model`, which the rows call `name`."""
        self._model, self._name, self._settings, self._device = model, name, settings, model.device
        self._limit = None if settings.memory_limit is None else int(settings.memory_limit * 2**30)
        self._spec = patch_attention(model).spec
        self._policy = policy and policy.on(self._device)

    @property
    def device_name(self) -> str:
        """The name of the GPU, or of the processor with its cores."""
        is_gpu = devices.is_gpu(self._device)
        return devices.runtime(self._device).get_device_name(self._device) if is_gpu else describe_machine()

    def measure(self, tokens: int, methods: Sequence[str]) -> list[dict[str, Any]]:
        """One row a method for a context of `tokens` tokens.

        The methods take turns, so that a noisy moment affects all alike; the first round warms up, and the peak memory
        is that of this round. A method that cannot run has a `reason` in its row instead of numbers.
        """
        first = {method: self.try_run(method, tokens, with_peak=True) for method in dict.fromkeys(methods)}
        runs: dict[str, list[ProfileRun]] = {method: [] for method, run in first.items() if isinstance(run, ProfileRun)}
        for _ in range(self._settings.repeats):
            for method in list(runs):
                run = self.try_run(method, tokens)
                if isinstance(run, ProfileRun):
                    runs[method].append(run)
                else:
                    first[method] = run
                    del runs[method]
        return [self._row(method, tokens, run, runs.get(method, []), runs.get(FULL)) for method, run in first.items()]

    def measure_largest(self, method: str, start: int, most: int) -> dict[str, Any]:
        """The row of the largest context that fits into the memory, between `start` and `most` tokens, to within 1/16.

        Its `failed_at` is the smallest length that did not fit, None where all did.
        """
        runs: dict[int, ProfileRun | str] = {}

        def fits(tokens: int) -> bool:
            runs[tokens] = self.try_run(method, tokens, with_peak=True)
            return isinstance(runs[tokens], ProfileRun)

        good, bad = find_largest(fits, start, most)
        reason = None if bad is None else runs[bad]
        longest = good or bad or start  # one of both is a length
        run = runs[longest]
        row = self._row(method, longest, run, [run] if isinstance(run, ProfileRun) else [])
        if good and self._device.type == "cpu":  # where counting the memory slows a run down
            row |= {"prefill_seconds": None, "decode_ms": None}
        return row | {"largest": True, "failed_at": bad, "reason": reason}

    def try_run(self, method: str, tokens: int, with_peak: bool = False) -> ProfileRun | str:
        """Read a prompt of random tokens and generate, or return why that is impossible; the peak costs CPU time."""
        try:
            return self._run(method, tokens, with_peak)
        except LkvError as error:
            reason = OUT_OF_MEMORY if devices.is_out_of_memory(error) else str(error)
        except (MemoryError, RuntimeError) as error:
            if not devices.is_out_of_memory(error):
                raise
            reason = OUT_OF_MEMORY
        # Outside the handler, whose traceback keeps the tensors alive.
        devices.release(self._device)
        return reason

    @torch.no_grad()
    def _run(self, method: str, tokens: int, with_peak: bool) -> ProfileRun:
        settings, model = self._settings, cast(Any, self._model)
        generator = torch.Generator("cpu").manual_seed(settings.seed)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        shape = (settings.batch, tokens + settings.new_tokens)
        ids = torch.randint(vocabulary, shape, generator=generator, device="cpu").to(self._device)
        is_full = method == FULL
        cache: Any = DynamicCache() if is_full else self._make_cache(method, tokens)
        with measure_peak(self._device, self._limit) if with_peak else nullcontext(Peak()) as peak:
            started = devices.synchronised_clock(self._device)
            # The base model: logits of a whole prompt would be larger than its cache.
            for part in ids[:, :tokens].split(settings.chunk or tokens, 1):
                unwrap_model(model).base_model(input_ids=part, **cache_argument(cache), use_cache=True)
            prefill_seconds = devices.synchronised_clock(self._device) - started
            kv_bytes, realised = (kv_nbytes(cache), 1.0) if is_full else (cache.nbytes(), cache.realised_retention())
            started = devices.synchronised_clock(self._device)
            for step in ids[:, tokens:].split(1, 1):
                model(input_ids=step, **cache_argument(cache), use_cache=True)
            decode_seconds = (devices.synchronised_clock(self._device) - started) / settings.new_tokens
        return ProfileRun(prefill_seconds, decode_seconds, kv_bytes, realised, peak.nbytes)

    def _make_cache(self, method: str, tokens: int) -> RaggedCache:
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
        self,
        method: str,
        tokens: int,
        first: ProfileRun | str,
        runs: Sequence[ProfileRun],
        full: Sequence[ProfileRun] | None = None,
    ) -> dict[str, Any]:
        """The row of a method from its `first` run, or its reason, and its timed `runs`; a missing number is None."""
        settings = self._settings
        row: dict[str, Any] = {
            "model": self._name,
            "device": self.device_name,
            "dtype": devices.dtype_name(self._model.dtype),
            "method": method,
            "tokens": tokens,
            "batch": settings.batch,
            "retention": 1.0 if method == FULL else settings.retention,
            "new_tokens": settings.new_tokens,
            "chunk": settings.chunk,
            "streaming": settings.streaming and method != FULL,
            "weight_bytes": sum(p.numel() * p.element_size() for p in self._model.parameters()),
            **dict.fromkeys(_NUMBERS),
            "n": len(runs),
        }
        if isinstance(first, str):
            return row | {"n": 0, "reason": first}
        row |= {"realised": first.realised, "peak_bytes": first.peak_bytes, "kv_bytes": first.kv_bytes}
        row["prefill_seconds"] = statistics.median(run.prefill_seconds for run in runs)
        row["decode_ms"] = 1e3 * statistics.median(run.decode_seconds for run in runs)
        if full:
            pairs = list(zip(runs, full, strict=True))
            prefill = bootstrap([[run.prefill_seconds / other.prefill_seconds] for run, other in pairs])
            decode = bootstrap([[run.decode_seconds / other.decode_seconds] for run, other in pairs])
            row |= {"prefill_ratio": prefill.value, "prefill_low": prefill.low, "prefill_high": prefill.high}
            row["decode_ratio"] = decode.value
        return row


def find_largest(fits: Callable[[int], bool], start: int, most: int) -> tuple[int | None, int | None]:
    """Find the largest length that fits and the smallest that does not, by doubling from `start`, then halving the gap.

    They are no further apart than 1/16 of the former: (None, start) where not even `start` fits, (most, None) where
    everything does.
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
