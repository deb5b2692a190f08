"""The numbered training and held-out samples of a run of `lkv fit`."""

from typing import TYPE_CHECKING

from lkv.errors import DataError
from lkv.training.config import TrainingConfig
from lkv.training.data.mixture import Mixture
from lkv.training.data.packing import Lengths
from lkv.training.data.samples import TokenizedSample
from lkv.training.datasets import draw_sample
from lkv.training.loop import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_CONTEXT = 1000  # number of the first sample of the distillation: those before are read by the other stages
_BATCHES_BY_LENGTH = 8  # drawn together and sorted by length


class FitSamples:
    """Draws the samples of each stage.

    Args:
        texts: The data of the run.
        tokenizer: The model's tokenizer.
        config: The settings.
        lengths: The context lengths of the distillation in tokens.
    """

    def __init__(self, texts: Mixture, tokenizer: "PreTrainedTokenizerBase", config: TrainingConfig, lengths: Lengths):
        self._tokenizer, self._config, self._longest = tokenizer, config, lengths.most
        self.training = texts.with_lengths(Lengths(config.min_tokens, config.max_tokens))
        self.held_out = self.training.held_out(config.seed)
        self._distilled = texts.with_lengths(lengths)
        self._batches: list[Batch] = []

    def draw_training(self, start: int, count: int) -> list[TokenizedSample]:
        """Draw `count` training samples, from number `start` on."""
        return self._draw(self.training, start, count, self._config.max_tokens)

    def draw_held_out(self, start: int, count: int, longest: int) -> list[TokenizedSample]:
        """Draw `count` held-out samples of at most `longest` tokens, without very short and so uninformative ones."""
        return self._draw(self.held_out, start, count, longest, min(self._config.min_tokens, longest) // 2)

    def draw_batch(self, step: int) -> Batch:
        """Draw numbered contexts of similar length for a step, so that threads finish together."""
        batch, position = self._config.batch, step % _BATCHES_BY_LENGTH
        if not (position and self._batches):
            first = FIRST_CONTEXT + (step - position) * batch
            numbers = range(first, first + _BATCHES_BY_LENGTH * batch)
            drawn = [(number, self._sample(self._distilled, number, self._longest)) for number in numbers]
            drawn.sort(key=lambda pair: len(pair[1].context))
            batches = (drawn[start : start + batch] for start in range(0, len(drawn), batch))
            self._batches = sorted(batches, key=lambda pairs: min(number for number, _ in pairs))
        return self._batches[position]

    def _sample(self, data: Mixture, number: int, longest: int) -> TokenizedSample:
        return draw_sample(data, number, self._tokenizer, self._config, longest)

    def _draw(self, data: Mixture, start: int, count: int, longest: int, shortest: int = 0) -> list[TokenizedSample]:
        """Draw `count` samples with continuations, of at most `longest` tokens, from number `start` on.

        If too few have `shortest` tokens or more, the longest of the others are added.
        """
        samples: list[TokenizedSample] = []
        short: list[TokenizedSample] = []
        for number in range(start, start + 20 * count):
            sample = self._sample(data, number, longest)
            if sample.continuations:
                (samples if len(sample.context) >= shortest else short).append(sample)
            if len(samples) == count:
                break
        if not samples and not short:
            raise DataError("the texts are too short to learn from; give longer ones.")
        short.sort(key=lambda sample: len(sample.context), reverse=True)
        return samples + short[: count - len(samples)]
