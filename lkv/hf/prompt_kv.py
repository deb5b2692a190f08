"""A prompt prefilled once with the full cache: its k, v and queries serve training and all compared methods."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from lkv.errors import CacheError, UnsupportedModelError
from lkv.hf.attention import patch_attention
from lkv.hf.base_cache import BaseCache
from lkv.hf.cache_argument import pass_arguments
from lkv.hf.cache_layers import AttentionCacheLayer
from lkv.hf.masks import Mask
from lkv.hf.other_layers import FULL, LayerKind, OtherLayer, join_layers, make_layers
from lkv.hf.position_hook import take_image_positions
from lkv.hf.rotation import NoRotation, Rotation, equal_tokens, variation
from lkv.hf.spec import unwrap_model
from lkv.kernels.softcap import cap_scores

_PROBE_TOLERANCE = 0.2
_IMAGE_INPUTS = ("inputs_embeds", "visual_pos_masks", "deepstack_visual_embeds")  # of a decoder


@dataclass(frozen=True)
class LayerKV:
    """One full-attention layer of a prompt, as selectors read it.

    Attributes:
        key: k after RoPE, [B, H, T, d].
        value: v, [B, H, T, dv].
        scale: The attention scaling factor.
        queries: q after RoPE, [B, Hq, T, d], or of the last tokens only; None if they were not requested.
        start: The position of the first token.
        length: The number of tokens of the text; by default it ends with these tokens.
        rotation: The layer's RoPE; None if LKV cannot undo it.
        sinks: The layer's attention sinks [Hq], one more logit of each query head; None without them.
        softcap: The cap of attention scores; None without one.
    """

    key: Tensor
    value: Tensor
    scale: float
    queries: Tensor | None = None
    start: int = 0
    length: int | None = None
    rotation: Rotation | None = None
    sinks: Tensor | None = None
    softcap: float | None = None

    @property
    def end(self) -> int:
        """The position after the text."""
        return self.start + self.key.shape[2] if self.length is None else self.length

    @property
    def query(self) -> Tensor:
        """`queries`. Raises CacheError if they are None."""
        if self.queries is None:
            raise CacheError(
                "this method reads the queries, which are not here: call read_prompt with queries=True, or declare "
                "reads_queries = True in the class of a selector of your own."
            )
        return self.queries

    @property
    def grouped_query(self) -> Tensor:
        """The queries grouped by KV head, [B, H, Hq / H, T, d]."""
        return self.query.unflatten(1, (self.key.shape[1], -1))

    @property
    def required_rotation(self) -> Rotation:
        """`rotation`. Raises UnsupportedModelError if it is None."""
        if self.rotation is None:
            raise UnsupportedModelError(
                "this policy or method undoes the model's rotary embedding, which LKV cannot do here; use a model such "
                "as Llama, Qwen2, Qwen3, Mistral or Phi-3, or a policy whose scorer reads k as cached and nothing else."
            )
        return self.rotation

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        """Compute attention logits of queries [..., n, d] over keys [..., T, d], without sinks: [..., n, T]."""
        return cap_scores(query * self.scale @ key.transpose(-1, -2), self.softcap)

    def softmax(self, logits: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Compute attention weights from logits [..., H, G, n, T]; with sinks they sum to less than 1."""
        if self.sinks is None:
            return torch.softmax(logits, -1, dtype=dtype)
        sinks = self.sinks.to(logits).view(logits.shape[-4], -1, 1, 1).expand(*logits.shape[:-1], 1)
        return torch.softmax(torch.cat([logits, sinks], -1), -1, dtype=dtype)[..., :-1]

    def select(self, rows: slice | Tensor, tokens: slice) -> "LayerKV":
        """Return the given rows and tokens as a prompt of their own that starts at position 0."""
        queries = self.queries
        if queries is not None:  # possibly of the last tokens only
            start, stop, step = tokens.indices(self.key.shape[2])
            without = self.key.shape[2] - queries.shape[2]
            queries = queries[rows, :, max(0, start - without) : max(0, stop - without) : step]
        rotation = None if self.rotation is None else self.rotation.select(rows, tokens.start or 0)
        return replace(
            self, key=self.key[rows, :, tokens], value=self.value[rows, :, tokens], queries=queries, rotation=rotation
        )


def join_queries(prompt: LayerKV, *others: Tensor) -> LayerKV:
    """Return `prompt` with the queries [B, Hq, T, d] of later layers that read its k and v beside its own.

    Each KV head has the query heads of its own layer, then those of the others.
    """
    heads = prompt.key.shape[1]
    queries = torch.cat([query.unflatten(1, (heads, -1)) for query in (prompt.query, *others)], 2)
    return replace(prompt, queries=queries.flatten(1, 2))


