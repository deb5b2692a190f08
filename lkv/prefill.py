"""A prompt read once with the full cache: its k and v (and q) serve the distillation and every method compared."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lkv.errors import UnsupportedModelError
from lkv.host.attention import AttachedModel, attach
from lkv.host.hooks import Cache, HookedLayer
from lkv.host.rotation import Rotation


@dataclass(frozen=True)
class PromptLayer:
    """One layer of a prompt, for selectors to read: k and v [B, H, T, d] after RoPE, the attention scale and, where
    they were asked for, the `queries` [B, Hq, T, d] or the last of them.

    The tokens stand at positions `start` to `start + T - 1` of a text of `length` tokens (it ends with them unless
    given); `rotation` is the model's RoPE, None where it cannot be undone.
    """

    key: Tensor
    value: Tensor
    scale: float
    queries: Tensor | None = None
    start: int = 0
    length: int | None = None
    rotation: Rotation | None = None

    @property
    def end(self) -> int:
        """The position that follows the text."""
        return self.start + self.key.shape[2] if self.length is None else self.length

    @property
    def query(self) -> Tensor:
        """`queries`. Raises ValueError where they were not asked for."""
        if self.queries is None:
            raise ValueError(
                "this selector reads the queries, which are not here: declare reads_queries = True in its class, or "
                "call read_prompt with queries=True."
            )
        return self.queries

    @property
    def grouped_query(self) -> Tensor:
        """The queries by the KV head that they read, [B, H, Hq / H, T, d]."""
        return self.query.unflatten(1, (self.key.shape[1], -1))

    @property
    def known_rotation(self) -> Rotation:
        """`rotation`. Raises UnsupportedModelError where it is not known."""
        if self.rotation is None:
            raise UnsupportedModelError(
                "this policy or method undoes the model's rotary embedding, which LKV cannot do here; use a model such "
                "as Llama, Qwen2, Qwen3, Mistral or Phi-3, or a policy whose scorer reads k as cached and nothing else."
            )
        return self.rotation

    def part(self, rows: slice | Tensor, tokens: slice) -> "PromptLayer":
        """The rows and tokens of it alone, as if they had been read by themselves from position 0 on."""
        queries = None if self.queries is None else self.queries[rows, :, tokens]
        return replace(self, key=self.key[rows, :, tokens], value=self.value[rows, :, tokens], queries=queries)


def precise(x: Tensor) -> Tensor:
    """`x` in float32 or better: in 16 bits the scores of many tokens would be equal."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def read_prompt(model: Any, ids: Tensor, queries: bool | int = False) -> list[PromptLayer]:
    """What the layers of `model` hold after reading `ids` [B, T]; the output head is not computed.

    `queries`: whether to keep them, or how many of the last ones (all of a long prompt outweigh its k and v).
    Raises UnsupportedModelError for a model with sliding layers.
    """
    attached = attach(model)
    if any(window is not None for window in attached.windows):
        raise UnsupportedModelError(
            f"{attached.spec.architecture} has sliding layers: training and comparing methods work with models whose "
            "layers all have full attention; compress() and RaggedCache work with this one."
        )
    return _captured(model, attached, ids, queries)


def read_full_layers(model: Any, ids: Tensor, queries: bool | int = False) -> list[PromptLayer]:
    """What the full-attention layers of `model` hold after reading `ids` [B, T]."""
    return _captured(model, attach(model), ids, queries)


@torch.no_grad()
def _captured(model: Any, attached: AttachedModel, ids: Tensor, queries: bool | int) -> list[PromptLayer]:
    layers = [_CapturingLayer(queries) for _ in attached.windows]
    model.base_model(input_ids=ids, past_key_values=Cache(layers=[*layers]), use_cache=True)
    full = [layer.captured for layer, window in zip(layers, attached.windows, strict=True) if window is None]
    return [replace(layer, rotation=attached.rotation) for layer in full]


class FrozenLayer(HookedLayer):
    """Behind one layer of a prompt already read: what a forward pass appends is not stored."""

    def __init__(self, prompt: PromptLayer):
        super().__init__()
        self._prompt = prompt

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.tag(key_states), value_states

    def get_seq_length(self, *args: Any) -> int:
        return self._prompt.key.shape[2]


class _CapturingLayer(HookedLayer):
    captured: PromptLayer

    def __init__(self, queries: bool | int):
        super().__init__()
        self._queries = queries

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._key = key_states
        return self.tag(key_states), value_states

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        kept = query if self._queries else None
        if kept is not None and self._queries is not True:
            kept = query[:, :, -self._queries :].clone()  # a view would hold them all
        self.captured = PromptLayer(self._key, value, scale, kept)
        return stock()
