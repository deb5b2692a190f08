"""Limits on the text length: the model's maximum, its sliding windows and its RoPE scaling. Does not import torch.

Every function takes the text configuration of a model.
"""

from typing import TYPE_CHECKING, Any

from lkv.errors import PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def max_positions(config: "PreTrainedConfig") -> Any:
    """Return the longest text, in tokens, that the model can read; None if its configuration does not state it.

    YaRN extends it without changing `max_position_embeddings`.
    """
    limit, rope = getattr(config, "max_position_embeddings", None), rope_settings(config)
    if isinstance(limit, int) and rope.get("rope_type") == "yarn" and rope.get("factor"):
        return max(limit, int(rope["factor"] * rope.get("original_max_position_embeddings", limit)))
    return limit


def attention_window(config: "PreTrainedConfig") -> int | None:
    """Return the window of the model's sliding layers; None without one, or if it is as long as any text."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    limit = max_positions(config)
    return None if window and isinstance(limit, int) and window >= limit else window


def frequency_change(config: "PreTrainedConfig") -> int | None:
    """Return the length in tokens beyond which LongRoPE switches frequencies; None for other types of RoPE."""
    rope = rope_settings(config)
    return rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None


def check_frequencies(config: "PreTrainedConfig", read: int, tokens: int) -> None:
    """Raise PromptError if growing a text from `read` to `tokens` tokens makes LongRoPE switch frequencies."""
    change = frequency_change(config)
    if change is not None and 0 < read <= change < tokens:
        raise PromptError(
            f"beyond {change} tokens this model's rotary embedding (LongRoPE) changes, and {read} of {tokens} tokens "
            "would have been read before that; read a longer text at once (without chunk or streaming), or end it "
            "there."
        )


def rope_settings(config: "PreTrainedConfig") -> dict[str, Any]:
    """Return the settings of the rotary embedding of full-attention layers."""
    settings = getattr(config, "rope_parameters", None) or {}
    return settings.get("full_attention") or settings
