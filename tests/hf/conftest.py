"""A stand-in for flash attention, which runs on CPUs, and a cache folder of a test's own."""

import inspect
import itertools
from pathlib import Path

import pytest
import torch
from transformers import modeling_flash_attention_utils


def flash(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """flash_attn's function in float64: q [B, Tq, Hq, d]; causal from the last key on."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    tokens, keys = q.shape[2], k.shape[2]
    distance = torch.arange(keys - tokens, keys)[:, None] - torch.arange(keys)
    hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window_size[0] >= 0:
        hidden |= distance > window_size[0]
    scores = (q @ k.mT * softmax_scale).masked_fill(hidden, -torch.inf)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2).to(torch.float32)


def flash_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    """As `flash`, of rows one after another: q [sum of Tq, Hq, d]."""
    spans = zip(itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True)
    rows = [flash(q[None, a:b], k[None, c:d], v[None, c:d], **options)[0] for (a, b), (c, d) in spans]
    return torch.cat(rows)


flash_varlen.__signature__ = inspect.Signature(
    [
        *list(inspect.signature(flash_varlen).parameters.values())[:-1],
        *list(inspect.signature(flash).parameters.values())[3:],
    ]
)


@pytest.fixture
def flash_attention(monkeypatch):
    """The names under which transformers looked for flash attention, which is `flash` for the time of a test."""
    names = []

    def found(implementation, *args, **kwargs):
        names.append(implementation)
        functions = flash, flash_varlen, None, modeling._pad_input, modeling._unpad_input
        return functions if hasattr(modeling, "_flash_with_kvcache_fn") else (*functions[:2], *functions[3:])

    modeling = modeling_flash_attention_utils
    monkeypatch.setattr(modeling, "_lazy_imports", found)
    monkeypatch.setattr(modeling, "_loaded_implementation", None)
    return names


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def exact_softmax(monkeypatch) -> None:
    """Some stock models compute softmax in float32; in here, never with fewer digits than its input has."""
    softmax = torch.nn.functional.softmax

    def compute(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
        return softmax(x, dim, dtype=x.dtype if x.dtype == torch.float64 else dtype)

    monkeypatch.setattr(torch.nn.functional, "softmax", compute)
