"""Several methods on one prompt, from one prefill, through the real cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lkv.cache import RaggedCache
from lkv.methods import Method, side_by_side
from lkv.prefill import PromptLayer


@dataclass(frozen=True)
class Fidelity:
    """How close a method's continuation is to the full cache's (means over the target tokens)."""

    kl: float
    agreement: float


class Comparison:
    """Answers and fidelity of several methods over one prompt."""

    def __init__(self, model: Any, ids: list[int], prompt: list[PromptLayer], methods: Sequence[Method]):
        """`prompt` is what `read_prompt(model, ids, queries=True)` gave; row i of every result is `methods[i]`."""
        self._model, self._ids, self._rows = model, ids, len(methods)
        self._cache = RaggedCache(model, method=side_by_side(methods))
        self._cache.fill([_repeat(layer, self._rows) for layer in prompt])

    def realised(self) -> list[float]:
        """Kept entries / all entries of each method."""
        kept = torch.stack([layer.kept for layer in self._cache.ragged]).double()
        return (kept.mean((0, 2)) / len(self._ids)).tolist()

    @torch.no_grad()
    def answers(self, question: list[int], max_new_tokens: int) -> list[list[int]]:
        """Greedy answer ids of each method to the ids of a question."""
        device = self._model.get_input_embeddings().weight.device
        ids = torch.tensor([self._ids + question], device=device).expand(self._rows, -1)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=self._cache,
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        self._cache.rewind()
        return out[:, ids.shape[1] :].tolist()

    @torch.no_grad()
    def fidelity(self, continuation: list[int], skip: int) -> list[Fidelity]:
        """Each method against the first one, over the tokens of `continuation` from `skip` on."""
        device = self._model.get_input_embeddings().weight.device
        ids = torch.tensor([continuation], device=device).expand(self._rows, -1)
        logits = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True).logits
        self._cache.rewind()
        log_probs = torch.log_softmax(logits[:, max(0, skip - 1) : -1].float(), -1)
        full = log_probs[0]
        return [_fidelity(full, own) for own in log_probs]


def _fidelity(full: Tensor, own: Tensor) -> Fidelity:
    kl = (full.exp() * (full - own)).sum(-1).mean()
    return Fidelity(float(kl), float((full.argmax(-1) == own.argmax(-1)).float().mean()))


def _repeat(layer: PromptLayer, rows: int) -> PromptLayer:
    query = None if layer.query is None else layer.query.expand(rows, -1, -1, -1)
    return PromptLayer(layer.key.expand(rows, -1, -1, -1), layer.value.expand(rows, -1, -1, -1), layer.scale, query)
