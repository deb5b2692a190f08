"""How long a training takes here, before it is begun: its products counted, and timed on this machine."""

import math
import time
from typing import Any

import torch

from lkv.config import TrainingConfig
from lkv.host.attention import attach, device_of

_USED = 0.4  # of the rate of one large product that a training reaches, measured on two CPU cores
_SIZE, _ROUNDS = 1024, 3  # of the product that is timed
_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60))


def training_operations(model: Any, config: TrainingConfig) -> float:
    """Multiplications and additions of a training of `model`, in all.

    A context is read once; each of its continuations twice forwards (full cache, compressed cache) and once backwards,
    through the model but not into its weights.
    """
    spec = attach(model).spec
    head, table = (part.weight.numel() for part in (model.get_output_embeddings(), model.get_input_embeddings()))
    inner = sum(weight.numel() for weight in model.get_decoder().parameters()) - table
    context = _mean_length(config.min_tokens, config.max_tokens)
    rows = config.continuations * config.max_continuation
    depth = spec.layers * spec.heads * spec.head_dim
    reading = 2 * inner * context + 2 * depth * context**2
    continuing = 3 * rows * (2 * (inner + head) + 4 * depth * context)
    return config.steps * config.batch * (reading + continuing)


def operations_a_second(model: Any, dtype: torch.dtype) -> float:
    """Of a training on the device of `model`: a large product is timed there."""
    device = device_of(model)
    a, b = (torch.randn(_SIZE, _SIZE, device=device, dtype=dtype) for _ in range(2))
    (a @ b).sum().item()
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        total = (a @ b).sum()
    total.item()
    return _USED * _ROUNDS * 2 * _SIZE**3 / (time.perf_counter() - started)


def training_time(model: Any, config: TrainingConfig) -> str:
    """In words, for this machine as it is now and one process: "about 3 hours"."""
    seconds = training_operations(model, config) / operations_a_second(model, getattr(torch, config.dtype))
    return in_words(seconds)


def in_words(seconds: float) -> str:
    """A duration in the unit that suits it, whole minutes at least."""
    unit, size = next(((unit, size) for unit, size in _UNITS if seconds >= 1.5 * size), _UNITS[-1])
    count = max(1, round(seconds / size))
    return f"about {count:,} {unit}{'s' if count > 1 else ''}"


def _mean_length(low: int, high: int) -> float:
    """Of lengths drawn log-uniformly between the two."""
    return (high - low) / math.log(high / low) if high > low else float(high)
