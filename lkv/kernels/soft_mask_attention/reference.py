"""Soft-masked attention written as App. B states it, with every matrix in full. The oracle for the fast backends."""

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, log_mask: Tensor, scale: float) -> Tensor:
    """p_i ~ m_i exp(s_i), causal from the bottom right. Shapes and empty rows as in `api.soft_mask_attention`."""
    groups = q.shape[1] // k.shape[1]
    k, v, log_mask = (t.repeat_interleave(groups, dim=1) for t in (k, v, log_mask))
    scores = q @ k.transpose(-1, -2) * scale + log_mask[..., None, :]
    rows, columns = scores.shape[-2:]
    visible = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
    scores = scores.masked_fill(~visible, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0).to(v.dtype) @ v
