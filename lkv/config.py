"""Frozen settings. The paper's tables are the defaults; no torch here."""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lkv.errors import TrainingError


@dataclass(frozen=True)
class ModelSpec:
    """What a policy must know of the model it was trained for.

    `weights` are a few dozen weight values from fixed places: a fingerprint that survives a change of dtype.
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: str
    max_positions: int
    weights: tuple[float, ...]


HIDDEN_NORMS = ("relative", "mean", "sum")


@dataclass(frozen=True)
class TrainingConfig:
    """Training schedule of App. C.3 (paper preset).

    `batch` counts contexts a step, each with up to `continuations` continuations. `hidden_norm` is the paper's open
    choice for ||H_T - H_S||^2: "relative" divides by ||H_T||^2 a token, "mean" by the hidden size, "sum" by nothing.
    `hold` is the last share of the steps that keep the final tau and R (0 in the paper).
    Raises TrainingError for a number outside its range.
    """

    steps: int = 1000
    batch: int = 64
    continuations: int = 1
    lr: float = 1e-3
    lr_end: float = 1e-4
    warmup: int = 20
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    tau_start: float = 1.0
    tau_end: float = 0.001
    retention_start: float = 0.5
    retention_end: float = 0.15
    hold: float = 0.0
    beta: float = 0.5
    hidden_norm: str = "relative"
    min_tokens: int = 2000
    max_tokens: int = 16000
    max_continuation: int = 512
    seed: int = 0
    dtype: str = "bfloat16"
    checkpoint_every: int = 20
    evaluate_every: int = 100
    validation_samples: int = 16

    def __post_init__(self) -> None:
        for name, (kind, least, most) in _RANGES.items():
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (whole or (kind is float and isinstance(value, float))) or not least <= value <= most:
                what = "a whole number" if kind is int else "a number"
                limits = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
                raise TrainingError(f"{name} is {value!r}, but it is {what} {limits}; give another.")
        if self.min_tokens > self.max_tokens:
            raise TrainingError(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}, so that no text would fit; "
                "lower the one or raise the other."
            )
        if self.hidden_norm not in HIDDEN_NORMS:
            raise TrainingError(f"hidden_norm is {self.hidden_norm!r}; give one of {', '.join(HIDDEN_NORMS)}.")


_TINY = 1e-12  # stands for "above 0"
# Of each setting: its kind, the least and the greatest value.
_RANGES: dict[str, tuple[type, float, float]] = {
    **dict.fromkeys(("steps", "batch", "checkpoint_every", "evaluate_every"), (int, 1, math.inf)),
    **dict.fromkeys(("min_tokens", "max_tokens", "max_continuation"), (int, 1, math.inf)),
    **dict.fromkeys(("warmup", "validation_samples"), (int, 0, math.inf)),
    **dict.fromkeys(("lr", "max_grad_norm", "tau_start", "tau_end"), (float, _TINY, 1e6)),
    **dict.fromkeys(("lr_end", "weight_decay", "beta"), (float, 0, 1e6)),
    **dict.fromkeys(("retention_start", "retention_end"), (float, _TINY, 1)),
    "hold": (float, 0, 0.99),
    "continuations": (int, 1, 1024),
    "seed": (int, 0, 2**32 - 1),
}


_CPU = TrainingConfig(
    steps=1000,
    batch=2,
    continuations=2,
    lr=2e-3,
    lr_end=2e-4,
    tau_end=0.01,
    hold=0.25,
    min_tokens=500,
    max_tokens=2000,
    max_continuation=144,
)
PRESETS: dict[str, TrainingConfig] = {
    "paper": TrainingConfig(),
    "cpu": _CPU,
    # Second stage on a CPU, from the weights of a first run, at the final retention throughout: the gradients of single
    # contexts nearly cancel there, so it takes large batches, a small last rate, and a temperature above 0.08.
    "finish": replace(
        _CPU,
        steps=220,
        batch=8,
        seed=2,
        warmup=10,
        lr=1e-3,
        lr_end=2e-5,
        tau_start=0.3,
        tau_end=0.1,
        retention_start=0.15,
        hold=0.0,
        checkpoint_every=5,
        evaluate_every=55,
        validation_samples=32,
        max_tokens=3072,
    ),
}


def from_dict(cls: type, values: dict[str, Any]) -> Any:
    """Build the dataclass `cls` from JSON values, lists becoming tuples; TypeError for unknown or missing fields."""
    known = {f.name for f in fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise TypeError(f"unknown fields {unknown} for {cls.__name__}")
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


__all__ = ["HIDDEN_NORMS", "PRESETS", "ModelSpec", "TrainingConfig", "asdict", "from_dict", "replace"]
