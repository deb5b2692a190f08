"""Progress of the commands that read a text."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lkv.cli.options import log
from lkv.utils.durations import format_duration

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def show_reading(model: "PreTrainedModel", tokens: int, readings: float = 1.0, purpose: str = "") -> Iterator[None]:
    """Log what reading a text in the block costs, and show how much of it is read.

    Args:
        model: The model that reads.
        tokens: The tokens of the text.
        readings: The block's time, relative to one prefill of the text.
        purpose: The end of the logged sentence.
    """
    from lkv.hf.progress import estimate_reading_seconds, full_cache_nbytes, report_progress
    from lkv.utils.progress import ProgressBar

    form = "{desc} {percentage:3.0f}% |{bar:20}| {n:,.0f} of {total:,} tokens, {rate_fmt}, {remaining} left"
    bar = ProgressBar(total=tokens, desc="reading", unit=" tokens", bar_format=form, leave=False)

    def advance(count: float) -> None:
        bar.update(min(count, tokens - bar.n))  # a second pass over the text does not count

    duration = format_duration(readings * estimate_reading_seconds(model, tokens))
    size = full_cache_nbytes(model, tokens) / 1e6
    log(f"reading {tokens:,} tokens{purpose}: {duration}; the full KV cache takes {size:,.1f} MB")
    with bar, report_progress(model, advance):
        yield
