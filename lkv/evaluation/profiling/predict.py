"""What a prompt will need of a memory, from the model's shape alone: nothing is made or run; no torch here."""

from dataclasses import dataclass

from lkv.models.shapes import Shape


@dataclass(frozen=True)
class Prediction:
    """Bytes while and after a prompt of `tokens` tokens is read: the weights, k and v of all of it, what a method keeps
    of them, and the activations of the layer that needs most."""

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
) -> Prediction:
    """The bytes that `batch` prompts of `tokens` tokens need, with `element` bytes a number.

    `chunk`: tokens that are read at a time (None: all at once). Tensors are counted: what kernels take for themselves
    and a method's scores are not in it, a few percent on long prompts, and neither are the gaps that PyTorch's caching
    allocator leaves on a GPU (`benchmarks/prompt_memory.py` plays them through).
    """
    together = batch * min(tokens, chunk or tokens)
    # The model's code holds the embeddings and each layer's input to the end. Beside them: the residual stream and what
    # its norm gives, with the MLP's gate, its other half and their product;
    mlp = 4 * shape.hidden + 3 * shape.intermediate
    # or what the norm gives, queries before and after rotation, keys and values with their copies, and the result.
    attention = 3 * shape.hidden + 3 * shape.heads * shape.head_dim + 4 * shape.kv_heads * shape.head_dim
    full = shape.kv_bytes(batch * tokens, element)
    return Prediction(
        tokens=tokens,
        weights=shape.parameters * element,
        kv_full=full,
        kv_kept=full * retention,
        activations=float(max(mlp, attention) * together * element),
        layers=shape.layers,
    )


def longest_prompt(shape: Shape, memory: float, kept: bool, **settings: float) -> int:
    """The most tokens of a prompt for which `memory` bytes suffice, evicting layer by layer where `kept`; 0 where the
    weights alone are more. `settings` are those of `predict`."""

    def fits(tokens: int) -> bool:
        predicted = predict_memory(shape, tokens, **settings)  # type: ignore[arg-type]
        return (predicted.peak_kept if kept else predicted.peak_full) <= memory

    if not fits(1):
        return 0
    good, bad = 1, 2
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
