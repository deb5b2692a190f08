"""Which entries of which head are kept, and where they lie in k and v."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lkv.utils.devices import uploaded


class Rows(NamedTuple):
    """All entries of a tensor [B, H, T, d] as the rows of one matrix: entry (b, h, t) is row b * batch + h * head + t *
    token of `matrix` [R, d], a view."""

    matrix: Tensor
    batch: int
    head: int
    token: int

    @classmethod
    def of(cls, x: Tensor) -> "Rows":
        """A view of `x`, in whatever order its entries lie, unless its last axis must be made one piece first."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        step = math.gcd(x.shape[-1], *x.stride()[:3])
        strides = [stride // step for stride in x.stride()[:3]]
        last = sum((size - 1) * stride for size, stride in zip(x.shape[:3], strides, strict=True))
        return cls(x.as_strided((last + 1, x.shape[-1]), (step, 1)), *strides)


def kept(scores: Tensor, counts: Tensor, most: int) -> Tensor:
    """Whether each of `scores` [N, T] is one of the `counts` [N] (at most `most`) highest of its row; of equal ones the
    earlier is. What a row keeps does not depend on those beside it."""
    places = (counts - 1).clamp(min=0).long()
    least = scores.topk(max(1, most)).values.gather(1, places[:, None])
    above, equal = scores > least, scores == least
    missing = counts - above.sum(1, dtype=torch.int32)
    return above | (equal & (equal.cumsum(1, dtype=torch.int32) <= missing[:, None]))


def sources(scores: Tensor, lens: Tensor, room: int, *kinds: Rows) -> list[Tensor]:
    """For each of `kinds` the rows (int32 [P]) of what goes to every place of pools in which each head has its `lens`
    [B, H] (on the CPU) best entries by `scores` [B, H, T], in rising order, and `room` more, with anything in it.

    Nothing is sorted but the best scores, and beside these the whole takes 6 bytes a token.
    """
    heads, tokens = scores.shape[1:]
    ranks = lens.flatten() + room
    # Counted over all heads, place p of head h wants the entry p + 1 - h * room.
    span = torch.arange(len(ranks), device="cpu")
    row, head = span // heads, span % heads
    shifts = [row * kind.batch + head * kind.head - span * tokens * kind.token for kind in kinds]
    tables = uploaded(scores.device, lens.flatten(), ranks, 1 - span * room, *shifts)
    size = int(ranks.sum())
    counted = kept(scores.flatten(0, 1), tables[0], int(lens.max())).flatten().cumsum(0, dtype=torch.int32)
    wanted, *shifts = tables[2:].repeat_interleave(tables[1], 1, output_size=size).unbind()
    wanted += torch.arange(size, dtype=torch.int32, device=scores.device)
    index = torch.searchsorted(counted, wanted, out_int32=True)
    return [
        (index * kind.token).add_(shift).clamp_(0, len(kind.matrix) - 1)
        for kind, shift in zip(kinds, shifts, strict=True)
    ]


def best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest of `scores` [T], in rising order; of equal ones the earlier."""
    if count == len(scores):
        return torch.arange(count, device=scores.device)
    return scores.argsort(descending=True, stable=True)[:count].sort().values
