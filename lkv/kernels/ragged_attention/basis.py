"""The coordinates of stored entries, and the transformations into and out of them in plain PyTorch."""

from typing import NamedTuple

import torch
from torch import Tensor


class Basis(NamedTuple):
    """The coordinates of stored entries: k' = (k - mean) / scale @ key_rotation and v' = v @ value_rotation.

    With q' = q scale @ key_rotation, q' k' equals q k up to q mean, which is the same for all entries of a span and
    does not change attention. All tensors are contiguous; rotations are float32.

    Attributes:
        mean: [B, Hkv, d], float32 or, as a cache stores it, in 16 bits.
        scale: [B, Hkv, d], positive, in the dtype of `mean`.
        key_rotation: Orthogonal [d, d].
        value_rotation: Orthogonal [dv, dv].
    """

    mean: Tensor
    scale: Tensor
    key_rotation: Tensor
    value_rotation: Tensor

    def enter_queries(self, q: Tensor) -> Tensor:
        """Return q' of queries [B, Hq, Tq, d], in their dtype."""
        scaled = _widen(q).unflatten(1, (self.scale.shape[1], -1)) * self.scale[:, :, None, None]
        return (scaled.flatten(1, 2) @ _match(q, self.key_rotation)).to(q.dtype)

    def enter_entries(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return k' and v' of entries [B, Hkv, T, .], in their dtype."""
        centred = (_widen(key) - self.mean[:, :, None]) / self.scale[:, :, None]
        new_key, new_value = centred @ _match(key, self.key_rotation), _widen(value) @ _match(key, self.value_rotation)
        return new_key.to(key.dtype), new_value.to(value.dtype)

    def leave_outputs(self, out: Tensor) -> Tensor:
        """Transform outputs [B, Hq, Tq, dv] over v' to the model's coordinates."""
        return (_widen(out) @ _match(out, self.value_rotation).mT).to(out.dtype)

    def leave_lse(self, lse: Tensor, q: Tensor, scale: float) -> Tensor:
        """Convert the log-sum-exp [B, Hq, Tq] of q' k' to that of q k; `q` is in the model's coordinates."""
        grouped = _widen(q).unflatten(1, (self.mean.shape[1], -1))
        return lse + scale * (grouped * self.mean[:, :, None, None]).sum(-1).flatten(1, 2).to(lse.dtype)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _match(like: Tensor, rotation: Tensor) -> Tensor:
    """`rotation` in the dtype of computations with `like`; unlike elementwise operators, `@` promotes no dtypes."""
    return rotation.to(torch.promote_types(like.dtype, torch.float32))
