"""How much memory a prompt needs, from the model's shape alone. Nothing is run; does not import torch."""

from bisect import bisect_left
from dataclasses import dataclass

from lkv.models.shapes import Shape


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes while and after a prompt is read.

    Attributes:
        tokens: The prompt's length.
        weights: The model's.
        kv_full: k and v of all of the prompt.
        kv_kept: What a method keeps of them.
        activations: Of the layer that needs most.
        layers: The model's number of layers.
    """

    tokens: int
    weights: int
    kv_full: float
    kv_kept: float
    activations: float
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
    long prompts, and the gaps of PyTorch's caching allocator on a GPU (`benchmarks/prompt_memory.py` simulates them).

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
    full = shape.kv_bytes(batch * tokens, element)
    activations = float(max(mlp, attention) * together * element)
    return MemoryPrediction(tokens, shape.parameters * element, full, full * retention, activations, shape.layers)


def longest_prompt(shape: Shape, memory: float, kept: bool, **settings: float) -> int:
    """The most tokens of a prompt that fit into `memory` bytes; 0 where the weights alone are more.

    Args:
        shape: The model's shape.
        memory: Bytes.
        kept: Whether to evict layer by layer.
        settings: Those of `predict_memory`.
    """

    def fits(tokens: int) -> bool:
        predicted = predict_memory(shape, tokens, **settings)  # type: ignore[arg-type]
        return (predicted.peak_kept if kept else predicted.peak_full) <= memory

    if not fits(1):
        return 0
    limit = 2
    while fits(limit):
        limit *= 2
    return bisect_left(range(limit), True, lo=limit // 2, key=lambda tokens: not fits(tokens)) - 1
