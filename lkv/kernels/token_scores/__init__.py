"""LKV-T's score of a token (Sec. 3.4): content, and the terms that a policy may add to it."""

from lkv.kernels.token_scores.api import (
    Attention,
    Content,
    Position,
    Scorer,
    at_eviction,
    attention_scores,
    content_scores,
    on_arrival,
    scores_in_blocks,
)

__all__ = [
    "Attention", "Content", "Position", "Scorer", "at_eviction", "attention_scores", "content_scores", "on_arrival",
    "scores_in_blocks",
]  # fmt: skip
