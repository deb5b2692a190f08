"""What must hold when a forward pass goes through a cache."""

from collections.abc import Sequence
from typing import Any

from lkv.cache.layer import RaggedLayer
from lkv.errors import CacheError, PromptError
from lkv.integrations.transformers.cache_layers import SlidingWindowLayer


def check_pass(
    layers: Sequence[RaggedLayer], windows: Sequence[SlidingWindowLayer], rows: int, tokens: int, limit: int
) -> None:
    """Raise CacheError or PromptError unless a pass with `rows` rows, after which the text has `tokens` tokens, can go
    through all of `layers` and `windows`; `limit`: what the model can read."""
    lengths = {layer.get_seq_length() for layer in (*layers, *windows)}
    if len(lengths) > 1 or len({layer.prompt_length for layer in layers}) > 1:
        mend = "call rewind() if the prompt was complete, else reset() and read the prompt again"
        if windows:
            mend = "go on with a fork() made before, or reset() and read the prompt again"
        raise CacheError(f"an interrupted forward pass left the layers of this cache unequal; {mend}.")
    held = len(layers[0].kept_counts)
    if held and rows != held:
        raise CacheError(
            f"this cache holds {held} rows, but {rows} were given; call batch_repeat_interleave(n) for n sequences "
            "from each compressed prompt, or make a new cache for other prompts."
        )
    if tokens > limit:
        raise PromptError(
            f"the text would reach {tokens} tokens, but the model reads at most {limit}; "
            "shorten it, or generate fewer tokens."
        )


def check_attended(layer: Any) -> None:
    """Raise CacheError where `layer` of a cache, an evicting or another one, waits for its attention still."""
    if isinstance(layer, RaggedLayer) and layer.pending_key is not None:
        raise CacheError(
            "the model computed attention without LKV: it was never patched, or its attention implementation was set "
            "anew; call lkv.patch_attention(model), then continue after cache.rewind(), or after cache.reset() if the "
            "prompt was being read."
        )
