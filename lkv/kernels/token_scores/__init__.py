"""LKV-T's score of a token (Sec. 3.4): content, and the terms that a policy may add to it."""

from lkv.kernels.token_scores.api import (
    ContentWeights,
    ExpectedAttentionWeights,
    PositionWeights,
    TokenScoreWeights,
    content_scores,
    expected_attention_scores,
    scores_at_eviction,
    scores_in_blocks,
    scores_on_arrival,
)

__all__ = [
    "ContentWeights",
    "ExpectedAttentionWeights",
    "PositionWeights",
    "TokenScoreWeights",
    "content_scores",
    "expected_attention_scores",
    "scores_at_eviction",
    "scores_in_blocks",
    "scores_on_arrival",
]  # fmt: skip
