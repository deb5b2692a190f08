"""A prompt read once with the full cache: its k and v (and q) serve the distillation and every method compared."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lkv.errors import CacheError, UnsupportedModelError
from lkv.integrations.transformers.attention import evaluation_mode, patch_attention
from lkv.integrations.transformers.cache_layers import AttentionCacheLayer, BaseCache, SlidingWindowLayer
from lkv.integrations.transformers.rotation import PROBE_TOKENS, NoRotation, Rotation, variation
from lkv.integrations.transformers.spec import unwrap_model

_PROBE_TOLERANCE = 0.2


@dataclass(frozen=True)
class LayerKV:
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
        """`queries`. Raises CacheError where they were not recorded."""
        if self.queries is None:
            raise CacheError(
                "the prompt's queries were not recorded: declare reads_queries = True in the class of a selector that "
                "reads them, or call read_prompt with queries=True."
            )
        return self.queries

    @property
    def grouped_query(self) -> Tensor:
        """The queries by the KV head that they read, [B, H, Hq / H, T, d]."""
        return self.query.unflatten(1, (self.key.shape[1], -1))

    @property
    def required_rotation(self) -> Rotation:
        """`rotation`. Raises UnsupportedModelError where it is not known."""
        if self.rotation is None:
            raise UnsupportedModelError(
                "this policy or method undoes the model's rotary embedding, which LKV cannot do here; use a model such "
                "as Llama, Qwen2, Qwen3, Mistral or Phi-3, or a policy whose scorer reads k as cached and nothing else."
            )
        return self.rotation

    def select(self, rows: slice | Tensor, tokens: slice) -> "LayerKV":
        """The rows and tokens of it alone, as if they had been read by themselves from position 0 on."""
        queries = None if self.queries is None else self.queries[rows, :, tokens]
        return replace(self, key=self.key[rows, :, tokens], value=self.value[rows, :, tokens], queries=queries)


class PromptKV(list[LayerKV]):
    """The full-attention layers of a prompt that was read, in their order.

    `windows`: what the sliding layers hold of it, an entry a layer of the model with None for the others; empty where
    the model has none.
    """

    def __init__(self, layers: Iterable[LayerKV] = (), windows: Sequence[SlidingWindowLayer | None] = ()):
        super().__init__(layers)
        self.windows = tuple(windows)

    def continuation_layers(self, layers: Sequence[AttentionCacheLayer]) -> list[Any]:
        """The layers of a cache for what comes after it: `layers` for those of full attention, and copies of windows
        that any number of rows may go on from."""
        full = iter(layers)
        return [next(full) if window is None else window.fork() for window in self.windows or [None] * len(layers)]


def as_prompt_kv(prompt: Sequence[LayerKV]) -> PromptKV:
    """`prompt`, which may be a plain list where there are no sliding layers."""
    return prompt if isinstance(prompt, PromptKV) else PromptKV(prompt)


def to_fp32(x: Tensor) -> Tensor:
    """`x` in float32 or better: in 16 bits the scores of many tokens would be equal."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@torch.no_grad()
def read_prompt(model: Any, ids: Tensor, queries: bool | int = False) -> PromptKV:
    """What the layers of `model` hold after reading `ids` [B, T]; the output head is not computed.

    `queries`: whether to keep them, or how many of the last ones (all of a long prompt outweigh its k and v).
    """
    patched = patch_attention(model)
    layers = [
        _CapturingLayer(queries) if window is None else SlidingWindowLayer(window) for window in patched.sliding_windows
    ]
    unwrap_model(model).base_model(input_ids=ids, past_key_values=BaseCache(layers=[*layers]), use_cache=True)
    full = [layer.captured for layer in layers if isinstance(layer, _CapturingLayer)]
    sliding = [layer if isinstance(layer, SlidingWindowLayer) else None for layer in layers]
    turned = (replace(layer, rotation=turn) for layer, turn in zip(full, patched.rotations, strict=True))
    return PromptKV(turned, sliding if any(sliding) else ())


def query_rotations(model: Any, wanted_by: str) -> list[Rotation]:
    """The rotation of each full-attention layer, by which its queries can be turned back too.

    One token over and over has the same query everywhere before RoPE, in every layer: turned back it must too. Layers
    with another kind of RoPE than the model's module says, or that change q after it, would give wrong scores in
    silence. Seen once a model. Raises UnsupportedModelError, which names what it is `wanted_by`.
    """
    rotations = [rotation or Rotation(model) for rotation in patch_attention(model).rotations]
    if all(rotation.probed for rotation in rotations):
        return rotations
    token = model.config.get_text_config(decoder=True).vocab_size // 2
    with evaluation_mode(model):
        ids = torch.full((1, PROBE_TOKENS), token, device=model.device)
        layers = read_prompt(model, ids, queries=True)
    for rotation, layer in zip(rotations, layers, strict=True):
        rotated = to_fp32(layer.query)
        if isinstance(rotation, NoRotation):
            continue
        if not variation(rotation.unrotate(rotated)) <= _PROBE_TOLERANCE * variation(rotated):
            raise UnsupportedModelError(
                f"{type(model).__name__} rotates the queries of some layers in a way that {wanted_by} cannot undo; use "
                "a model with RoPE, such as Llama or Qwen3, or another method."
            )
    for rotation in rotations:
        rotation.probed = True
    return rotations


class FrozenPromptLayer(AttentionCacheLayer):
    """Behind one layer of a prompt already read: what a forward pass appends is not stored."""

    def __init__(self, prompt: LayerKV):
        super().__init__()
        self._prompt = prompt

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        return self._prompt.key.shape[2]


class _CapturingLayer(AttentionCacheLayer):
    captured: LayerKV

    def __init__(self, queries: bool | int):
        super().__init__()
        self._queries = queries

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._key = key_states
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        kept = query if self._queries else None
        if kept is not None and self._queries is not True:
            kept = query[:, :, -self._queries :].clone()  # a view would hold them all
        self.captured = LayerKV(self._key, value, scale, kept)
        return stock()
