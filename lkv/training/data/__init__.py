"""Text for training and fidelity: samples, sources, the packed mixture."""

from lkv.training.data.mixture import Mixture
from lkv.training.data.sample import Continuation, Sample, TokenizedSample, tokenize

__all__ = ["Continuation", "Mixture", "Sample", "TokenizedSample", "tokenize"]
