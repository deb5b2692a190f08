"""The rotary embedding (RoPE) of a transformers model: applied, averaged and undone."""

import copy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lkv.errors import UnsupportedModelError
from lkv.hf.cache_argument import cache_argument
from lkv.hf.positions import frequency_change, rope_settings
from lkv.hf.spec import decoder_kinds, evaluation_mode, full_attention_modules

PROBE_TOKENS = 16
# Tokens of a probe are equal if their variation is below this share of their norm, and if undoing RoPE leaves less
# than this share of their variation.
_EQUAL, _UNROTATED = 0.03, 0.2
_ROUNDING = 0.01  # the same for the first layer, with rounding only: at most 0.0015 of the norm in bfloat16
_CACHED_TABLES = 4


class Rotation:
    """The rotary embedding of a model's full-attention layers, computed by the model's own code.

    Raises UnsupportedModelError for a model that has none.
    """

    def __init__(self, model: PreTrainedModel):
        module, _ = full_attention_modules(model)[0]
        apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
        decoder = model.get_decoder()
        rotary = getattr(decoder, "rotary_emb", None) or getattr(decoder, "pos_emb", None)
        names = [] if apply is None else [*signature(apply).parameters]
        # Some models rotate queries and keys in one call, others in two.
        self._takes_one = names[1:3] == ["cos", "sin"]
        if apply is None or rotary is None or not (self._takes_one or names[2:4] == ["cos", "sin"]):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no rotary embedding that LKV can undo; use a model such as Llama, Qwen2, "
                "Qwen3, Mistral, Phi-3 or Gemma-3, or a method that needs none, such as 'kvzip' or 'snapkv'."
            )
        self._apply, self._rotary = apply, rotary
        # Some attention modules pass only the rotated part of a head to `apply`, others the whole head.
        self._is_split_outside = hasattr(module, "rotary_ndims")
        self._kind = {"layer_type": "full_attention"} if "layer_type" in signature(rotary.forward).parameters else {}
        text = model.config.get_text_config(decoder=True)
        # These embeddings change their frequencies when called with positions of a longer text.
        self._changes_at = frequency_change(text)
        self._has_state = self._changes_at is not None or "dynamic" in (rope_settings(text).get("rope_type") or "")
        self._rotates_halves: bool | None = None
        self._tables: dict[tuple, tuple[Tensor, Tensor]] = {}
        self._positions: Tensor | None = None
        self._twin: Rotation | None = None  # of the last prompt with images
        self.is_verified = False  # whether `query_rotations` has verified it for the queries

    @property
    def has_row_positions(self) -> bool:
        """Whether the rows of a batch may have different positions: then score one row at a time."""
        return self._positions is not None

    def at_positions(self, positions: Tensor | None) -> "Rotation":
        """Return this rotation for a prompt with images, whose tokens are at `positions` [3, B, T] (multimodal RoPE).

        The positions in all other methods are then numbers of tokens. Tokens after the prompt follow its largest
        position. Without positions it is this rotation itself.
        """
        if positions is None:
            return self
        twin = self._twin
        if twin is None or twin._positions is not positions:  # all layers of a prompt share one
            twin = copy.copy(self)
            twin._positions, twin._tables, twin._twin = positions, {}, None
            self._twin = twin
        return twin

    def select(self, rows: slice | Tensor, start: int) -> "Rotation":
        """Return the rotation of the given rows of the prompt, without its first `start` tokens."""
        if self._positions is None:
            return self
        positions = self._positions[:, rows, start:]
        is_all = isinstance(rows, slice) and positions.shape == self._positions.shape
        return self if is_all else self.at_positions(positions)

    def rotate(self, x: Tensor, start: int = 0) -> Tensor:
        """Rotate x [B, H, T, d] at positions `start` to `start + T - 1`, as the model rotates keys."""
        return self._turn(x, *self._cos_sin(x, start, start + x.shape[2]))

    def unrotate(self, x: Tensor, start: int = 0, part: slice = slice(None)) -> Tensor:
        """Undo the rotation of the tokens `part` of x [B, H, T, d], rotated at positions `start` to `start + T - 1`."""
        cos, sin = self._cos_sin(x, start, start + x.shape[2], inverse=True)
        return self._turn(x[:, :, part], cos[:, part], sin[:, part])

    def rerotate(self, x: Tensor, positions: range, start: int) -> Tensor:
        """Move x [B, H, n, d], rotated at `positions` [n], to the positions from `start` on."""
        key = (positions, start, x.dtype, x.device)
        tables = self._tables.get(key)
        if tables is None:
            cos, sin = self._compute(x, torch.arange(start, start + len(positions), device=x.device))
            back_cos, back_sin = _invert(*self._compute(x, torch.tensor(positions, device=x.device)))
            tables = cos * back_cos - sin * back_sin, sin * back_cos + cos * back_sin
            self._cache_tables(key, tables)
        return self._turn(x, *tables)

    def mean_rotation(self, like: Tensor, start: int, end: int) -> Tensor:
        """Compute the mean rotation at positions `start` to `end` - 1: a matrix [d, d], applied to row vectors.

        The positions follow a text of `start` tokens, as in `future_start`.
        """
        cos, sin = self._mean_cos_sin(like, start, end)
        return self._turn(torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)[None, None], cos, sin)[0, 0]

    def half_tables(self, like: Tensor, start: int, end: int) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin [n, d] with which `rotate_halves` undoes the rotation of x [., d], in its dtype.

        None if the model rotates in another way, or only part of each head.
        """
        cos, sin = self._cos_sin(like, start, end, inverse=True)
        return (cos[0], sin[0]) if cos.shape[-1] == like.shape[-1] and self._turns_halves(cos) else None

    def mean_half_tables(self, like: Tensor, start: int, end: int) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin [d] with which `rotate_halves` applies `mean_rotation`; None as in `half_tables`."""
        cos, sin = self._mean_cos_sin(like, start, end)
        return (cos[0, 0], sin[0, 0]) if cos.shape[-1] == like.shape[-1] and self._turns_halves(cos) else None

    def future_start(self, end: int, count: int) -> int:
        """Return the first of `count` positions that follow a text of `end` tokens.

        It is earlier if these positions would cross the length at which LongRoPE switches frequencies.
        """
        change = self._changes_at
        return end if change is None or end > change else min(end, max(0, change - count))

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate_halves(x, cos, sin) if self._turns_halves(cos, x.shape[-1]) else self._turn_by_model(x, cos, sin)

    def _turns_halves(self, cos: Tensor, width: int | None = None) -> bool:
        """Return whether `rotate_halves` matches the model for heads of `width` channels (default: as in `cos`)."""
        if self._rotates_halves is None:
            size = 2 * (width or cos.shape[-1])
            probe = torch.linspace(-1, 1, size, dtype=torch.float64, device="cpu").view(1, 1, 2, -1)
            table = probe[0, ..., : cos.shape[-1]]
            turned = self._turn_by_model(probe, table, table)
            self._rotates_halves = torch.allclose(turned, rotate_halves(probe, table, table))
        return self._rotates_halves

    def _mean_cos_sin(self, like: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the means [1, 1, d] of the tables, cached for all layers of a prompt."""
        key = ("mean", start, end, like.dtype, like.device)
        tables = self._tables.get(key)
        if tables is None:
            first = self.future_start(start, end - start)
            cos, sin = self._cos_sin(like, first, first + end - start)
            tables = self._tables[key] = cos.mean(1, keepdim=True), sin.mean(1, keepdim=True)
        return tables

    def _turn_by_model(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self._takes_one:
            return self._apply(x, cos, sin)
        if not self._is_split_outside:
            return self._apply(x, x[:, :1], cos, sin)[0]
        part, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        return torch.cat([self._apply(part, part[:, :1], cos, sin)[0], rest], -1)

    def _cos_sin(self, like: Tensor, start: int, end: int, inverse: bool = False) -> tuple[Tensor, Tensor]:
        """Return the tables cos and sin [1, end - start, d], cached for all layers of a prompt."""
        key = (start, end, like.dtype, like.device, inverse)
        tables = self._tables.get(key)
        if tables is None:
            cos, sin = self._compute(like, torch.arange(start, end, device=like.device))
            tables = _invert(cos, sin) if inverse else (cos, sin)
            self._cache_tables(key, tables)
        return tables

    def _cache_tables(self, key: tuple[Any, ...], tables: tuple[Tensor, Tensor]) -> None:
        if len(self._tables) >= _CACHED_TABLES:
            self._tables.clear()
        self._tables[key] = tables

    def _compute(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cos and sin [1, n, d] at `positions` [n] with the model's embedding, without changing its state.

        With row positions they are [B, n, d].
        """
        rotary = self._rotary
        if self._has_state:
            rotary = copy.deepcopy(rotary, {id(config): config for config in [getattr(rotary, "config", None)]})
        # A model on several devices has a single embedding.
        device = next(rotary.buffers()).device
        # Not by a call, which would run the hook that records the positions of a pass.
        cos, sin = rotary.forward(like[:0].to(device), self._token_positions(positions).to(device), **self._kind)
        return cos.to(like.device), sin.to(like.device)

    def _token_positions(self, numbers: Tensor) -> Tensor:
        """Return the positions of tokens with `numbers` [n], as the model's embedding takes them."""
        known = self._positions
        if known is None:
            return numbers[None]
        known, count = known.to(numbers.device), known.shape[-1]
        later = known.amax((0, 2))[:, None] + 1 + numbers - count
        return torch.where(numbers < count, known[..., numbers.clamp(max=count - 1)], later)


class NoRotation(Rotation):
    """The identity, for a layer that rotates neither q nor k."""

    def __init__(self) -> None:
        self._positions, self._changes_at, self._tables = None, None, {}
        self._rotates_halves = self.is_verified = True

    def at_positions(self, positions: Tensor | None) -> "NoRotation":
        """Return `self`: no position matters."""
        return self

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x

    def _compute(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos = like.new_ones(1, len(positions), like.shape[-1])
        return cos, torch.zeros_like(cos)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, H, T, d] by `cos` and `sin` [1, T, r] as most models do: channel i < r / 2 pairs with i + r / 2.

    It makes half the memory passes of the models' own code.
    """
    part, half = x[..., : cos.shape[-1]], cos.shape[-1] // 2
    first, second = part[..., :half], part[..., half:]
    out = part * cos[:, None]
    out[..., :half].addcmul_(second, sin[:, None, :, :half], value=-1)
    out[..., half:].addcmul_(first, sin[:, None, :, half:])
    out = out.to(x.dtype)  # some models' tables are always float32
    return out if part.shape == x.shape else torch.cat([out, x[..., cos.shape[-1] :]], -1)


def _invert(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tables of the inverse rotation."""
    size = cos.square() + sin.square()  # not 1 if the model scales its rotations, as YaRN does
    return cos / size, -sin / size


def layer_rotations(model: PreTrainedModel, has_weights: bool = True) -> tuple[Rotation | None, ...]:
    """Return the `Rotation` of each full-attention layer, None if LKV cannot undo it.

    A model may leave some layers unrotated, or change k after RoPE. A probe of one repeated token detects that. Without
    weights it is detected by the attribute names that these model families share.
    """
    text, kinds = model.config.get_text_config(decoder=True), decoder_kinds(model)
    layers, has_states = sum(kind.is_evicted for kind in kinds), any(kind.is_recurrent for kind in kinds)
    try:
        rotation = Rotation(model)
    except UnsupportedModelError:
        # Recurrent layers encode token order, so models with them may use no positions at all.
        is_unrotated = has_weights and has_states and getattr(model.get_decoder(), "rotary_emb", None) is None
        return (NoRotation() if is_unrotated else None,) * layers
    # Models with several kinds of layers may leave the full-attention layers unrotated.
    is_mixed = len(set(getattr(text, "layer_types", None) or ())) > 1 or hasattr(text, "no_rope_layers")
    if not has_weights:
        is_changed = hasattr(full_attention_modules(model)[0][0], "key_layernorm")
        return (None if is_mixed or is_changed else rotation,) * layers
    keys = _probe_keys(model)
    if is_mixed:
        return tuple(_rotation_of(key, rotation) for key in keys)
    # All layers run the same code. In the first one, k before RoPE is equal for all of these tokens.
    is_undone = variation(rotation.unrotate(keys[0])) <= _ROUNDING * float(keys[0].norm())
    return (rotation if is_undone else None,) * layers


def _rotation_of(key: Tensor, rotation: Rotation) -> Rotation | None:
    """Detect the rotation of a layer from k [1, H, T, d] of one repeated token, all equal before RoPE."""
    if variation(key) <= _EQUAL * float(key.norm()):
        return NoRotation()
    return rotation if variation(rotation.unrotate(key)) <= _UNROTATED * variation(key) else None


def variation(x: Tensor) -> float:
    """Return the norm of the deviation of the tokens of x [B, H, T, d] from their mean."""
    return float((x - x.mean(2, keepdim=True)).norm())


@torch.no_grad()
def _probe_keys(model: PreTrainedModel) -> list[Tensor]:
    """Read k [1, H, T, d] of each full-attention layer for equal hidden states, in float32 or better."""
    kinds = decoder_kinds(model)
    # Before transformers had recurrent layers, a cache of unlimited layers worked for every model.
    needs_config = any(kind.is_recurrent or kind.readers for kind in kinds)
    cache = DynamicCache(config=model.config) if needs_config else DynamicCache()
    with equal_tokens(model) as ids:
        model.base_model(input_ids=ids, **cache_argument(cache), use_cache=True)
    layers: list[Any] = [layer for layer, kind in zip(cache.layers, kinds, strict=True) if kind.is_evicted]
    return [layer.keys.to(torch.promote_types(layer.keys.dtype, torch.float32)) for layer in layers]


@contextmanager
def equal_tokens(model: Any) -> Iterator[Tensor]:
    """Yield ids [1, T] whose q and k are equal before RoPE in each full-attention layer, in the block.

    They are one token repeated. Each attention module gets the first token's hidden state at every position, because
    earlier recurrent layers and RoPE make the hidden states differ.
    """

    def repeat_first(
        module: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            args = (args[0][:, :1].expand_as(args[0]), *args[1:])
        else:
            hidden = kwargs["hidden_states"]
            kwargs = kwargs | {"hidden_states": hidden[:, :1].expand_as(hidden)}
        return args, kwargs

    token = model.config.get_text_config(decoder=True).vocab_size // 2
    with evaluation_mode(model), ExitStack() as hooks:
        for module, _ in full_attention_modules(model):
            hooks.enter_context(module.register_forward_pre_hook(repeat_first, with_kwargs=True))
        yield torch.full((1, PROBE_TOKENS), token, device=model.get_input_embeddings().weight.device)
