"""Checks before a forward pass of a `RaggedCache`: its layers are in step, and the model can read the text."""

from collections.abc import Sequence
from typing import Any

from lkv.cache.layer import RaggedLayer
from lkv.errors import CacheError, PromptError
from lkv.hf.model_spec import ModelSpec
from lkv.hf.positions import check_frequencies
from lkv.hf.state import NOT_PATCHED


def check_attended(layer: Any) -> None:
    """Raise CacheError where no attention was computed over the last keys of `layer`."""
    if isinstance(layer, RaggedLayer) and layer.pending_key is not None:
        raise CacheError(NOT_PATCHED)


def check_pass(layers: Sequence[Any], rows: int, tokens: int, spec: ModelSpec) -> None:
    """Check a forward pass of `rows` rows over a cache of `layers`, after which the text has `tokens` tokens.

    Raises CacheError for layers left unequal by an interrupted pass and for other rows than those that were read,
    PromptError for a text that the model cannot read.
    """
    ragged = [layer for layer in layers if isinstance(layer, RaggedLayer)]
    lengths = {layer.get_seq_length() for layer in layers}
    if len(lengths) > 1 or len({layer.prompt_length for layer in ragged}) > 1:
        remedy = "call rewind() if the prompt was complete, else reset() and read the prompt again"
        if len(ragged) < len(layers):
            remedy = "continue from a fork() made before, or reset() and read the prompt again"
        raise CacheError(f"an interrupted forward pass left the layers of this cache unequal; {remedy}.")
    own_rows = len(ragged[0].lens)
    if own_rows and rows != own_rows:
        raise CacheError(
            f"this cache has {own_rows} rows, but {rows} were given; call batch_repeat_interleave(n) for n "
            "sequences from each compressed prompt, or make a new cache for other prompts."
        )
    if tokens > spec.max_positions:
        raise PromptError(
            f"the text would reach {tokens} tokens, but the model reads at most {spec.max_positions}; "
            "shorten it, or generate fewer tokens."
        )
    check_frequencies(ragged[0].model_config, ragged[0].get_seq_length(), tokens)
