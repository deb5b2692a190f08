"""RaggedCache: every KV head holds a span of its own length, and what is evicted is freed."""

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lkv.cache.checks import check_attended, check_pass
from lkv.cache.config import MOST, CacheConfig, Shared
from lkv.cache.ids import TokenHistory
from lkv.cache.layer import RaggedLayer
from lkv.cache.windows import Windows
from lkv.errors import CacheError
from lkv.integrations.transformers.attention import patch_attention
from lkv.integrations.transformers.cache_layers import AttentionCacheLayer, BaseCache, SlidingWindowLayer
from lkv.integrations.transformers.fingerprint import read_adapters
from lkv.integrations.transformers.prefill import LayerKV, as_prompt_kv, query_rotations
from lkv.integrations.transformers.spec import unwrap_model
from lkv.kernels.ragged_attention import masked_attention, merge_attention, ragged_attention
from lkv.methods.method import Method, resolve_method
from lkv.methods.registry import REFIT
from lkv.policy.policy import Policy


class RaggedCache(BaseCache):
    """A transformers cache that evicts layer by layer while the prompt is read.

    Unless `prompt_tokens` says otherwise the prompt is the first forward pass; each layer attends over it in full, then
    keeps what its method chooses and frees the rest. Everything after that (question, answer) is appended and kept.
    Sliding layers, where a model has some, hold their window whole and count in `nbytes` alone.
    Under tensor parallelism each process evicts its own KV heads; counts and bytes are those of its heads.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy | str | os.PathLike[str] | None = None,
        retention: float | None = None,
        method: str | Method = "lkv",
        slack: int | None = None,
        *,
        budget_tokens: int | None = None,
        prompt_tokens: int | None = None,
        streaming: bool = False,
        decode_eviction: bool = False,
        bits: int | None = None,
        pattern: list[list[float]] | None = None,
    ):
        """`policy`, or its folder or hub id, defaults to the one shipped for the model; `retention` is the
        share of the prompt's entries to keep, in (0, 1], 0.15 unless given; `method` is a name that `lkv methods`
        lists, any "RULE+SELECTOR", or a `Method` of your own, whose budget rule then says how much is kept; `slack` is
        the room in tokens that each head gets for what is appended.

        `budget_tokens`: keep that many tokens a head on average, instead of a share of the prompt.
        `prompt_tokens`: length of the prompt (padding included), for prompts that come in several forward passes
        (`prefill_chunk_size`) or together with what follows (assisted decoding).
        `streaming`: each head keeps its best floor(r * seen) after every pass over a part of the prompt, so that the
        cache never holds more than that and one part; later parts see what was kept of the earlier ones.
        `decode_eviction`: what is generated is evicted from as well, whenever a layer's slack has run out.
        `bits`: hold what is kept of the prompt in 8 or 4 bits a value (needs torchao); what follows stays as it is.
        `pattern`: DuoAttention's alphas `[L][H]`, for the rule "duo" (`budget.read_pattern` or `estimate_pattern`).

        Raises RetentionError, PolicyMismatchError, UnsupportedModelError, CacheError, BudgetError (a pattern of another
        shape) or LkvError (unknown method).
        """
        attached = patch_attention(model)
        self.spec = attached.spec
        # The adapters that are switched on now; k and v computed with others do not go together.
        self.adapters = read_adapters(unwrap_model(model))
        self._ids = TokenHistory()
        # Called with the number of each layer before its attention; what it raises ends the pass.
        self.on_layer_start: Callable[[int], None] | None = None
        method = resolve_method(
            method, model, retention=retention, budget_tokens=budget_tokens, policy=policy, pattern=pattern
        )
        if method.needs_whole_prompt:
            raise CacheError(
                f"{method.name!r} must see the whole text before the first layer is evicted from: use "
                f"lkv.compress(..., method={method.name!r})."
            )
        if method.compensation:
            query_rotations(model, REFIT)
        self.target, self.policy = method.target, method.policy
        self.plan = CacheConfig(
            method, self.target, slack, prompt_tokens, streaming, decode_eviction, bits, attached.rotations
        )
        shared = Shared(self.spec.layers - 1)
        self.ragged_layers = [RaggedLayer(index, self.plan, shared) for index in range(self.spec.layers)]
        for layer in self.ragged_layers:
            layer.model_config = model.config.get_text_config(decoder=True)
        self.windows = Windows(SlidingWindowLayer(window) for window in attached.sliding_windows if window is not None)
        super().__init__(
            layers=_in_order(self.ragged_layers, self.windows, [window is None for window in attached.sliding_windows])
        )

    def check_update(self, key_states: Tensor, layer_idx: int) -> None:
        """As in the base class; before the first layer, the whole pass is checked."""
        if layer_idx == 0:
            self.is_assisted = False
            held, new = self.get_seq_length(), key_states.shape[2]
            check_pass(
                self.ragged_layers, self.windows.layers, key_states.shape[0], held + new, self.spec.max_positions
            )
            self._ids.read(held, held + new)
        # Of the first layer it is the last one of the pass before.
        check_attended(self.layers[layer_idx - 1])
        if self.on_layer_start is not None:
            self.on_layer_start(layer_idx)

    def check_inputs(self, ids: Tensor, is_full: bool, is_first_step: bool, is_chunk: bool) -> None:
        """What `generate` is about to feed, compared with what was read where both are known.

        Raises CacheError for ids that do not begin with those read or hold nothing new, for unannounced parts, and for
        an answer that begins before an announced prompt has ended.
        """
        if self._ids.goes_on(self.get_seq_length(), is_chunk):
            self.plan.check_announced()
        elif (held := self.get_seq_length()) and not (is_first_step or is_chunk or self.prompt_length):
            self.plan.check_ended(held)
        self._ids.expect(ids, self.get_seq_length(), is_full, is_first_step)

    @property
    def ids(self) -> Tensor | None:
        """Ids [B, k] of the first k tokens read, where they are known."""
        return self._ids.known

    @ids.setter
    def ids(self, ids: Tensor) -> None:
        self._ids.known = ids

    def reorder_cache(self, beam_idx: Any) -> None:
        """Make row i a copy of the row `beam_idx[i]`."""
        super().reorder_cache(beam_idx)
        self._ids.take(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` [n], in that order."""
        super().batch_select_indices(indices)
        self._ids.take(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make `repeats` copies of each row. Raises CacheError for less than one."""
        if type(repeats) is not int or not 1 <= repeats <= MOST:
            raise CacheError(
                f"repeats is {repeats!r}, but it is how often each row is held: give a whole number from 1 to {MOST}."
            )
        super().batch_repeat_interleave(repeats)
        self._ids.repeat(repeats)

    def reset(self) -> None:
        """Forget everything, and free it."""
        super().reset()
        self._ids = TokenHistory()

    def activate_past_recording(self) -> None:
        """The tail can always be cut back; but where assisted decoding begins, the prompt must be told apart."""
        if not self.prompt_length and self.plan.prompt_tokens is None:
            raise CacheError(
                "assisted decoding sends its first candidates together with the prompt: give "
                "prompt_tokens=input_ids.shape[1] to RaggedCache, so that they are told apart."
            )
        self.is_assisted = True
        self.windows.activate_past_recording()

    def fill(self, prompt: list[LayerKV]) -> None:
        """Take over a prompt that was read before (`prefill.read_prompt`): one prefill serves many methods."""
        if len(prompt) != len(self.ragged_layers):
            raise CacheError(
                f"the prompt has {len(prompt)} layers, but this cache {len(self.ragged_layers)}; read it again."
            )
        layers = as_prompt_kv(prompt).continuation_layers(self.ragged_layers)
        if len(layers) != len(self.layers):
            raise CacheError(
                "the prompt was given without what the sliding layers hold; give what read_prompt returned."
            )
        self.layers = layers
        self.windows = Windows(layer for layer in self.layers if isinstance(layer, SlidingWindowLayer))
        for layer, whole in zip(self.ragged_layers, prompt, strict=True):
            layer.fill(whole)

    def fork(self) -> "RaggedCache":
        """A copy that goes on independently."""
        twin = copy.copy(self)
        twin._ids = copy.copy(self._ids)
        shared = Shared(self.spec.layers - 1)
        twin.ragged_layers = [layer.fork(shared) for layer in self.ragged_layers]
        twin.windows = self.windows.fork()
        twin.layers = _in_order(
            twin.ragged_layers, twin.windows, [isinstance(layer, RaggedLayer) for layer in self.layers]
        )
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> "RaggedCache":
        """`fork`: a copy serves the same model under the same policy, and neither of those is copied."""
        return self.fork()

    @property
    def is_rewindable(self) -> bool:
        """Whether what follows the prompt can be cut off again."""
        return not self.plan.decode_eviction and not self.windows

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt that was compressed (0 before it has ended)."""
        return self.ragged_layers[-1].prompt_length

    def rewind(self) -> None:
        """Forget everything appended after the prompt. Raises CacheError if some of that was evicted already, or if the
        model has sliding layers, which have dropped what they would need."""
        if self.windows:
            raise CacheError("sliding layers cannot be cut back to the prompt; go on with a fork() made before.")
        for layer in self.ragged_layers:
            layer.crop(layer.prompt_length - layer.get_seq_length())

    def kept_counts(self) -> list[list[int]]:
        """Entries that eviction left to each head, `[L][H]`, summed over the batch."""
        return [layer.kept_counts.sum(0).tolist() for layer in self.ragged_layers]

    def realised_retention(self) -> float:
        """Entries that eviction left divided by all they were chosen from (padding is none)."""
        entries = sum(
            layer.kept_counts.shape[1] * sum(layer.real_tokens) for layer in self.ragged_layers if layer.real_tokens
        )
        return sum(int(layer.kept_counts.sum()) for layer in self.ragged_layers) / entries if entries else 1.0

    def nbytes(self) -> int:
        """Bytes of k and v storage really held, slack included."""
        return sum(layer.nbytes() for layer in self.ragged_layers) + self.windows.nbytes()

    def full_nbytes(self) -> int:
        """Bytes that an uncompressed cache would hold for the same tokens."""
        return sum(layer.full_nbytes() for layer in self.ragged_layers) + self.windows.nbytes()


def _in_order(ragged: list[RaggedLayer], windows: Windows, evicting: list[bool]) -> list[Any]:
    """The layers as the model has them; `evicting`: whether each of these is one of `ragged`."""
    full, sliding = iter(ragged), iter(windows.layers)
    return [next(full if evicts else sliding) for evicts in evicting]


class SharedLayer(AttentionCacheLayer):
    """One layer's k and v of what follows, [B, H, n, d], beside the spans of the one row that `text` holds."""

    def __init__(self, text: RaggedLayer):
        super().__init__()
        self._text = text
        self.model_config = text.model_config
        self.reset()

    def reset(self) -> None:
        """Forget what follows the text."""
        self._tail: tuple[Tensor, Tensor] | None = None
        self.is_initialized = False

    def get_seq_length(self, *args: Any) -> int:
        """Tokens of the text and of what follows."""
        return self._text.prompt_length + self._followed

    @property
    def _followed(self) -> int:
        return 0 if self._tail is None else self._tail[0].shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask is one over what follows alone: all rows see the whole text."""
        return self._followed + query_length, self._text.prompt_length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.to(value_states.dtype), value_states
        if self._tail is not None:
            new = torch.cat([self._tail[0], new[0]], 2), torch.cat([self._tail[1], new[1]], 2)
        self._tail = new
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        assert self._tail is not None and self._text.store is not None
        batch, _, new, _ = query.shape
        key, value = self._tail
        late, late_lse = masked_attention(query.to(value.dtype), key, value, _visible(mask, new, key), scale)
        # To the text all rows are new tokens of one: it is read once for all of them.
        rows = query.transpose(0, 1).flatten(1, 2)[None].to(value.dtype)
        out, lse = ragged_attention(rows, *self._text.store.settled(), scale, causal=False, lse=True)
        out, lse = (x[0].unflatten(1, (batch, new)).transpose(0, 1) for x in (out, lse))
        return merge_attention(out, lse, late, late_lse)[0].transpose(1, 2)


class SharedCache(BaseCache):
    """For `generate` with rows of ids that begin with the text of `cache`, a compressed cache of one row.

    `cache` must have no sliding layers. It may go on being asked meanwhile; its settled entries are read alone.
    """

    def __init__(self, cache: RaggedCache):
        super().__init__(layers=[SharedLayer(layer) for layer in cache.ragged_layers])


def _visible(mask: Any, new: int, key: Tensor) -> Tensor:
    """What the `new` last tokens see of `key` [B, H, n, d], from transformers' mask: bool [B or 1, 1, new, n]."""
    if not isinstance(mask, Tensor):
        return torch.ones(1, 1, new, key.shape[2], dtype=torch.bool, device=key.device).tril(key.shape[2] - new)
    return mask if mask.dtype == torch.bool else mask == 0
