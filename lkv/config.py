"""Frozen settings. The paper's tables are the defaults; no torch here."""

import hashlib
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lkv.errors import TrainingError


@dataclass(frozen=True)
class ModelSpec:
    """What a policy must know of the model it was trained for.

    `directions` are those of sampled rows, a fingerprint that survives quantisation (see `lkv.policy.fingerprint`).
    `weights` are single values from fixed places; policies saved before have these alone.
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: str
    max_positions: int
    weights: tuple[float, ...]
    directions: tuple[str, ...] = ()

    def digest(self) -> str:
        """32 hexadecimal digits, equal for equal weights in one dtype, on whatever machine they were read."""
        read = {name: value for name, value in asdict(self).items() if name != "directions"}  # which are computed
        return hashlib.sha256(repr(sorted(read.items())).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class ScorerInputs:
    """What LKV-T reads of a token; a policy's file names it.

    `key`: k as it is "cached", after RoPE (the paper), or "unrotated". `attention`: "none", or a term for the attention
    to expect from queries whose statistics are "learned". `knots`: of the position terms, 0 for none; knot j lies at
    2^j tokens.
    """

    key: str = "cached"
    attention: str = "none"
    knots: int = 0

    def __post_init__(self) -> None:
        for name, known in (("key", SCORER_KEYS), ("attention", SCORER_ATTENTION)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, but this version knows {', '.join(known)}")
        if not isinstance(self.knots, int) or not 0 <= self.knots <= MAX_KNOTS:
            raise ValueError(f"knots is {self.knots!r}, but it is a number from 0 to {MAX_KNOTS}")


def num_knots(tokens: int) -> int:
    """How many knots position terms need for texts of up to `tokens` tokens."""
    return (tokens - 1).bit_length() + 1


SCORER_KEYS = ("cached", "unrotated")
SCORER_ATTENTION = ("none", "learned")
MAX_KNOTS = 32
HIDDEN_NORMS = ("relative", "mean", "sum")
STUDENTS = ("continuation", "full")
DTYPES = ("float32", "bfloat16", "float16")
SPREADS = ("no", "devices", "processes")  # of a model in training


@dataclass(frozen=True)
class TrainingConfig:
    """Training schedule of App. C.3 (paper preset).

    `batch` counts contexts a step, each with up to `continuations` continuations. `hidden_norm` is the paper's open
    choice for ||H_T - H_S||^2: "relative" divides by ||H_T||^2 a token, "mean" by the hidden size, "sum" by nothing.
    `hold` is the last share of the steps that keep the final tau and R (0 in the paper).

    Where `retention_high` is above 0, R is drawn log-uniformly between `retention_low` and it for every continuation,
    in place of the schedule; a continuation then weighs (R / `retention_end`) ** `retention_power`, so that the small
    R, whose KL is many times as large, do not decide alone. Contexts longer than 2,000 tokens get one continuation more
    a `tokens_a_continuation` tokens, up to `continuations` (0: all get as many).

    `key`, `attention`, `position` say what LKV-T reads (see `ScorerInputs`; `position` makes knots up to `max_tokens`).
    `terms_lr` multiplies the rate of the attention's weights and of the position terms, one number a head each.
    `imitated`: on how many contexts a policy that starts from nothing first imitates KVzip (`training.warm_start`).

    `student`: "continuation" computes the rows after the prompt under the mask; "full" all rows, the prompt's too.
    `contexts_per_forward`: contexts of similar length that share their forward passes, at most; the gradients stay
    those of one by one.

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
    retention_low: float = 0.0
    retention_high: float = 0.0
    retention_power: float = 0.75
    tokens_a_continuation: int = 0
    key: str = "cached"
    attention: str = "none"
    position: bool = False
    terms_lr: float = 20.0
    imitated: int = 0
    student: str = "continuation"
    contexts_per_forward: int = 1

    @property
    def inputs(self) -> ScorerInputs:
        """What a policy trained so reads."""
        return ScorerInputs(self.key, self.attention, num_knots(self.max_tokens) if self.position else 0)

    def __post_init__(self) -> None:
        for name, (kind, least, most) in _RANGES.items():
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (whole or (kind is float and isinstance(value, float))) or not least <= value <= most:
                wanted = "a whole number" if kind is int else "a number"
                limits = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
                raise TrainingError(f"{name} is {value!r}, but it is {wanted} {limits}; give another.")
        if self.min_tokens > self.max_tokens:
            raise TrainingError(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}, so that no text would fit; "
                "lower the one or raise the other."
            )
        if not 0 <= self.retention_low <= self.retention_high or (self.retention_high and not self.retention_low):
            raise TrainingError(
                f"retention_low is {self.retention_low} and retention_high {self.retention_high}; give two numbers "
                "above 0, the lower one first, or neither."
            )
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise TrainingError(f"{name} is {getattr(self, name)!r}; give one of {', '.join(known)}.")
        if self.student == "full" and self.contexts_per_forward > 1:
            raise TrainingError(
                f"contexts_per_forward is {self.contexts_per_forward} and student 'full', which reads each context by "
                "itself; give 1, or student 'continuation'."
            )
        if not isinstance(self.position, bool):
            raise TrainingError(f"position is {self.position!r}; give true or false.")


