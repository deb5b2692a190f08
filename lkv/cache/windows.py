"""The sliding layers of a model, which are not evicted from."""

from collections.abc import Iterable

from torch import Tensor

from lkv.config import ModelSpec
from lkv.integrations.transformers.cache_layers import SlidingWindowLayer

_SIDES = ("sliding_k", "sliding_v")


class Windows:
    """The sliding layers of one cache, each of which holds its window of the last tokens whole."""

    def __init__(self, layers: Iterable[SlidingWindowLayer]):
        self.layers = list(layers)

    def __bool__(self) -> bool:
        return bool(self.layers)

    def activate_past_recording(self) -> None:
        """As of transformers' layers."""
        for layer in self.layers:
            layer.activate_past_recording()

    def state(self) -> dict[str, Tensor]:
        """k and v [B, H, T, d] of the last tokens in each layer, for `restore`."""
        states = enumerate(layer.state() for layer in self.layers)
        return {f"{name}.{index}": tensor for index, state in states for name, tensor in state.items()}

    def restore(self, state: dict[str, Tensor], tokens: int, spec: ModelSpec, like: Tensor) -> None:
        """Take up what `state` gave after `tokens` tokens of one text, on the device and in the dtype of `like`.

        Raises KeyError or ValueError for what no such layers of a model as `spec` says held.
        """
        if len(state) != len(_SIDES) * len(self.layers):
            raise ValueError(f"it has {len(state)} tensors of {len(self.layers)} sliding layers")
        for index, layer in enumerate(self.layers):
            shape = (1, spec.kv_heads, min(tokens, layer.sliding_window - 1), spec.head_dim)
            window = {name: state[f"{name}.{index}"] for name in _SIDES}
            if any(tuple(x.shape) != shape or not x.is_floating_point() for x in window.values()):
                raise ValueError(f"k and v of its sliding layer {index} are not {shape}")
            layer.restore(window, tokens, like)

    def fork(self) -> "Windows":
        """A copy that goes on independently."""
        return Windows(layer.fork() for layer in self.layers)

    def nbytes(self) -> int:
        """Bytes of the k and v held."""
        return sum(layer.nbytes() for layer in self.layers)
