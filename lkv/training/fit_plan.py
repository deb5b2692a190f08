"""How `lkv fit` divides its time among its stages, and the numbered samples that each stage reads."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from lkv.errors import DataError, TrainingError
from lkv.training.config import RECIPE, TrainingConfig, fit_to_positions
from lkv.training.cost import mean_length
from lkv.training.data.mixture import Mixture
from lkv.training.data.packing import Lengths
from lkv.training.data.samples import TokenizedSample
from lkv.training.loop import Batch
from lkv.utils.durations import format_duration

FIRST_CONTEXT = 1000  # number of the first sample of the distillation: those before are read by the other stages
_BATCHES_BY_LENGTH = 8  # drawn together and sorted by length
# Context lengths, by the number of contexts that could be read in the time: about 400 are then used for training.
_LONG_CONTEXT, _LONG_READINGS = 4000, 1000
STATISTICS_TEXTS = 6
# The recipe's learning rates are for a distillation of at most this many contexts.
_RATED_CONTEXTS = 150
PROGRESS_TEXTS = 4  # held-out texts on which the KL is reported
_REGRESSION_TEXTS, _REGRESSION_SHARE = 16, 0.25  # the most texts, and the most of the whole time
_LEAST_CONTEXTS = 16  # of a distillation; with less time the regression may use all that remains
_TABLE_TEXTS, _TABLE_SHARE = 6, 0.1
# Cost per token of each kind of work, relative to a prefill token.
_REGRESSION_READINGS, _TABLE_READINGS, _PROGRESS_READINGS, _CONTEXT_READINGS = 4.0, 10.0, 1.5, 3.5


def longest_context(tokens: float) -> int:
    """Return the maximum context length if the model could read `tokens` tokens in the whole time."""
    is_long = tokens >= _LONG_READINGS * mean_length(RECIPE.min_tokens, _LONG_CONTEXT)
    return _LONG_CONTEXT if is_long else RECIPE.max_tokens


def distillation_lengths(config: TrainingConfig, positions: int) -> Lengths:
    """Return the context lengths of the distillation; other stages use the lengths of `config`.

    They range from half of the minimum to twice the maximum of `config`, with longer contexts rarer: short texts need
    many contexts, and long texts need a few contexts of their length.
    """
    if config.max_tokens > RECIPE.max_tokens:
        return Lengths(config.min_tokens, config.max_tokens)
    longest = min(2 * config.max_tokens, positions - config.max_continuation)
    return Lengths(max(1, config.min_tokens // 2), longest, power=1.0)


def shorter_contexts(config: TrainingConfig) -> int:
    """Return the maximum context length with which the distillation's longest contexts are half as long as now."""
    return config.max_tokens // (4 if config.max_tokens > RECIPE.max_tokens else 2)


