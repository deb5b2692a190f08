"""Estimates of training time on this machine, from the measured speed of each kind of work."""

import time
from collections.abc import Callable
from statistics import median_low
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lkv.hf.attention import input_device, patch_attention
from lkv.hf.shapes import Shape
from lkv.hf.spec import evaluation_mode
from lkv.policy.policy import Policy
from lkv.training.config import TrainingConfig
from lkv.training.cost import Estimate, context_flops, warm_start_flops
from lkv.training.data.samples import TokenizedSample
from lkv.training.distillation import SampleGroup, distillation_losses, schedule
from lkv.training.warm_start import fit_to_targets, regression_targets

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Clock = Callable[[], float]
_PROBE_TOKENS, _PROBE_CONTINUATION = 512, 120  # of the text whose reading and training is timed
_WARM_UP_TOKENS = 32  # of the warm-up call


class Speed(NamedTuple):
    """FLOPs per second of one process: prefill, warm start and training."""

    prefill: float
    warm_start: float
    training: float

    def seconds(self, cost: Estimate, processes: int = 1) -> float:
        """Seconds of a training; calibration and validation are not split among processes."""
        return (
            cost.calibration_flops / self.prefill
            + cost.warm_start_flops / self.warm_start / processes
            + cost.steps * cost.step_flops / self.training / processes
            + cost.validations * cost.validation_flops / self.training
        )

    @classmethod
    def measure(
        cls,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        config: TrainingConfig,
        has_warm_start: bool = True,
    ) -> "Speed":
        """Time each kind of work once on a short text, with a temporary policy.

        Args:
            model: The model, on its device.
            tokenizer: Its tokenizer.
            config: The settings of the training.
            has_warm_start: Also time the warm start; otherwise its speed is set to the prefill speed.
        """
        shape, device = Shape.of(model.config), input_device(model)
        length = min(_PROBE_TOKENS, config.max_tokens)
        # The probe has a target even if the settings leave none, an error that is raised later.
        continuations = [max(4, min(_PROBE_CONTINUATION, config.max_continuation))] * config.continuations
        policy = Policy(patch_attention(model).spec, inputs=config.inputs).to(device)
        model.requires_grad_(False)

        def train(tokens: int) -> float:
            sample = TokenizedSample("probe", [1] * tokens, [([1] * ids, ids // 2) for ids in continuations])
            kl, hidden = distillation_losses(model, policy, SampleGroup([(0, sample)]), config, schedule(config, 0))
            (kl + hidden).backward()
            return kl.item()

        def replay(tokens: int) -> float:
            return fit_to_targets(policy, [regression_targets(model, tokenizer, policy, [1] * tokens)])

        with evaluation_mode(model):
            prefill = shape.forward_flops(length) / (length * seconds_per_token(model, length, least_calls=1))
            warm_start = warm_start_flops(shape, length) / _time(replay, length) if has_warm_start else prefill
            training = context_flops(shape, length, continuations, config.student == "full") / _time(train, length)
        return cls(prefill, warm_start, training)


@torch.no_grad()
def seconds_per_token(
    model: "PreTrainedModel",
    tokens: int,
    seconds: float = 0.0,
    clock: Clock = time.perf_counter,
    least_calls: int = 2,
) -> float:
    """Measure the prefill seconds per token on this machine under its current load.

    On a busy machine, one pass can take twenty times as long as the next, so the lower median is used.

    Args:
        model: The model, on its device.
        tokens: The length of the text.
        seconds: Repeat until all passes together have taken this long.
        clock: Returns the time in seconds.
        least_calls: The least number of passes.
    """
    decoder, ids = model.get_decoder(), torch.ones((1, tokens), dtype=torch.long, device=input_device(model))

    def read(length: int) -> float:
        return decoder(input_ids=ids[:, :length], use_cache=False).last_hidden_state.sum().item()

    return _time(read, tokens, seconds, clock, least_calls) / tokens


def _time(
    work: Callable[[int], Any],
    tokens: int,
    seconds: float = 0.0,
    clock: Clock = time.perf_counter,
    least_calls: int = 1,
) -> float:
    """Return the lower median of the seconds of `work`, which returns a Python number and so synchronises."""
    work(min(_WARM_UP_TOKENS, tokens))
    durations: list[float] = []
    while len(durations) < least_calls or sum(durations) < seconds:
        start = clock()
        work(tokens)
        durations.append(clock() - start)
    return median_low(durations)
