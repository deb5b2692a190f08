"""The rotary embedding of a transformers model, applied, averaged and undone; layer by layer, for some have none."""

import copy
import sys
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from lkv.errors import UnsupportedModelError
from lkv.integrations.transformers.spec import full_attention_modules, sliding_windows

PROBE_TOKENS = 16
_STILL, _UNDONE = 0.03, 0.2  # variation taken for none, of the size of k and of the variation before


class Rotation:
    """The rotary embedding of a model's full-attention layers, by the model's own code.

    Raises UnsupportedModelError for a model that has none.
    """

    def __init__(self, model: Any):
        module, _ = full_attention_modules(model)[0]
        turn = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
        rotary = getattr(model.get_decoder(), "rotary_emb", None)
        if turn is None or rotary is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no rotary embedding that LKV can undo; use a model such as Llama, Qwen2, "
                "Qwen3, Mistral, Phi-3 or Gemma-3, or another method."
            )
        self._apply, self._rotary = turn, rotary
        # Some attention modules themselves give `turn` the part of a head that is rotated, others leave it to `turn`.
        self._parted = hasattr(module, "rotary_ndims")
        self._kind = {"layer_type": "full_attention"} if "layer_type" in signature(rotary.forward).parameters else {}
        scaling = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
        scaling = scaling.get("full_attention", scaling)
        longer = scaling.get("rope_type") == "longrope"
        self._changes_at = scaling.get("original_max_position_embeddings") if longer else None
        self._by_halves: bool | None = None
        self._last: dict[tuple, tuple[Tensor, Tensor]] = {}
        self.probed = False  # whether the model's own queries were seen to be rotated so in every layer

    def unrotate(self, x: Tensor, start: int = 0, part: slice = slice(None)) -> Tensor:
        """What the tokens `part` of x [B, H, T, d], rotated at positions `start` to `start + T - 1`, were before."""
        cos, sin = self._tables(x, start, start + x.shape[2], undo=True)
        return self._turned(x[:, :, part], cos[:, part], sin[:, part])

    def rotate(self, x: Tensor, start: int = 0) -> Tensor:
        """x [B, H, T, d] rotated at positions `start` to `start + T - 1`, as the model rotates keys."""
        return self._turned(x, *self._tables(x, start, start + x.shape[2]))

    def rerotate(self, x: Tensor, positions: Tensor, start: int) -> Tensor:
        """x [B, H, n, d], rotated at `positions` [n], as if rotated from position `start` on instead."""
        cos, sin = _inverse(*self._computed(x, positions))
        return self.rotate(self._turned(x, cos, sin), start)

    def future_start(self, end: int, count: int) -> int:
        """The first of `count` positions at `end`, or as near before as they must be to be rotated as those of a text
        of `end` tokens are: LongRoPE has other frequencies beyond a length."""
        change = self._changes_at
        return end if change is None or end > change else min(end, max(0, change - count))

    def mean_rotation(self, like: Tensor, start: int, end: int) -> Tensor:
        """The mean of the rotations at positions `start` to `end` - 1, a matrix [d, d] that rows are multiplied by."""
        cos, sin = (table.mean(1, keepdim=True) for table in self._tables(like, start, end))
        dim = like.shape[-1]
        return self._turned(torch.eye(dim, dtype=like.dtype, device=like.device)[None, None], cos, sin)[0, 0]

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self._by_halves is None:
            probe = torch.linspace(-1, 1, 2 * x.shape[-1], dtype=torch.float64, device="cpu").view(1, 1, 2, -1)
            table = probe[0, ..., : cos.shape[-1]]
            self._by_halves = torch.allclose(self._models(probe, table, table), by_halves(probe, table, table))
        return by_halves(x, cos, sin) if self._by_halves else self._models(x, cos, sin)

    def _models(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` turned by the model's own code."""
        if not self._parted:
            return self._apply(x, x[:, :1], cos, sin)[0]
        part, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        return torch.cat([self._apply(part, part[:, :1], cos, sin)[0], rest], -1)

    def _tables(self, like: Tensor, start: int, end: int, undo: bool = False) -> tuple[Tensor, Tensor]:
        """cos and sin [1, end - start, d], or those of the way back; the layers of one prompt ask for the same ones, so
        the last four are kept."""
        wanted = (start, end, like.dtype, like.device, undo)
        if (tables := self._last.get(wanted)) is not None:
            return tables
        cos, sin = self._computed(like, torch.arange(start, end, device=like.device))
        if undo:
            cos, sin = _inverse(cos, sin)
        recent = list(self._last.items())[-3:]
        self._last = dict([*recent, (wanted, (cos, sin))])
        return cos, sin

    def _computed(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        # A copy: embeddings that follow the text's length change when they are asked about later positions.
        rotary = copy.deepcopy(self._rotary, {id(config): config for config in [getattr(self._rotary, "config", None)]})
        # A model over several devices has one embedding for all of them.
        device = next(rotary.buffers()).device
        cos, sin = rotary(like[:0].to(device), positions.to(device)[None], **self._kind)
        return cos.to(like.device), sin.to(like.device)


def _inverse(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The tables of the way back."""
    size = cos.square() + sin.square()  # not 1 where the model scales its rotations, as YaRN does
    return cos / size, -sin / size


def by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, T, d] turned by `cos` and `sin` [1, T, r] as most models do: feature i of the first r with i + r / 2, in
    half the passes of the models' own code."""
    part, half = x[..., : cos.shape[-1]], cos.shape[-1] // 2
    first, second = part[..., :half], part[..., half:]
    out = part * cos[:, None]
    out[..., :half].addcmul_(second, sin[:, None, :, :half], value=-1)
    out[..., half:].addcmul_(first, sin[:, None, :, half:])
    out = out.to(x.dtype)  # some models' tables are float32 whatever k is
    return out if part.shape == x.shape else torch.cat([out, x[..., cos.shape[-1] :]], -1)


class NoRotation(Rotation):
    """Of a layer that turns neither q nor k."""

    def __init__(self) -> None:
        self.probed = True

    def unrotate(self, x: Tensor, start: int = 0, part: slice = slice(None)) -> Tensor:
        return x[:, :, part]

    def rerotate(self, x: Tensor, positions: Tensor, start: int) -> Tensor:
        return x

    def future_start(self, end: int, count: int) -> int:
        return end

    def mean_rotation(self, like: Tensor, start: int, end: int) -> Tensor:
        return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def layer_rotations(model: Any) -> tuple[Rotation | None, ...]:
    """The `Rotation` of each full-attention layer, None for those whose rotation LKV cannot undo."""
    windows = sliding_windows(model)
    layers = windows.count(None)
    try:
        whole = Rotation(model)
    except UnsupportedModelError:
        return (None,) * layers
    text = model.config.get_text_config(decoder=True)
    # Models that mix kinds of layers may leave those unrotated that see everything.
    if layers == len(windows) and not hasattr(text, "no_rope_layers"):
        return (whole,) * layers
    return tuple(_undone(whole, key) for key in _repeated_keys(model))


def _undone(whole: Rotation, key: Tensor) -> Rotation | None:
    """What a layer does whose k [1, H, T, d] of one token over and over this is: equal everywhere before RoPE."""
    if variation(key) <= _STILL * float(key.norm()):
        return NoRotation()
    return whole if variation(whole.unrotate(key)) <= _UNDONE * variation(key) else None


def variation(x: Tensor) -> float:
    """How far x [B, H, T, d] is from the same everywhere."""
    return float((x - x.mean(2, keepdim=True)).norm())


@torch.no_grad()
def _repeated_keys(model: Any) -> list[Tensor]:
    """k [1, H, T, d] of each full-attention layer for one token over and over, in float32 or better."""
    token = model.config.get_text_config(decoder=True).vocab_size // 2
    ids = torch.full((1, PROBE_TOKENS), token, device=model.get_input_embeddings().weight.device)
    cache, training = DynamicCache(), model.training
    model.eval()
    try:
        model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    finally:
        model.train(training)
    held = zip(cache.layers, sliding_windows(model), strict=True)
    keys: list[Tensor] = [getattr(layer, "keys") for layer, window in held if window is None]  # noqa: B009
    return [key.to(torch.promote_types(key.dtype, torch.float32)) for key in keys]