# Settings of a few words, and what each of all the settings is.
CHOICES: dict[str, tuple[str, ...]] = {
    "hidden_norm": HIDDEN_NORMS,
    "student": STUDENTS,
    "dtype": DTYPES,
    "key": SCORER_KEYS,
    "attention": SCORER_ATTENTION,
}
HELP: dict[str, str] = {
    "steps": "optimiser steps",
    "batch": "contexts a step, over all processes",
    "continuations": "questions, answers and repetitions asked of one context, at most",
    "lr": "rate of AdamW after the warm-up",
    "lr_end": "rate at the last step",
    "warmup": "steps of rising rate",
    "weight_decay": "of AdamW",
    "max_grad_norm": "gradients are scaled down to this norm",
    "tau_start": "temperature of Soft-TopK at the first step",
    "tau_end": "temperature of Soft-TopK at the last step",
    "retention_start": "R at the first step",
    "retention_end": "R at the last step, and the one validated at",
    "hold": "last share of the steps that keep the final temperature and R",
    "beta": "weight of the hidden states' loss",
    "hidden_norm": "what the squared distance of hidden states is divided by",
    "min_tokens": "tokens of a context, at least",
    "max_tokens": "tokens of a context, at most",
    "max_continuation": "tokens of a continuation, at most",
    "seed": "of data, noise and the policy's first weights",
    "dtype": "of the frozen model",
    "checkpoint_every": "steps between checkpoints",
    "evaluate_every": "steps between validations",
    "validation_samples": "held-out samples of a validation",
    "retention_low": "where R is drawn for every continuation: the least",
    "retention_high": "the greatest R drawn; 0 for the schedule",
    "retention_power": "a continuation under a drawn R weighs (R / retention_end) to this power",
    "tokens_a_continuation": "one continuation more for so many tokens beyond 2,000; 0: all contexts get as many",
    "key": "which k LKV-T reads",
    "attention": "whether LKV-T has a term for the attention to expect",
    "position": "whether LKV-T has terms for the position",
    "terms_lr": "rate of these terms, in multiples of --lr",
    "student": "rows computed twice: the continuation's, as at inference, or all, as the paper has it literally",
    "contexts_per_forward": "contexts of similar length that share their forward passes, at most",
    "imitated": "contexts on which a policy that starts from nothing first imitates KVzip",
}


_TINY = 1e-12  # stands for "above 0"
# Of each setting: its kind, the least and the greatest value.
_RANGES: dict[str, tuple[type, float, float]] = {
    **dict.fromkeys(("steps", "batch", "checkpoint_every", "evaluate_every"), (int, 1, math.inf)),
    **dict.fromkeys(("min_tokens", "max_tokens", "max_continuation"), (int, 1, math.inf)),
    **dict.fromkeys(("warmup", "validation_samples"), (int, 0, math.inf)),
    **dict.fromkeys(("lr", "max_grad_norm", "tau_start", "tau_end"), (float, _TINY, 1e6)),
    **dict.fromkeys(("lr_end", "weight_decay", "beta", "terms_lr", "retention_power"), (float, 0, 1e6)),
    **dict.fromkeys(("retention_low", "retention_high"), (float, 0, 1)),
    **dict.fromkeys(("tokens_a_continuation", "imitated"), (int, 0, math.inf)),
    **dict.fromkeys(("retention_start", "retention_end"), (float, _TINY, 1)),
    "hold": (float, 0, 0.99),
    **dict.fromkeys(("continuations", "contexts_per_forward"), (int, 1, 1024)),
    "seed": (int, 0, 2**32 - 1),
}


_PAPER_CPU = TrainingConfig(
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
# All lengths and all R at once. A temperature below 0.08 only adds variance on a CPU's small batches.
_CPU = TrainingConfig(
    steps=200,
    batch=4,
    continuations=6,
    tokens_a_continuation=1200,
    lr=5e-4,
    lr_end=5e-5,
    warmup=5,
    tau_start=0.4,
    tau_end=0.1,
    retention_low=0.03,
    retention_high=0.5,
    min_tokens=600,
    max_tokens=8000,
    max_continuation=120,
    dtype="float32",
    checkpoint_every=5,
    evaluate_every=40,
    validation_samples=12,
    key="unrotated",
    attention="learned",
    position=True,
    imitated=16,
)
PRESETS: dict[str, TrainingConfig] = {
    "paper": TrainingConfig(),
    "cpu": _CPU,
    # A second stage from the weights of a first: the gradients of single contexts nearly cancel by then, so it takes
    # large batches and a small last rate.
    "finish": replace(_CPU, batch=8, steps=100, tau_start=0.2, lr=3e-4, lr_end=2e-5, seed=2),
    # The paper's scorer on a CPU, at one R, in two stages.
    "paper-cpu": _PAPER_CPU,
    "paper-cpu-finish": replace(
        _PAPER_CPU,
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


def fit_to_positions(config: TrainingConfig, positions: int) -> TrainingConfig:
    """`config` with contexts and continuations as long as a model of `positions` positions can read, and no longer."""
    continuation = min(config.max_continuation, max(1, positions // 4))
    longest = min(config.max_tokens, positions - continuation)
    return replace(
        config,
        max_continuation=continuation,
        max_tokens=longest,
        min_tokens=config.min_tokens if config.min_tokens < longest else max(1, longest // 2),
    )


def check_positions(config: TrainingConfig, positions: int) -> None:
    """Raise TrainingError where a context and its continuation are more than a model of `positions` positions reads."""
    if config.max_tokens + config.max_continuation > positions:
        raise TrainingError(
            f"contexts of up to {config.max_tokens:,} tokens with continuations of up to {config.max_continuation:,} "
            f"are more than the {positions:,} positions of this model; lower max_tokens or max_continuation, or leave "
            "out --preset for settings that fit."
        )


__all__ = [
    "CHOICES",
    "HELP",
    "HIDDEN_NORMS",
    "PRESETS",
    "SPREADS",
    "ModelSpec",
    "ScorerInputs",
    "TrainingConfig",
    "asdict",
    "check_positions",
    "fit_to_positions",
    "from_dict",
    "replace",
]
