"""RULER's 13 tasks (Hsieh et al. 2024) at any length, for any tokenizer."""

from lkv.evaluation.ruler.examples import Sources, check_sources, check_task, make_examples
from lkv.evaluation.ruler.tasks import TASKS

__all__ = ["TASKS", "Sources", "check_sources", "check_task", "make_examples"]
