"""Ragged attention head by head in float64, with every matrix in full: the oracle of the fast backends."""

import torch
from torch import Tensor

from lkv.kernels.ragged_attention.arguments import RaggedKV


def attend(
    q: Tensor, kv: RaggedKV, scale: float, causal: bool = True, with_lse: bool = False, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Shapes as in `api.ragged_attention`; the log-sum-exp is always computed."""
    k_pool, v_pool, starts, lens, *_ = kv
    batch, heads, tokens, _ = q.shape
    group = heads // starts.shape[1]
    out = q.new_empty((batch, heads, tokens, v_pool.shape[-1]))
    lse = q.new_empty((batch, heads, tokens), dtype=torch.float64)
    for b in range(batch):
        for head in range(heads):
            start, length = int(starts[b, head // group]), int(lens[b, head // group])
            k, v = (pool[start : start + length].double() for pool in (k_pool, v_pool))
            scores = q[b, head].double() @ k.T * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if causal:
                visible = torch.ones(tokens, length, dtype=torch.bool, device=q.device).tril(length - tokens)
                scores = scores.masked_fill(~visible, -torch.inf)
            out[b, head] = (torch.softmax(scores, -1) @ v).to(q.dtype)
            lse[b, head] = torch.logsumexp(scores, -1)
    return out, lse
