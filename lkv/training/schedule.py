"""What the steps of a training use: learning rate, temperature and retention (App. C.3)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lkv.config import TrainingConfig


@dataclass(frozen=True)
class Schedule:
    """Learning rate, temperature and retention at one step (App. C.3)."""

    lr: float
    tau: float
    retention: float


def schedule(config: TrainingConfig, step: int) -> Schedule:
    """Linear warm-up and decay of the rate; exponential decay of tau and R, then `hold` at their final values."""
    if step < config.warmup:
        lr = config.lr * (step + 1) / config.warmup
    else:
        progress = (step - config.warmup) / max(1, config.steps - config.warmup)
        lr = config.lr + (config.lr_end - config.lr) * progress
    share = min(1.0, step / max(1.0, config.steps * (1 - config.hold)))
    return Schedule(
        lr=lr,
        tau=config.tau_start * (config.tau_end / config.tau_start) ** share,
        retention=config.retention_start * (config.retention_end / config.retention_start) ** share,
    )


def draw_retentions(config: TrainingConfig, rows: int, scheduled: float, generator: torch.Generator) -> Tensor:
    """R [n] of each continuation, drawn log-uniformly where the settings say so, else the schedule's."""
    low, high = config.retention_low, config.retention_high
    if not high:
        return torch.full((rows,), scheduled, device="cpu")
    return low * (high / low) ** torch.rand(rows, generator=generator, device="cpu")


def retention_weights(config: TrainingConfig, retention: Tensor) -> Tensor:
    """How much a continuation under each of `retention` [n] counts."""
    if not config.retention_high:
        return torch.ones_like(retention)
    return (retention / config.retention_end) ** config.retention_power
