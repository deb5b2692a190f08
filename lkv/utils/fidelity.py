"""Fidelity of a compressed cache's predictions to those of the full cache, token by token."""

from torch import Tensor


def kl_divergence(full: Tensor, compressed: Tensor) -> Tensor:
    """Compute KL(full || compressed) in nats of each token, [..., n], from log-probabilities [..., n, V]."""
    return (full.exp() * (full - compressed)).sum(-1)


def is_top1_equal(full: Tensor, compressed: Tensor) -> Tensor:
    """Return whether both have the same most probable token, [..., n], from log-probabilities [..., n, V]."""
    return full.argmax(-1) == compressed.argmax(-1)
