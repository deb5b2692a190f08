"""Helpers shared by the Triton kernels."""

import triton
import triton.language as tl
from triton import knobs

LOG2_E = tl.constexpr(1.4426950408889634)
# Triton's interpreter (TRITON_INTERPRET=1) knows bfloat16 as bits, and would multiply those.
IS_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def split_heads(number, heads):
    """Split a flat head index over all rows into batch row and head, in 64 bits."""
    return (number // heads).to(tl.int64), (number % heads).to(tl.int64)


@triton.jit
def load_rows(x, row_at, is_row, channel_at, is_channel):
    """Return rows of `x` as [rows, channels], 0 beyond its ends."""
    return tl.load(x + row_at[:, None] + channel_at[None, :], mask=is_row[:, None] & is_channel[None, :], other=0.0)


@triton.jit
def store_rows(x, row_at, rows, is_row, channel_at, is_channel):
    """Store `rows` [rows, channels] in the dtype of `x`."""
    rows = rows.to(x.dtype.element_ty)
    tl.store(x + row_at[:, None] + channel_at[None, :], rows, mask=is_row[:, None] & is_channel[None, :])


@triton.jit
def cap(scores, SOFTCAP: tl.constexpr):  # noqa: N803 (constants are in capitals)
    """Return SOFTCAP tanh(scores / SOFTCAP), or `scores` if it is 0."""
    return SOFTCAP * (2 * tl.sigmoid(scores * (2 / SOFTCAP)) - 1) if SOFTCAP > 0 else scores