class PromptKV(list[LayerKV]):
    """The full-attention layers of a prompt, in order.

    Attributes:
        kinds: The kind of each decoder layer; empty for a model with full attention only.
        others: The other layers of the cache, by index.
        positions: The positions [3, B, T] of a prompt with images in a model with multimodal RoPE, else None.
        images: What the decoder read of a prompt with images: `inputs_embeds` [B, T, hidden] and, in models with
            DeepStack, the features that it adds to later layers. Else empty.
    """

    positions: Tensor | None = None
    images: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        layers: Iterable[LayerKV] = (),
        kinds: Sequence[LayerKind] = (),
        others: dict[int, OtherLayer] | None = None,
    ):
        super().__init__(layers)
        self.kinds, self.others = kinds, others or {}

    def continuation_layers(self, layers: Sequence[Any], rows: int = 1) -> tuple[list[Any], dict[int, OtherLayer]]:
        """Return the layers of a cache that continues the prompt in `rows` rows, as `make_layers` returns them.

        These are `layers` for full attention, and copies of the others.
        """
        others = {index: other.fork() for index, other in self.others.items()}
        if rows > 1:
            for other in others.values():
                other.reorder_cache(torch.zeros(rows, dtype=torch.long))
        return join_layers(self.kinds or [LayerKind(FULL)] * len(layers), layers, others), others


def as_prompt_kv(prompt: Sequence[LayerKV]) -> PromptKV:
    """Return `prompt` as a `PromptKV`; a plain list means a model with full attention only."""
    return prompt if isinstance(prompt, PromptKV) else PromptKV(prompt)


def to_fp32(x: Tensor) -> Tensor:
    """Convert `x` to at least float32: in 16 bits many tokens would have equal scores."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@torch.no_grad()
def read_prompt(
    model: PreTrainedModel, ids: Tensor, queries: bool | int = False, images: dict[str, Tensor] | None = None
) -> PromptKV:
    """Prefill a prompt with the full cache, without computing the output head.

    Args:
        model: The model.
        ids: Token ids, [B, T].
        queries: Whether to keep the queries, or the number of last queries to keep (all queries of a prompt take more
            memory than its k and v).
        images: What the model's processor returned with the ids, such as `pixel_values`.

    Returns:
        k, v and queries of every full-attention layer.
    """
    patched = patch_attention(model)
    full = [_CapturingLayer(queries) for _ in patched.rotations]
    layers, others = make_layers(patched.kinds, full)
    decoded: dict[str, Any] = {}
    with _record_images(model, decoded) if images else nullcontext():
        arguments = pass_arguments(BaseCache(layers, others), ids, not images and patched.position_hook is not None)
        unwrap_model(model).base_model(input_ids=ids, **arguments, **images or {})
    positions = take_image_positions(*ids.shape) if patched.position_hook else None
    rotated = (
        replace(
            layer.captured, rotation=rotation and rotation.at_positions(positions), sinks=sinks, softcap=patched.softcap
        )
        for layer, rotation, sinks in zip(full, patched.rotations, patched.sinks, strict=True)
    )
    prompt = PromptKV(rotated, patched.kinds, others)
    prompt.positions, prompt.images = positions, decoded
    return prompt


def _record_images(model: PreTrainedModel, images: dict[str, Any]) -> RemovableHandle:
    """Store in `images` what the decoder reads of images, until the result is removed."""

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        images.update((name, kwargs[name]) for name in _IMAGE_INPUTS if kwargs.get(name) is not None)

    return unwrap_model(model).get_decoder().register_forward_pre_hook(record, with_kwargs=True)


def query_rotations(model: PreTrainedModel, wanted_by: str) -> list[Rotation]:
    """Return the rotation of each full-attention layer, verified for its queries.

    A model may rotate the queries of some layers differently, or change them after RoPE; scores would then be silently
    wrong. So the model reads tokens whose queries are all equal before RoPE: undoing RoPE must make them equal. This
    runs once a model. Raises UnsupportedModelError, naming the caller `wanted_by`.
    """
    rotations = [rotation or Rotation(model) for rotation in patch_attention(model).rotations]
    if all(rotation.is_verified for rotation in rotations):
        return rotations
    with equal_tokens(model) as ids:
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
        rotation.is_verified = True
    return rotations


class FrozenPromptLayer(AttentionCacheLayer):
    """A layer that attends to a stored prompt and does not store the tokens that follow."""

    def __init__(self, prompt: LayerKV):
        super().__init__()
        self._prompt = prompt

    def get_seq_length(self, *args: object) -> int:
        """Return the number of tokens of the prompt."""
        return self._prompt.key.shape[2]


def _alone(x: Tensor) -> Tensor:
    """Return `x`, copied if it is a view: a view would keep all tokens or the whole fused projection in memory."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


class _CapturingLayer(AttentionCacheLayer):
    """Keeps k, v and queries of one forward pass."""

    captured: LayerKV

    def __init__(self, queries: bool | int):
        super().__init__()
        self._queries = queries

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, model_attention: Callable[[], Tensor]
    ) -> Tensor:
        queries = query if self._queries else None
        if queries is not None and self._queries is not True:
            queries = queries[:, :, -self._queries :]
        self.captured = LayerKV(_alone(key), _alone(value), scale, None if queries is None else _alone(queries))
        return model_attention()

    def attend_again(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, model_attention: Callable[[], Tensor]
    ) -> Tensor:
        if self._queries:
            query = query if self._queries is True else query[:, :, -self._queries :]
            self.captured = join_queries(self.captured, query)
        return model_attention()
