"""Entries in 8 or 4 bits a value, as the attention kernels read them."""

from typing import NamedTuple

from torch import Tensor


class QuantizedKV(NamedTuple):
    """The first entries of each span, all spans packed: value = code * step + least.

    `key` and `value` uint8 [N, d], or [N, ceil(d / 2)] with two codes of 4 `bits` a byte, those of the first half of
    the channels below. `group` entries of one channel share a step in k (begun anew with each span), `group` channels
    of one entry in v: `key_scale`, `key_minimum` [groups, d], `value_scale`, `value_minimum` [N, ceil(d / group)].
    `tables` [3, B, H] int32: how many entries of a span are codes, its first one, and its first group of k.
    """

    key: Tensor
    key_scale: Tensor
    key_minimum: Tensor
    value: Tensor
    value_scale: Tensor
    value_minimum: Tensor
    tables: Tensor
    bits: int
    group: int
