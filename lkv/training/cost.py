"""What a training will cost, from the model's shape and one measured rate; nothing is run here and torch not loaded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lkv.config import TrainingConfig
from lkv.models.shapes import Shape

CALIBRATION_SAMPLES = 8  # texts whose k, v and queries are measured before the first step
START_TOKENS = 2000  # of such a text, or of one on which KVzip is imitated, at most


@dataclass(frozen=True)
class Estimate:
    """Contexts and tokens that a training reads, the floating-point operations, and the seconds they take."""

    contexts: int
    tokens: float
    flops: float
    seconds: float | None = None

    def line(self) -> str:
        """For people; hours where a rate is known."""
        tokens = f"{self.tokens / 1e6:,.1f} million" if self.tokens >= 1e6 else f"{round(self.tokens, -2):,.0f}"
        read = f"{self.contexts:,} contexts, about {tokens} tokens, {self.flops:.1e} operations"
        return read if self.seconds is None else f"{read}, {format_duration(self.seconds)}"


def estimate(
    shape: Shape,
    config: TrainingConfig,
    tokens_per_second: float | None = None,
    measured_at: int = 2048,
    processes: int = 1,
    context_tokens: float | None = None,
    started: bool = False,
) -> Estimate:
    """The cost of training a policy for a model of `shape` by `config`.

    `tokens_per_second` is the model's measured prefill rate at prompts of `measured_at` tokens in one process; None
    leaves the seconds open. `context_tokens` is the mean length of a context; else that of log-uniform lengths, as the
    recipes draw them. `started`: the policy begins with another's weights, so that no text is measured or imitated
    before the first step. Operations: the prompt once; its continuations once by the teacher, by the student forward
    and back to the scores (the frozen weights need no gradient of their own).
    """
    tokens = context_tokens or mean_length(config.min_tokens, config.max_tokens)
    rows, length = _continuations(config, tokens), min(config.max_continuation, _TYPICAL)
    once = shape.forward_flops(length, seen=tokens, logits=length)
    if config.student == "full":
        once = shape.forward_flops(tokens + length, logits=length)
    read = _reading(shape, tokens, rows * once)
    contexts = config.steps * config.batch
    validated = (config.steps // config.evaluate_every) * config.validation_samples
    flops = contexts * read + validated * (shape.forward_flops(tokens) + 2 * rows * once)
    if not started:
        flops += _starting(shape, min(tokens, START_TOKENS), config.warmup_contexts)
    seconds = None
    if tokens_per_second:
        rate = shape.forward_flops(measured_at) / measured_at * tokens_per_second
        seconds = flops / rate / processes
    return Estimate(contexts, contexts * (tokens + rows * length), flops, seconds)


def context_flops(shape: Shape, tokens: int, continuations: Sequence[int], whole: bool = False) -> float:
    """The operations of training on one context of `tokens` with continuations of so many tokens each; none without
    any. `whole`: the student computes the prompt's rows again."""
    if not continuations:
        return 0.0
    first, seen = (tokens, 0) if whole else (0, tokens)
    once = sum(shape.forward_flops(first + length, seen=seen, logits=length) for length in continuations)
    return _reading(shape, tokens, once)


def split_by_cost(costs: Sequence[float], processes: int) -> list[list[int]]:
    """The items of `costs` shared out: as many each, or one more for the first ones, and the sums alike.

    The dearest first, each to the process that has least to do and room left; items in their order.
    """
    shared: list[list[int]] = [[] for _ in range(processes)]
    rooms = [len(range(process, len(costs), processes)) for process in range(processes)]
    sums = [0.0] * processes
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        process = min((p for p in range(processes) if len(shared[p]) < rooms[p]), key=lambda p: sums[p])
        shared[process].append(item)
        sums[process] += costs[item]
    return [sorted(items) for items in shared]


_TYPICAL = 120  # tokens of a continuation: most answers are short, what is left of `max_continuation` is padding
_TEACHER, _STUDENT = 1, 3  # a backward pass through frozen weights: one product a layer for the hidden states, one more
# for attention than forward has, and the activations once


def mean_length(least: float, most: float) -> float:
    """The mean of lengths drawn log-uniformly between two bounds."""
    return least if most <= least else (most - least) / math.log(most / least)


def _reading(shape: Shape, tokens: float, continuations: float) -> float:
    """The prompt once, its scores, and `continuations` operations by teacher and student."""
    return shape.forward_flops(tokens) + continuations * (_TEACHER + _STUDENT) + _scores(shape, tokens)


def _starting(shape: Shape, tokens: float, imitated: int) -> float:
    """Texts read to measure k, v and queries; those that are imitated once more, as KVzip reads them twice."""
    read = shape.forward_flops(tokens)
    return CALIBRATION_SAMPLES * read + imitated * (read + shape.forward_flops(tokens, tokens))


def _continuations(config: TrainingConfig, tokens: float) -> float:
    if not config.tokens_a_continuation:
        return config.continuations
    return min(config.continuations, 2 + max(0.0, tokens - 2000) / config.tokens_a_continuation)


def _scores(shape: Shape, tokens: float) -> float:
    """LKV-T over the prompt, forward and back: its MLP of 2d to d to 1 a head."""
    return 3 * 2 * shape.layers * shape.kv_heads * tokens * (2 * shape.head_dim**2 + shape.head_dim)


def format_duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} minutes" if seconds < 5400 else f"about {seconds / 3600:.1f} hours"
