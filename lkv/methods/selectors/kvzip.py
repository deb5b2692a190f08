"""KVzip (Kim et al. 2025): scores tokens by the attention they receive in a second pass that repeats the context."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lkv.errors import CacheError
from lkv.hf.prompt_kv import LayerKV
from lkv.methods.base import PrecomputedScores, Selector
from lkv.methods.registry import register_selector
from lkv.methods.replay import REQUEST, ReplayLayer, replay
from lkv.utils.prompts import encode_question

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NEXT = "Repeat the part of the previous context exactly, starting with: "
_CHUNK, _OVERLAP = 2048, 8  # tokens repeated at a time, and preceding tokens in the request that mark the start
_SINKS = 4  # first tokens, always kept and part of the softmax
_KEPT = 2.0  # their score, above any attention weight


class _LargestAttention(ReplayLayer):
    """Records the largest attention that the prompt's tokens `repeated` receive.

    The softmax is over the prompt's first tokens, the repeated part and the new tokens, as in the authors' code.
    """

    def __init__(self, prompt: LayerKV):
        super().__init__(prompt)
        self.scores = prompt.key.new_zeros(prompt.key.shape[:3], dtype=torch.float32)
        self.repeated = slice(0, prompt.key.shape[2])

    def record(self, logits: Tensor, attention: Tensor, output: Tensor) -> None:
        tokens, first, last = self._prompt.key.shape[2], self.repeated.start, self.repeated.stop
        received = attention
        if last - first < tokens:
            sinks = min(_SINKS, first)
            candidates = torch.cat([logits[..., :sinks], logits[..., first:last], logits[..., tokens:]], -1)
            received = self._prompt.softmax(candidates)[..., sinks:]
        best = self.scores[..., self.repeated]
        torch.maximum(best, received[..., : last - first].flatten(2, 3).amax(2), out=best)


@torch.no_grad()
def replay_scores(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", ids: list[int], prompt: list[LayerKV]
) -> Tensor:
    """Compute the largest attention that each entry of a prompt receives while the model repeats it.

    The prompt is repeated in parts, each directly after the prompt; an entry's score comes from its own part only. The
    first tokens rank above all others: in the authors' code they are a system prompt that is never evicted.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        ids: The prompt's tokens.
        prompt: The result of `read_prompt` for them.

    Returns:
        Scores [L, 1, H, T].

    Raises:
        PromptError: If a part does not fit into the model's context.
    """
    layers = [_LargestAttention(layer) for layer in prompt]
    for start in range(0, len(ids), _CHUNK):
        request = _NEXT + str(tokenizer.decode(ids[start - _OVERLAP : start])) if start else REQUEST
        part = ids[start : start + _CHUNK]
        repeated = slice(start, start + len(part))
        for layer in layers:
            layer.repeated = repeated
        replay(model, prompt, layers, encode_question(tokenizer, request) + part, repeated=repeated)
    device = prompt[0].key.device
    scores = torch.stack([layer.scores.to(device) for layer in layers])
    scores[..., :_SINKS] = _KEPT
    return scores


@register_selector("kvzip", label="KVzip", description="attention received while the text is repeated (KVzip)")
class KVzip(Selector):
    """KVzip (Kim et al. 2025): the largest attention that an entry receives while the model repeats the text.

    The first four tokens are kept.
    """

    required_inputs = ("model", "tokenizer")
    has_second_pass = True

    def __init__(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase"):
        self._model, self._tokenizer = model, tokenizer

    def for_prompt(self, ids: Sequence[int], prompt: list[LayerKV]) -> Selector:
        """Return the scores of the prompt `ids`, already prefilled as `prompt`. Raises as `replay_scores`."""
        return PrecomputedScores(replay_scores(self._model, self._tokenizer, list(ids), prompt))

    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Raise CacheError: `for_prompt` comes first."""
        raise CacheError("KVzip reads the text a second time: use lkv.compress(..., method='kvzip').")
