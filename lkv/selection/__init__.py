"""Selectors: which tokens of a head are worth keeping."""

from lkv.selection.base import GivenScores, Selector
from lkv.selection.learned import LearnedScores
from lkv.selection.snapkv import SnapKV

__all__ = ["GivenScores", "LearnedScores", "Selector", "SnapKV"]
