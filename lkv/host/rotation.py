"""The rotary embedding of a transformers model, applied, averaged and undone."""

import copy
import sys
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from lkv.errors import UnsupportedModelError
from lkv.host.spec import full_attention_modules


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
        self._kind = {"layer_type": "full_attention"} if "layer_type" in signature(rotary.forward).parameters else {}
        self._last: dict[tuple, tuple[Tensor, Tensor]] = {}
        self.probed = False  # whether the model's own queries were seen to be rotated so in every layer

    def undone(self, x: Tensor, start: int = 0) -> Tensor:
        """What x [B, H, T, d], rotated at positions `start` to `start + T - 1`, was before."""
        cos, sin = self._tables(x, start, start + x.shape[2])
        size = cos.square() + sin.square()  # not 1 where the model scales its rotations, as YaRN does
        return self._turned(x, cos / size, -sin / size)

    def mean(self, like: Tensor, start: int, end: int) -> Tensor:
        """The mean of the rotations at positions `start` to `end` - 1, a matrix [d, d] that rows are multiplied by."""
        cos, sin = (table.mean(1, keepdim=True) for table in self._tables(like, start, end))
        dim = like.shape[-1]
        return self._turned(torch.eye(dim, dtype=like.dtype, device=like.device)[None, None], cos, sin)[0, 0]

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._apply(x, x[:, :1], cos, sin)[0]

    def _tables(self, like: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin [1, end - start, d]; the layers of one prompt ask for the same ones, so the last two are kept."""
        wanted = (start, end, like.dtype, like.device)
        if wanted not in self._last:
            recent = list(self._last.items())[-1:]
            self._last = dict([*recent, (wanted, self._computed(like, start, end))])
        return self._last[wanted]

    def _computed(self, like: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
        # A copy: embeddings that follow the text's length change when they are asked about later positions.
        rotary = copy.deepcopy(self._rotary, {id(config): config for config in [getattr(self._rotary, "config", None)]})
        # A model over several devices has one embedding for all of them.
        device = next(rotary.buffers()).device
        cos, sin = rotary(like[:0].to(device), torch.arange(start, end, device=device)[None], **self._kind)
        return cos.to(like.device), sin.to(like.device)


def rotation_of(model: Any) -> Rotation | None:
    """The model's `Rotation`, or None for a model that has none that LKV can undo."""
    try:
        return Rotation(model)
    except UnsupportedModelError:
        return None
