"""Ragged attention head by head, in float64 and with every matrix in full. The oracle for the fast backends."""

import torch
from torch import Tensor


def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float) -> Tensor:
    """Shapes as in `api.ragged_attention`."""
    return attend_with_lse(q, k_pool, v_pool, starts, lens, scale, True)[0]


def attend_with_lse(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """`attend` and the log-sum-exp of the scores [B, Hq, Tq] in float64; without `causal` all entries are visible."""
    batch, heads, rows, _ = q.shape
    groups = heads // starts.shape[1]
    out = q.new_empty((batch, heads, rows, v_pool.shape[-1]))
    lse = q.new_empty((batch, heads, rows), dtype=torch.float64)
    for b in range(batch):
        for head in range(heads):
            start, length = int(starts[b, head // groups]), int(lens[b, head // groups])
            k, v = k_pool[start : start + length].double(), v_pool[start : start + length].double()
            scores = q[b, head].double() @ k.T * scale
            if causal:
                visible = torch.ones(rows, length, dtype=torch.bool, device=q.device).tril(length - rows)
                scores = scores.masked_fill(~visible, -torch.inf)
            out[b, head] = (torch.softmax(scores, -1) @ v).to(q.dtype)
            lse[b, head] = torch.logsumexp(scores, -1)
    return out, lse
