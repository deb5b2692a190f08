"""Spans as the sequences of a packed batch, as variable-length flash attention takes them."""

from typing import NamedTuple

import torch
from torch import Tensor

from lkv.utils import devices


def refusal(
    device: torch.device, dtype: torch.dtype, dim: int, value_dim: int, major: int, exactly: bool
) -> str | None:
    """Why flash attention cannot run, in one sentence; None where it can.

    `major` is the least compute capability, or if `exactly` the only one.
    """
    if device.type != "cuda":
        return f"the pools are on {device.type!r}, but variable-length flash attention needs a CUDA device."
    if dtype not in (torch.bfloat16, torch.float16) or dim != value_dim or dim > 256 or dim % 8:
        return (
            f"heads of {dim} and {value_dim} in {dtype} were given, but variable-length flash attention takes bfloat16 "
            "and float16, with k and v of one size that is a multiple of 8 up to 256."
        )
    gpu = devices.runtime(device).get_device_properties(device)
    if gpu.major < major or (exactly and gpu.major != major):
        return f"{gpu.name} has compute capability {gpu.major}.{gpu.minor}, but this flash attention needs {major}.0."
    return None


class Sequences(NamedTuple):
    """N = B Hkv sequences of one KV head, whose query heads are those of its group.

    Attributes:
        query: [N Tq, group, d].
        key: [P, 1, d].
        value: [P, 1, d].
        query_starts: int32 [N + 1].
        starts: int32 [N + 1].
        lens: int32 [N].
        longest: An upper bound of `lens`: the greatest length is known on the device alone.
        shape: B, Hkv, Tq.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_starts: Tensor
    starts: Tensor
    lens: Tensor
    longest: int
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor) -> "Sequences":
        """Shapes as in `api.ragged_attention`."""
        batch, heads, rows, dim = q.shape
        kv_heads, spans = starts.shape[1], starts.numel()
        query = q.view(batch, kv_heads, heads // kv_heads, rows, dim).transpose(2, 3).reshape(spans * rows, -1, dim)
        query_starts = torch.arange(0, (spans + 1) * rows, rows, dtype=torch.int32, device=q.device)
        ends = torch.full_like(lens.flatten()[:1], len(k_pool))
        starts = torch.cat([starts.flatten(), ends])
        shape = batch, kv_heads, rows
        return cls(query, k_pool[:, None], v_pool[:, None], query_starts, starts, lens.flatten(), len(k_pool), shape)

    def outputs(self, out: Tensor, lse: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Outputs [B, Hq, Tq, d] and log-sum-exps [B, Hq, Tq] from those [N Tq, group, d] and [group, N Tq]."""
        batch, kv_heads, rows = self.shape
        out = out.view(batch, kv_heads, rows, *out.shape[1:]).transpose(2, 3).flatten(1, 2)
        if lse is None:
            return out, None
        lse = lse.view(-1, batch, kv_heads, rows).permute(1, 2, 0, 3).flatten(1, 2)
        # What a sequence without keys gives is not documented.
        empty = (self.lens == 0).view(batch, kv_heads).repeat_interleave(lse.shape[1] // kv_heads, 1)[..., None]
        return out.masked_fill(empty[..., None], 0.0), lse.float().masked_fill(empty, -torch.inf)
