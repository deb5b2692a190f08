"""Selectors, which rank the tokens of each head. Each class registers its own name."""

from lkv.methods.base import PrecomputedScores, Selector
from lkv.methods.selectors.attention import H2O, RKV, TOVA, CriticalKV, ExpectedAttention, SnapKV
from lkv.methods.selectors.kvzip import KVzip
from lkv.methods.selectors.lkv_t import LearnedScores
from lkv.methods.selectors.without_queries import DuoWindow, KeyDiff, Knorm, Random, StreamingLLM

__all__ = [
    "H2O", "RKV", "TOVA", "CriticalKV", "DuoWindow", "ExpectedAttention", "KVzip", "KeyDiff", "Knorm", "LearnedScores",
    "PrecomputedScores", "Random", "Selector", "SnapKV", "StreamingLLM",
]  # fmt: skip
