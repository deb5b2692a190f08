"""The memory that prompts need, predicted from a model's shape. Does not import torch."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from lkv.errors import UnsupportedModelError
from lkv.hf.positions import attention_window
from lkv.hf.shapes import Shape

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # as configurations name them


def check_uniform(config: Any) -> None:
    """Refuse sliding windows and mixtures of experts, whose bytes do not follow from the shape alone."""
    text = config.get_text_config(decoder=True)
    # Without a list of kinds a window holds for all layers.
    kinds = set(getattr(text, "layer_types", None) or ["sliding_attention"])
    windows = kinds - {"full_attention"} - (set() if attention_window(text) else {"sliding_attention"})
    if windows or any(getattr(text, name, None) for name in _EXPERTS):
        reason = "layers with a window" if windows else "a mixture of experts"
        raise UnsupportedModelError(
            f"{text.model_type} has {reason}, and its memory does not follow from the shape alone; measure it, "
            "without --dry-run."
        )


def kv_bytes(shape: Shape, tokens: float, element: int) -> float:
    """Return the bytes of k and v of `tokens` tokens in every head, with `element` bytes a number."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * tokens * element


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes while and after a prompt is read."""

    weights: int
    kv_full: float  # k and v of all of the prompt
    kv_kept: float  # what a method keeps of them
    activations: float  # of the layer that needs most
    layers: int

    @property
    def peak_full(self) -> float:
        """The most at any time with the full cache: in its last layer."""
        return self.weights + self.kv_full + self.activations

    @property
    def peak_kept(self) -> float:
        """The most with eviction layer by layer: what is kept of all layers, and one whole layer's k and v."""
        return self.weights + self.kv_kept + self.kv_full / self.layers + self.activations


def predict_memory(
    shape: Shape, tokens: int, retention: float = 0.15, element: int = 2, batch: int = 1, chunk: int | None = None
) -> MemoryPrediction:
    """Predict the bytes that prompts need.

    Tensors are counted. Not counted are what kernels allocate for themselves and a method's scores, a few percent on
    long prompts, and the gaps of PyTorch's caching allocator on a GPU (`experiments/prompt_memory.py` simulates them).

    Args:
        shape: The model's shape.
        tokens: Tokens of a prompt.
        retention: Share of the KV entries to keep.
        element: Bytes of a number.
        batch: Prompts read together.
        chunk: Tokens that are read at a time (None: all at once).
    """
    together = batch * min(tokens, chunk or tokens)
    # The model's code holds the embeddings and each layer's input to the end. Beside them: the residual stream and the
    # output of its norm, with the MLP's gate, its other half and their product;
    mlp = 4 * shape.hidden + 3 * shape.intermediate
    # or the output of the norm, queries before and after rotation, keys and values with their copies, and the result.
    attention = 3 * shape.hidden + 3 * shape.heads * shape.head_dim + 4 * shape.kv_heads * shape.head_dim
    full = kv_bytes(shape, batch * tokens, element)
    activations = float(max(mlp, attention) * together * element)
    return MemoryPrediction(shape.parameters * element, full, full * retention, activations, shape.layers)


def longest_prompt(shape: Shape, memory: float, is_evicted: bool, **settings: Any) -> int:
    """The most tokens of a prompt that fit into `memory` bytes; 0 where the weights alone are more.

    Args:
        shape: The model's shape.
        memory: Bytes.
        is_evicted: Whether eviction runs layer by layer.
        settings: Those of `predict_memory`.
    """

    def overflows(tokens: int) -> bool:
        predicted = predict_memory(shape, tokens, **settings)
        return (predicted.peak_kept if is_evicted else predicted.peak_full) > memory

    limit = 1
    while not overflows(limit):
        limit *= 2
    return bisect_left(range(limit), True, lo=limit // 2, key=overflows) - 1 if limit > 1 else 0