def config_for(positions: int, longest: int) -> TrainingConfig:
    """Return the recipe for a model with `positions` positions and contexts of at most `longest` tokens."""
    # The regression reads a text twice, the second time after a short request.
    longest = min(longest, max(1, (positions - 64) // 2))
    return fit_to_positions(
        replace(RECIPE, max_tokens=longest, min_tokens=min(RECIPE.min_tokens, max(1, longest // 2))), positions
    )


def config_for_distillation(config: TrainingConfig, reading: float, seconds: float) -> TrainingConfig:
    """Scale the learning rates of `config` for a distillation of `seconds` with `reading` seconds per context.

    After the first hundreds of contexts, gradients of single contexts nearly cancel. For n times as many contexts, lr
    is scaled by 1/sqrt(n) and lr_end by 1/n.
    """
    contexts = seconds / (_CONTEXT_READINGS * reading)
    share = min(1.0, _RATED_CONTEXTS / max(1.0, contexts))
    return replace(config, lr=config.lr * math.sqrt(share), lr_end=config.lr_end * share)


class Plan(NamedTuple):
    """The seconds of each stage, and the number of texts of the second and the last stage."""

    statistics: float
    regression: float
    distillation: float
    table: float
    regression_texts: int
    table_texts: int


def make_plan(reading: float, seconds: float, spent: float = 0.0, stage: int = 0) -> Plan:
    """Divide the remaining time among the remaining stages.

    Args:
        reading: Seconds in which the model reads a text.
        seconds: Seconds of the whole run.
        spent: Seconds spent so far.
        stage: The number of finished stages.

    Raises:
        TrainingError: The time is too short for a new run.
    """
    statistics = 0.0 if stage else (STATISTICS_TEXTS + PROGRESS_TEXTS * _PROGRESS_READINGS) * reading
    table_texts = min(_TABLE_TEXTS, max(1, int(_TABLE_SHARE * seconds / (_TABLE_READINGS * reading))))
    table = table_texts * _TABLE_READINGS * reading
    left = seconds - spent - statistics - table
    if left < 0 and not stage:
        least = math.ceil((spent + statistics + table) / 60 * 1.2)
        raise TrainingError(
            f"--minutes {seconds / 60:g} is too short here: loading took {format_duration(spent)}, and the statistics "
            f"and the comparison take {format_duration(statistics + table)}; give --minutes {least} or more."
        )
    share = _REGRESSION_SHARE * seconds
    if left - share < _LEAST_CONTEXTS * _CONTEXT_READINGS * reading:
        share = left
    fitting_texts = min(_REGRESSION_TEXTS, int(share / (_REGRESSION_READINGS * reading)))
    regression_texts = max(0, fitting_texts) if stage < 2 else 0
    regression = regression_texts * _REGRESSION_READINGS * reading
    distillation = left - regression
    if distillation < RECIPE.batch * _CONTEXT_READINGS * reading:  # not even one update
        distillation = 0.0
    return Plan(statistics, regression, distillation, table, regression_texts, table_texts)


class FitSamples:
    """Draws the samples of each stage.

    Args:
        texts: The data of the run.
        draw: `draw_sample` for the model, its tokenizer and `config`.
        config: The settings.
        lengths: The context lengths of the distillation in tokens.
    """

    def __init__(self, texts: Mixture, draw: Callable[..., TokenizedSample], config: TrainingConfig, lengths: Lengths):
        self._draw_sample, self._config, self._longest = draw, config, lengths.most
        self.training = texts.with_lengths(Lengths(config.min_tokens, config.max_tokens))
        self.held_out = self.training.held_out(config.seed)
        self._distilled = texts.with_lengths(lengths)
        self._batches: list[Batch] = []

    def draw_training(self, start: int, count: int) -> list[TokenizedSample]:
        """Draw `count` training samples, from number `start` on."""
        return self._draw(self.training, start, count, self._config.max_tokens)

    def draw_held_out(self, start: int, count: int, longest: int) -> list[TokenizedSample]:
        """Draw `count` held-out samples of at most `longest` tokens, without very short and so uninformative ones."""
        return self._draw(self.held_out, start, count, longest, min(self._config.min_tokens, longest) // 2)

    def draw_batch(self, step: int) -> Batch:
        """Draw numbered contexts of similar length for a step, so that threads finish together."""
        batch, position = self._config.batch, step % _BATCHES_BY_LENGTH
        if not (position and self._batches):
            first = FIRST_CONTEXT + (step - position) * batch
            numbers = range(first, first + _BATCHES_BY_LENGTH * batch)
            drawn = [(at, self._draw_sample(self._distilled, at, max_tokens=self._longest)) for at in numbers]
            drawn.sort(key=lambda pair: len(pair[1].context))
            batches = (drawn[start : start + batch] for start in range(0, len(drawn), batch))
            self._batches = sorted(batches, key=lambda pairs: min(number for number, _ in pairs))
        return self._batches[position]

    def _draw(self, data: Mixture, start: int, count: int, longest: int, shortest: int = 0) -> list[TokenizedSample]:
        """Draw `count` samples with continuations, of at most `longest` tokens, from number `start` on.

        If too few have `shortest` tokens or more, the longest of the others are added.
        """
        samples: list[TokenizedSample] = []
        short: list[TokenizedSample] = []
        for number in range(start, start + 20 * count):
            sample = self._draw_sample(data, number, max_tokens=longest)
            if sample.continuations:
                (samples if len(sample.context) >= shortest else short).append(sample)
            if len(samples) == count:
                break
        if not samples and not short:
            raise DataError("the texts are too short to learn from; give longer ones.")
        short.sort(key=lambda sample: len(sample.context), reverse=True)
        return samples + short[: count - len(samples)]
