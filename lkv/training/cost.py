"""What a training costs: its FLOPs from the model's shape, and how fast this machine computes."""

import math
import time
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

import torch

from lkv.hf.attention import input_device, patch_attention
from lkv.hf.shapes import Shape
from lkv.hf.spec import evaluation_mode
from lkv.policy.policy import Policy
from lkv.training.config import TrainingConfig, schedule
from lkv.training.data.samples import TokenizedSample
from lkv.training.distillation import SampleGroup, distillation_losses

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Clock = Callable[[], float]

_CONTINUATION_TOKENS = 120  # of a typical continuation: most answers are short
# Passes over a continuation: one of the teacher, and three of the student. A backward pass through frozen weights costs
# as many linear products as a forward pass, for the hidden states only, and about twice the attention products.
_PASSES = 4
_PROBE_TOKENS, _WARM_UP_TOKENS = 512, 32  # of the timed text, and of the call before it


class Estimate(NamedTuple):
    """The contexts, tokens and FLOPs of a training."""

    contexts: int
    tokens: float
    flops: float

    def __str__(self) -> str:
        tokens = f"{self.tokens / 1e6:,.1f} million" if self.tokens >= 1e6 else f"{round(self.tokens, -2):,.0f}"
        return f"{self.contexts:,} contexts, about {tokens} tokens, {self.flops:.1e} operations"


def estimate(shape: Shape, config: TrainingConfig) -> Estimate:
    """Count the FLOPs of all steps and validations of a training."""
    tokens = mean_length(config.min_tokens, config.max_tokens)
    continuations: float = config.continuations
    if config.tokens_a_continuation:
        continuations = min(continuations, 2 + max(0.0, tokens - 2000) / config.tokens_a_continuation)
    length, is_whole = min(config.max_continuation, _CONTINUATION_TOKENS), config.student == "full"
    one_pass = continuations * _continuation_flops(shape, tokens, length, is_whole)
    retentions = 2 if config.retention_high else 1
    validations = math.ceil(config.steps / config.evaluate_every) * config.validation_samples
    contexts = config.steps * config.batch
    flops = contexts * _context_flops(shape, tokens, one_pass, is_whole)
    flops += validations * (shape.forward_flops(tokens) + (1 + retentions) * one_pass)
    return Estimate(contexts, contexts * (tokens + continuations * length), flops)


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
    one_pass = sum(_continuation_flops(shape, tokens, length, whole) for length in continuations)
    return _context_flops(shape, tokens, one_pass, whole)


def mean_length(least: float, most: float) -> float:
    """Return the mean of lengths drawn log-uniformly between two bounds."""
    return least if most <= least else (most - least) / math.log(most / least)


def measure_speed(model: "PreTrainedModel", config: TrainingConfig) -> float:
    """Return the FLOPs per second of training in one process, from a short text and a temporary policy."""
    shape, tokens = Shape.of(model.config), min(_PROBE_TOKENS, config.max_tokens)
    # The probe has a target even if the settings leave none, an error that is raised later.
    continuations = [max(4, min(_CONTINUATION_TOKENS, config.max_continuation))] * config.continuations
    policy = Policy(patch_attention(model).spec, inputs=config.inputs).to(input_device(model))
    model.requires_grad_(False)

    def train(length: int) -> float:
        sample = TokenizedSample("probe", [1] * length, [([1] * ids, ids // 2) for ids in continuations])
        kl, hidden = distillation_losses(model, policy, SampleGroup([(0, sample)]), config, schedule(config, 0))
        (kl + hidden).backward()
        return kl.item()

    with evaluation_mode(model):
        seconds = _time(train, tokens, 0.0, time.perf_counter, 1)
    return context_flops(shape, tokens, continuations, config.student == "full") / seconds


@torch.no_grad()
def seconds_per_token(
    model: "PreTrainedModel", tokens: int, seconds: float = 0.0, clock: Clock = time.perf_counter
) -> float:
    """Measure the prefill seconds per token on this machine under its current load.

    On a busy machine, one pass can take twenty times as long as the next, so the lower median is used.

    Args:
        model: The model, on its device.
        tokens: The length of the text.
        seconds: Repeat until all passes together have taken this long, at least two.
        clock: Returns the time in seconds.
    """
    decoder, ids = model.get_decoder(), torch.ones((1, tokens), dtype=torch.long, device=input_device(model))

    def read(length: int) -> float:
        return decoder(input_ids=ids[:, :length], use_cache=False).last_hidden_state.sum().item()

    return _time(read, tokens, seconds, clock, 2) / tokens


def _time(work: Callable[[int], float], tokens: int, seconds: float, clock: Clock, least_calls: int) -> float:
    """Return the lower median of the seconds of `work`, which returns a Python number and so synchronises."""
    work(min(_WARM_UP_TOKENS, tokens))
    durations: list[float] = []
    while len(durations) < least_calls or sum(durations) < seconds:
        start = clock()
        work(tokens)
        durations.append(clock() - start)
    return median_low(durations)


def _continuation_flops(shape: Shape, tokens: float, length: float, whole: bool) -> float:
    """Return the FLOPs of a forward pass over a continuation after its context, or over both."""
    if whole:
        return shape.forward_flops(tokens + length, logits=length)
    return shape.forward_flops(length, seen=tokens, logits=length)


def _context_flops(shape: Shape, tokens: float, one_pass: float, whole: bool) -> float:
    """Return the FLOPs of a prompt, of LKV-T's MLP 2d -> d -> 1 per head (forward and backward), and of all passes."""
    scores = 3 * 2 * shape.layers * shape.kv_heads * tokens * (2 * shape.head_dim**2 + shape.head_dim)
    passes = _PASSES + whole  # a student over whole sequences recomputes its layers in the backward pass
    return shape.forward_flops(tokens) + one_pass * passes + scores
