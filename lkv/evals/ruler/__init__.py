"""RULER's 13 tasks (Hsieh et al. 2024) at any length, for any tokenizer."""

from lkv.evals.ruler.definitions import TASKS
from lkv.evals.ruler.examples import check_sources, make_examples
from lkv.evals.ruler.sources import Sources

__all__ = ["TASKS", "Sources", "check_sources", "make_examples"]
