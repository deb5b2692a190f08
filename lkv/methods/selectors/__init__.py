"""Selectors: which tokens of a head are worth keeping. One file a method; each class registers its own name."""

from lkv.methods.selectors.base import (
    ArrivedEntries,
    PrecomputedScores,
    Selector,
    check_numbers,
    check_shape,
    not_numbers,
)
from lkv.methods.selectors.criticalkv import CriticalKV
from lkv.methods.selectors.expected_attention import ExpectedAttention
from lkv.methods.selectors.h2o import H2O
from lkv.methods.selectors.keydiff import KeyDiff
from lkv.methods.selectors.knorm import Knorm
from lkv.methods.selectors.kvzip import KVzip
from lkv.methods.selectors.lkv_t import LearnedScores
from lkv.methods.selectors.random import Random
from lkv.methods.selectors.snapkv import SnapKV
from lkv.methods.selectors.streaming_llm import DuoWindow, StreamingLLM
from lkv.methods.selectors.tova import TOVA

__all__ = [
    "H2O",
    "TOVA",
    "ArrivedEntries",
    "CriticalKV",
    "DuoWindow",
    "ExpectedAttention",
    "KVzip",
    "KeyDiff",
    "Knorm",
    "LearnedScores",
    "PrecomputedScores",
    "Random",
    "Selector",
    "SnapKV",
    "StreamingLLM",
    "check_numbers",
    "check_shape",
    "not_numbers",
]
