"""The recipe of `lkv fit`, and how it divides its time among its stages."""

import math
from dataclasses import replace
from typing import NamedTuple

from lkv.errors import TrainingError
from lkv.training.config import PRESETS, TrainingConfig, fit_to_positions
from lkv.training.cost import mean_length
from lkv.training.data.packing import Lengths
from lkv.utils.durations import format_duration

# Steps are shares of the time: the schedule follows the clock.
RECIPE = replace(
    PRESETS["cpu"], steps=1000, warmup=30, batch=2, continuations=3, tokens_a_continuation=0, lr=2.1e-3, lr_end=2.1e-4,
    heads_lr=3.0, min_tokens=500, max_tokens=2000, max_continuation=80, kl_scale=0.3,
)  # fmt: skip
# Contexts reach so many tokens where so many of them could be read in the time: about 400 are then learned from.
_LONG_CONTEXT, _LONG_READINGS = 4000, 1000
STATISTICS_TEXTS = 6
# The rates of the recipe are for a distillation of at most so many contexts.
_RATED_CONTEXTS = 150
PROGRESS_TEXTS = 4  # held-out texts on which the KL is reported
_REGRESSION_TEXTS, _REGRESSION_SHARE = 16, 0.25  # of the whole time, at most
_LEAST_CONTEXTS = 16  # of a distillation; where there is no time for so many, the regression may take all that is left
_TABLE_TEXTS, _TABLE_SHARE = 6, 0.1
# Seconds of each kind of work, in those of reading as many tokens.
_REGRESSION_READINGS, _TABLE_READINGS, _PROGRESS_READINGS, _CONTEXT_READINGS = 4.0, 10.0, 1.5, 3.5


def longest_context(tokens: float) -> int:
    """Return the greatest length of a context where the model could read `tokens` tokens in the whole time."""
    is_long = tokens >= _LONG_READINGS * mean_length(RECIPE.min_tokens, _LONG_CONTEXT)
    return _LONG_CONTEXT if is_long else RECIPE.max_tokens


def distillation_lengths(config: TrainingConfig, positions: int) -> Lengths:
    """Return the lengths of the contexts that are learned from; those that are only read have the ones of `config`.

    A short distillation draws from half of the least to twice the greatest, longer ones rarer: short texts want many
    contexts and long ones some that are as long.
    """
    if config.max_tokens > RECIPE.max_tokens:
        return Lengths(config.min_tokens, config.max_tokens)
    longest = min(2 * config.max_tokens, positions - config.max_continuation)
    return Lengths(max(1, config.min_tokens // 2), longest, power=1.0)


def shorter_contexts(config: TrainingConfig) -> int:
    """Find the greatest length of a context with which the distillation's longest are half as long as with `config`."""
    return config.max_tokens // (4 if config.max_tokens > RECIPE.max_tokens else 2)


def config_for(positions: int, longest: int) -> TrainingConfig:
    """Return the recipe for a model of `positions` positions with contexts of at most `longest` tokens."""
    # The regression reads a text twice, the second time after a request of a few tokens.
    longest = min(longest, max(1, (positions - 64) // 2))
    return fit_to_positions(
        replace(RECIPE, max_tokens=longest, min_tokens=min(RECIPE.min_tokens, max(1, longest // 2))), positions
    )


def config_for_distillation(config: TrainingConfig, reading: float, seconds: float) -> TrainingConfig:
    """`config` with the rates for a distillation of `seconds`, where the model reads a context in `reading`.

    The gradients of single contexts nearly cancel once the first hundreds are learned: with n times as many contexts
    the rate is the root of n times as small, and the last one n times.
    """
    contexts = seconds / (_CONTEXT_READINGS * reading)
    share = min(1.0, _RATED_CONTEXTS / max(1.0, contexts))
    return replace(config, lr=config.lr * math.sqrt(share), lr_end=config.lr_end * share)


class Plan(NamedTuple):
    """Seconds of each stage, and how many texts the second and the last one read."""

    statistics: float
    regression: float
    distillation: float
    table: float
    regression_texts: int
    table_texts: int


def make_plan(reading: float, seconds: float, spent: float = 0.0, stage: int = 0) -> Plan:
    """Divide the time that is left among the stages that are left.

    Args:
        reading: Seconds in which the model reads a text.
        seconds: Seconds of the whole run.
        spent: Seconds that are over.
        stage: How many stages are done.

    Raises:
        TrainingError: A run that begins has too little time.
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
