"""KVzip (Kim et al. 2025): a second pass repeats the context in parts; a token counts by the attention it gets."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lkv.errors import CacheError, PromptError
from lkv.integrations.transformers.attention import patch_attention
from lkv.integrations.transformers.cache_argument import cache_argument
from lkv.integrations.transformers.cache_layers import BaseCache
from lkv.integrations.transformers.prefill import FrozenPromptLayer, LayerKV, as_prompt_kv
from lkv.methods.registry import register_selector
from lkv.methods.selectors.selector import PrecomputedScores, Selector
from lkv.utils.prompts import encode_question

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_REQUEST = "Repeat the previous context exactly."
_NEXT = "Repeat the part of the previous context exactly, starting with: "
_CHUNK, _OVERLAP = 2048, 8  # tokens repeated at a time, and how many of those before tell where to start
_SINKS = 4  # first tokens of the prompt, whose attention counts as well as that of the part repeated
_BLOCK = 128  # attention rows held at a time; measured best on a CPU


class _RecordingLayer(FrozenPromptLayer):
    """Records the largest attention that the prompt's tokens `repeated` receive.

    The softmax is over the prompt's first tokens, the repeated part and what is read itself, as in the authors' code.
    """

    def __init__(self, prompt: LayerKV):
        super().__init__(prompt)
        self.scores = prompt.key.new_zeros(prompt.key.shape[:3], dtype=torch.float32)
        self.repeated = slice(0, prompt.key.shape[2])

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        batch, heads, rows, dim = query.shape
        tokens, kv_heads = self._prompt.key.shape[2], key.shape[1]
        k, v = torch.cat([self._prompt.key, key], 2), torch.cat([self._prompt.value, value], 2)
        grouped = query.view(batch, kv_heads, heads // kv_heads, rows, dim) * scale
        best, parts = self.scores[..., self.repeated], []
        first, last = self.repeated.start, self.repeated.stop
        sinks = min(_SINKS, first)
        for start in range(0, rows, _BLOCK):
            q = grouped[..., start : start + _BLOCK, :]
            count = q.shape[3]
            end = tokens + start + count
            logits = (q.flatten(2, 3) @ k[:, :, :end].transpose(-1, -2)).unflatten(2, (-1, count))
            future = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
            logits[..., end - count :].masked_fill_(future, -torch.inf)
            # Half precision stays so outside the kernel, which computes in float32: the logits are no finer anyway, and
            # copies of a matrix this large cost more than its softmax.
            attention = torch.softmax(logits, -1).flatten(2, 3)
            received = attention
            if last - first < tokens:
                candidates = torch.cat([logits[..., :sinks], logits[..., first:last], logits[..., tokens:]], -1)
                received = torch.softmax(candidates, -1).flatten(2, 3)[..., sinks:]
            best = torch.maximum(best, received[..., : last - first].amax(2))
            parts.append((attention @ v[:, :, :end]).unflatten(2, (-1, count)))
        self.scores[..., self.repeated] = best
        return torch.cat(parts, -2).view(batch, heads, rows, -1).transpose(1, 2)


@torch.no_grad()
def replay_scores(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", ids: list[int], prompt: list[LayerKV]
) -> Tensor:
    """Compute the largest attention [L, 1, H, T] that each entry of a prompt receives while the model repeats it.

    The prompt `ids`, already read into `prompt`, is repeated in parts, each straight after the prompt; an entry counts
    by its own part's repetition alone. Raises PromptError if a part does not fit into the model's context.
    """
    layers = [_RecordingLayer(layer) for layer in prompt]
    device = prompt[0].key.device
    limit = patch_attention(model).spec.max_positions
    for start in range(0, len(ids), _CHUNK):
        request = _NEXT + str(tokenizer.decode(ids[start - _OVERLAP : start])) if start else _REQUEST
        replay = encode_question(tokenizer, request) + ids[start : start + _CHUNK]
        end = len(ids) + len(replay)
        if end > limit:
            raise PromptError(
                f"KVzip repeats the text after it has read it and would reach {end} tokens, but the model reads at "
                f"most {limit}; shorten the text, or use another method."
            )
        for layer in layers:
            layer.repeated = slice(start, min(start + _CHUNK, len(ids)))
        model.base_model(
            input_ids=torch.tensor([replay], device=device),
            position_ids=torch.arange(len(ids), end, device=device)[None],
            **cache_argument(BaseCache(layers=as_prompt_kv(prompt).continuation_layers(layers))),
            use_cache=True,
        )
    return torch.stack([layer.scores.to(device) for layer in layers])


@register_selector("kvzip", label="KVzip", description="attention received while the text is repeated (KVzip)")
class KVzip(Selector):
    """KVzip (Kim et al. 2025): the largest attention that an entry receives while the model repeats the text."""

    required_inputs = ("model", "tokenizer")
    has_second_pass = True

    def __init__(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase"):
        self._model, self._tokenizer = model, tokenizer

    def for_prompt(self, ids: Sequence[int], prompt: list[LayerKV]) -> Selector:
        """The scores of the one prompt `ids`, already read into `prompt`. Raises what `replay_scores` raises."""
        return PrecomputedScores(replay_scores(self._model, self._tokenizer, list(ids), prompt))

    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Raise CacheError: `for_prompt` comes first."""
        raise CacheError("KVzip reads the text a second time: use lkv.compress(..., method='kvzip').")
