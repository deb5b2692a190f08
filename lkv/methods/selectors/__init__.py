"""Selectors: which tokens of a head are worth keeping."""

from lkv.methods.selectors.base import ArrivedEntries, GivenScores, Selector, check_numbers, check_shape, not_numbers
from lkv.methods.selectors.criticalkv import CriticalKV
from lkv.methods.selectors.expected_attention import ExpectedAttention
from lkv.methods.selectors.h2o import H2O
from lkv.methods.selectors.keydiff import KeyDiff
from lkv.methods.selectors.knorm import Knorm
from lkv.methods.selectors.learned import LearnedScores
from lkv.methods.selectors.random import Random
from lkv.methods.selectors.snapkv import SnapKV
from lkv.methods.selectors.streaming_llm import DuoWindow, StreamingLLM
from lkv.methods.selectors.tova import TOVA

__all__ = [
    "H2O", "TOVA", "ArrivedEntries", "CriticalKV", "DuoWindow", "ExpectedAttention", "GivenScores", "KeyDiff", "Knorm",
    "LearnedScores", "Random", "Selector", "SnapKV", "StreamingLLM", "check_numbers", "check_shape", "not_numbers",
]  # fmt: skip
