"""Text for training and fidelity: samples, sources, the packed mixture."""

from lkv.training.data.recipes import Mixture
from lkv.training.data.samples import Continuation, Sample, TokenizedSample, tokenize_sample

__all__ = ["Continuation", "Mixture", "Sample", "TokenizedSample", "tokenize_sample"]
