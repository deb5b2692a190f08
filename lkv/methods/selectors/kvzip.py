"""KVzip (Kim et al. 2025): scores tokens by the attention they receive in a second pass that repeats the context.

`replay` is that pass, which records the attention of the repetition to the prompt; training warm-starts by it, too.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lkv.errors import CacheError, PromptError
from lkv.hf.attention import patch_attention
from lkv.hf.base_cache import BaseCache
from lkv.hf.cache_argument import cache_argument
from lkv.hf.image_positions import ImageOffset, following_positions
from lkv.hf.masks import Mask
from lkv.hf.prompt_kv import FrozenPromptLayer, LayerKV, PromptKV, as_prompt_kv
from lkv.hf.spec import unwrap_model
from lkv.methods.base import PrecomputedScores, Selector
from lkv.methods.registry import register_selector
from lkv.utils.prompts import chat_template_parts, encode_continuation

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

REQUEST = "Repeat the previous context exactly."
_BLOCK = 128  # attention rows at a time; measured best on a CPU
_NEXT = "Repeat the part of the previous context exactly, starting with: "
_CHUNK, _OVERLAP = 2048, 8  # tokens repeated at a time, and preceding tokens in the request that mark the start
_SINKS = 4  # first tokens, always kept and part of the softmax
_KEPT = 2.0  # their score, above any attention weight


class ReplayLayer(FrozenPromptLayer, ABC):
    """A layer over a prompt that is repeated after it; subclasses record the attention, a block of rows at a time.

    `attention_dtype` is the dtype of the recorded attention, by default the model's.
    """

    attention_dtype: torch.dtype | None = None

    @abstractmethod
    def record(self, logits: Tensor, attention: Tensor, output: Tensor) -> None:
        """Record one block of n rows, for the G query heads of each KV head.

        Logits and attention [B, H, G, n, T + rows so far], and the attention's output [B, H, G, n, d].
        """

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, model_attention: Callable[[], Tensor]
    ) -> Tensor:
        """Compute attention over the prompt and the new tokens, [B, n, Hq, d], and `record` every block."""
        batch, heads, rows, dim = query.shape
        tokens, kv_heads = self._prompt.key.shape[2], key.shape[1]
        k, v = torch.cat([self._prompt.key, key], 2), torch.cat([self._prompt.value, value], 2)
        grouped, parts = query.view(batch, kv_heads, heads // kv_heads, rows, dim), []
        for start in range(0, rows, _BLOCK):
            q = grouped[..., start : start + _BLOCK, :]
            count = q.shape[3]
            end = tokens + start + count
            logits = self._prompt.logits(q.flatten(2, 3), k[:, :, :end]).unflatten(2, (-1, count))
            future = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
            logits[..., end - count :].masked_fill_(future, -torch.inf)
            # Half precision is kept outside the softmax kernel, which computes in float32: the logits are no more
            # precise, and converting a matrix this large costs more than its softmax.
            attention = self._prompt.softmax(logits, self.attention_dtype)
            output = attention.to(v.dtype).flatten(2, 3) @ v[:, :, :end]
            parts.append(output.unflatten(2, (-1, count)))
            self.record(logits, attention, parts[-1])
        return torch.cat(parts, -2).view(batch, heads, rows, -1).transpose(1, 2)


@torch.no_grad()
def replay(
    model: "PreTrainedModel",
    prompt: list[LayerKV],
    layers: Sequence[ReplayLayer],
    ids: list[int],
    hidden_states: bool = False,
    repeated: slice | None = None,
) -> Any:
    """Read more tokens directly after a prompt, and return the model's output without the head.

    Args:
        model: The model that read the prompt.
        prompt: The result of `read_prompt`.
        layers: The layers that record the attention, one for each layer of the prompt.
        ids: The tokens to read.
        hidden_states: Whether the output has all hidden states.
        repeated: The tokens of the prompt that `ids` end with; needed to repeat images.

    Raises:
        PromptError: If they do not fit into the model's context.
    """
    device, start = prompt[0].key.device, prompt[0].key.shape[2]
    limit, end = patch_attention(model).spec.max_positions, start + len(ids)
    if end > limit:
        raise PromptError(
            f"KVzip repeats the text after it has read it and would reach {end} tokens, but the model reads at "
            f"most {limit}; shorten the text, or use another method."
        )
    read, new = as_prompt_kv(prompt), torch.tensor([ids], device=device)
    offset = None if read.positions is None else ImageOffset.of_prompt(read.positions)
    with nullcontext() if repeated is None or not read.images else _repeat_images(model, read, repeated):
        return unwrap_model(model).base_model(
            input_ids=new,
            position_ids=following_positions(offset, None, start, new),
            **cache_argument(BaseCache(*read.continuation_layers(layers))),
            use_cache=True,
            output_hidden_states=hidden_states,
        )


def _repeat_images(model: "PreTrainedModel", read: PromptKV, repeated: slice) -> RemovableHandle:
    """Give the decoder the images of the `repeated` tokens, which come last, in place of the ids of their tokens.

    This ends when the result is removed.
    """
    embeddings, mask = read.images["inputs_embeds"][:, repeated], read.images.get("visual_pos_masks")

    def insert(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        before = kwargs["inputs_embeds"][:, : -embeddings.shape[1]]
        kwargs["inputs_embeds"] = torch.cat([before, embeddings], 1)
        if mask is not None:
            first, count = int(mask[:, : repeated.start].sum()), int(mask[:, repeated].sum())
            kwargs["visual_pos_masks"] = torch.cat([mask.new_zeros(before.shape[:2]), mask[:, repeated]], 1)
            features = read.images["deepstack_visual_embeds"]
            kwargs["deepstack_visual_embeds"] = [layer[first : first + count] for layer in features]
        return args, kwargs

    return unwrap_model(model).get_decoder().register_forward_pre_hook(insert, with_kwargs=True)


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
    layers, (_, before, after) = [_LargestAttention(layer) for layer in prompt], chat_template_parts(tokenizer)
    for start in range(0, len(ids), _CHUNK):
        request = _NEXT + str(tokenizer.decode(ids[start - _OVERLAP : start])) if start else REQUEST
        part = ids[start : start + _CHUNK]
        repeated = slice(start, start + len(part))
        for layer in layers:
            layer.repeated = repeated
        question = encode_continuation(tokenizer, before + request + after)
        replay(model, prompt, layers, question + part, repeated=repeated)
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
