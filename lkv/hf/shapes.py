"""The shape of a decoder from its configuration, and the FLOPs of a forward pass.

Does not import torch.
"""

from dataclasses import dataclass
from typing import Any

from lkv.errors import UnsupportedModelError


def layer_config(text: Any, layer: int) -> Any:
    """Return the configuration of one layer of a model whose layers differ (Gemma-4), else `text` itself."""
    return text.per_layer_config[layer] if getattr(text, "is_heterogeneous", False) else text


def attention_sizes(config: Any) -> tuple[int, int, int]:
    """Return the query heads, KV heads and head size in the configuration of one layer."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


@dataclass(frozen=True)
class Shape:
    """The shape of a standard decoder: grouped-query attention, a gated MLP, two norms a layer."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    positions: int
    query_norms: bool = False  # a norm over each head's queries and one over its keys, as in Qwen3
    biased: bool = False  # biases of the q, k and v projections, as in Qwen2

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """Return the shape in a transformers configuration.

        Raises:
            UnsupportedModelError: For a configuration that lacks a field.
        """
        text = config.get_text_config(decoder=True)
        try:
            kinds = getattr(text, "layer_types", None) or ()
            full = kinds.index("full_attention") if "full_attention" in kinds else 0
            heads, kv_heads, head_dim = attention_sizes(layer_config(text, full))
            return cls(
                layers=text.num_hidden_layers,
                hidden=text.hidden_size,
                intermediate=text.intermediate_size,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                vocabulary=text.vocab_size,
                tied=bool(getattr(config, "tie_word_embeddings", False)),
                positions=text.max_position_embeddings,
                query_norms=text.model_type.startswith("qwen3"),
                biased=text.model_type.startswith("qwen2") or bool(getattr(text, "attention_bias", False)),
            )
        except AttributeError as error:
            raise UnsupportedModelError(
                f"the model's configuration has no {error.name!r}, so its cost cannot be predicted; give a decoder of "
                "full attention such as Llama, Mistral or Qwen."
            ) from error

    @property
    def layer_parameters(self) -> int:
        """The number of weights of one layer."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * wide + 2 * narrow) + (wide + 2 * narrow if self.biased else 0)
        norms = 2 * self.hidden + (2 * self.head_dim if self.query_norms else 0)
        return attention + 3 * self.hidden * self.intermediate + norms

    @property
    def parameters(self) -> int:
        """The number of all weights; a tied embedding counts once."""
        embeddings = (1 if self.tied else 2) * self.hidden * self.vocabulary
        return self.layers * self.layer_parameters + self.hidden + embeddings

    def forward_flops(self, tokens: float, seen: float = 0.0, logits: float = 0.0) -> float:
        """Return the FLOPs of a causal forward pass over `tokens` tokens that follow `seen` cached ones.

        Two per weight and token, two attention products over all token pairs per head, and `logits` rows of logits.
        """
        linear = 2 * self.layers * self.layer_parameters * tokens + 2 * self.hidden * self.vocabulary * logits
        pairs = tokens * seen + tokens * (tokens + 1) / 2
        return linear + 4 * self.layers * self.heads * self.head_dim * pairs
