"""Selectors: which tokens of a head are worth keeping."""

from lkv.methods.selection.base import Arrived, GivenScores, Selector, check_numbers, check_shape, not_numbers
from lkv.methods.selection.criticalkv import CriticalKV
from lkv.methods.selection.expected_attention import ExpectedAttention
from lkv.methods.selection.h2o import H2O
from lkv.methods.selection.keydiff import KeyDiff
from lkv.methods.selection.knorm import Knorm
from lkv.methods.selection.learned import LearnedScores
from lkv.methods.selection.random import Random
from lkv.methods.selection.snapkv import SnapKV
from lkv.methods.selection.streaming_llm import DuoWindow, StreamingLLM
from lkv.methods.selection.tova import TOVA

__all__ = [
    "H2O", "TOVA", "Arrived", "CriticalKV", "DuoWindow", "ExpectedAttention", "GivenScores", "KeyDiff", "Knorm",
    "LearnedScores", "Random", "Selector", "SnapKV", "StreamingLLM", "check_numbers", "check_shape", "not_numbers",
]  # fmt: skip
