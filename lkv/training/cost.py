"""The floating-point operations of a training run, from the model's shape."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lkv.hf.shapes import Shape
from lkv.training.config import TrainingConfig

CALIBRATION_SAMPLES = 8  # texts whose k, v and queries are measured before the first step
WARM_START_TOKENS = 2000  # the most tokens of a text read for statistics or eviction errors
WARM_START_UPDATES = 16  # updates of LKV-T per text
WARM_START_SAMPLE = 512  # tokens per text that LKV-T is fitted to, few enough to keep for all texts

_CONTINUATION_TOKENS = 120  # of a typical continuation: most answers are short
# Relative cost of a backward pass through frozen weights: as many linear products as forward, for the hidden states
# only, and about twice the attention products.
_TEACHER_PASSES, _STUDENT_PASSES = 1, 3
_RECOMPUTED_PASSES = (
    1  # extra passes of a student over whole sequences, whose layers are recomputed in the backward pass
)


@dataclass(frozen=True)
class Estimate:
    """The contexts, tokens and FLOPs of a training."""

    contexts: int
    tokens: float
    calibration_flops: float
    warm_start_flops: float
    steps: int
    step_flops: float
    validations: int
    validation_flops: float

    @property
    def flops(self) -> float:
        """The total FLOPs."""
        training = self.steps * self.step_flops + self.validations * self.validation_flops
        return self.calibration_flops + self.warm_start_flops + training

    def after(self, steps: int, validations: int) -> "Estimate":
        """Return the remaining cost after `steps` steps and `validations` validations."""
        return replace(
            self,
            calibration_flops=0.0,
            warm_start_flops=0.0,
            steps=self.steps - steps,
            validations=self.validations - validations,
        )

    def __str__(self) -> str:
        tokens = f"{self.tokens / 1e6:,.1f} million" if self.tokens >= 1e6 else f"{round(self.tokens, -2):,.0f}"
        return f"{self.contexts:,} contexts, about {tokens} tokens, {self.flops:.1e} operations"


def estimate(
    shape: Shape, config: TrainingConfig, context_tokens: float | None = None, is_initialized: bool = False
) -> Estimate:
    """Count the FLOPs of a training.

    The prompt is read once. Continuations pass once through the teacher, and forward and backward through the student.

    Args:
        shape: The model's shape.
        config: The settings.
        context_tokens: The mean length of a context (default: that of the settings).
        is_initialized: The policy needs neither calibration nor warm start.
    """
    tokens = context_tokens or mean_length(config.min_tokens, config.max_tokens)
    continuations: float = config.continuations
    if config.tokens_a_continuation:
        continuations = min(continuations, 2 + max(0.0, tokens - 2000) / config.tokens_a_continuation)
    length = min(config.max_continuation, _CONTINUATION_TOKENS)
    is_whole = config.student == "full"
    one_pass = continuations * _continuation_flops(shape, tokens, length, is_whole)
    retentions = 2 if config.retention_high else 1
    validation = shape.forward_flops(tokens) + (1 + retentions) * one_pass
    contexts, startup_tokens = config.steps * config.batch, min(tokens, WARM_START_TOKENS)
    return Estimate(
        contexts,
        contexts * (tokens + continuations * length),
        0.0 if is_initialized else CALIBRATION_SAMPLES * shape.forward_flops(startup_tokens),
        0.0 if is_initialized else config.warmup_contexts * warm_start_flops(shape, startup_tokens),
        config.steps,
        config.batch * _sample_flops(shape, tokens, one_pass, is_whole),
        math.ceil(config.steps / config.evaluate_every),
        config.validation_samples * validation,
    )


def warm_start_flops(shape: Shape, tokens: float) -> float:
    """Return the FLOPs of the warm start on one text: reading and repeating it, and fitting LKV-T."""
    replay = shape.forward_flops(tokens, tokens)
    regression = WARM_START_UPDATES * _score_flops(shape, min(tokens, WARM_START_SAMPLE))
    return shape.forward_flops(tokens) + replay + regression


def context_flops(shape: Shape, tokens: int, continuations: Sequence[int], whole: bool = False) -> float:
    """Count the FLOPs of training on one context.

    Args:
        shape: The model's shape.
        tokens: Tokens of the context.
        continuations: Tokens of each continuation.
        whole: The student computes the prompt's rows again.
    """
    if not continuations:
        return 0.0
    one_pass = sum(_continuation_flops(shape, tokens, n, whole) for n in continuations)
    return _sample_flops(shape, tokens, one_pass, whole)


def mean_length(least: float, most: float) -> float:
    """Return the mean of lengths drawn log-uniformly between two bounds."""
    return least if most <= least else (most - least) / math.log(most / least)


def _continuation_flops(shape: Shape, tokens: float, length: float, whole: bool) -> float:
    """Return the FLOPs of a forward pass over a continuation after its context, or over both."""
    if whole:
        return shape.forward_flops(tokens + length, logits=length)
    return shape.forward_flops(length, seen=tokens, logits=length)


def _sample_flops(shape: Shape, tokens: float, one_pass: float, whole: bool) -> float:
    """Return the FLOPs of the prompt, its scores, and teacher and student passes of `one_pass` FLOPs."""
    passes = _TEACHER_PASSES + _STUDENT_PASSES + _RECOMPUTED_PASSES * whole
    return shape.forward_flops(tokens) + one_pass * passes + _score_flops(shape, tokens)


def _score_flops(shape: Shape, tokens: float) -> float:
    """Return the FLOPs of LKV-T over the prompt, forward and backward: an MLP 2d -> d -> 1 per head."""
    return 3 * 2 * shape.layers * shape.kv_heads * tokens * (2 * shape.head_dim**2 + shape.head_dim)
