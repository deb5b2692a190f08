"""Selectors: which tokens of a head are worth keeping."""

from lkv.selection.base import GivenScores, Selector
from lkv.selection.criticalkv import CriticalKV
from lkv.selection.expected_attention import ExpectedAttention
from lkv.selection.h2o import H2O
from lkv.selection.keydiff import KeyDiff
from lkv.selection.knorm import Knorm
from lkv.selection.learned import LearnedScores
from lkv.selection.random import Random
from lkv.selection.snapkv import SnapKV
from lkv.selection.streaming_llm import DuoWindow, StreamingLLM
from lkv.selection.tova import TOVA

__all__ = [
    "H2O", "TOVA", "CriticalKV", "DuoWindow", "ExpectedAttention", "GivenScores", "KeyDiff", "Knorm", "LearnedScores",
    "Random", "Selector", "SnapKV", "StreamingLLM",
]  # fmt: skip
