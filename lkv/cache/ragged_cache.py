"""RaggedCache: each KV head stores its own number of entries, and the memory of evicted entries is freed."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lkv.cache.cache_config import CacheConfig, SharedState, list_contexts
from lkv.cache.graphed import graphed_forward
from lkv.cache.layer import RaggedLayer
from lkv.cache.pass_checks import PassTracker, check_pass, check_rewind, take_prompt_images
from lkv.cache.read_again import ReadAgainLayer
from lkv.cache.tiers import check_width
from lkv.errors import CacheError, check_count
from lkv.hf.attention import patch_attention
from lkv.hf.base_cache import BaseCache
from lkv.hf.fingerprint import check_same_adapters, read_adapters
from lkv.hf.image_positions import ImageOffset
from lkv.hf.model_spec import ModelSpec
from lkv.hf.other_layers import OtherLayer, RecurrentLayer, evicted_kinds, make_layers
from lkv.hf.prompt_kv import LayerKV, as_prompt_kv, query_rotations
from lkv.hf.spec import unwrap_model
from lkv.hf.state import NOT_PATCHED, TokenHistory, register_cache
from lkv.methods.method import Method
from lkv.methods.registry import COMPENSATION
from lkv.methods.request import MAX_COUNT, CompressionRequest
from lkv.policy.policy import Policy
from lkv.utils.overrides import override_method


class RaggedCache(BaseCache):
    """A transformers cache that evicts most of a prompt's KV entries while the prompt is read.

    Pass it as `past_key_values` to `model.generate` or to the model itself. The prompt is the first forward pass (see
    `prompt_tokens` for chunked prefill). Each layer computes full attention over it, then keeps the entries that the
    method selects, a different number in each KV head. It frees the others before the next layer runs. Later tokens
    (a question, the answer) are appended and kept.

    Sliding-window, recurrent and convolution layers are not evicted from; they count in `nbytes`. Under tensor
    parallelism each process evicts from its own KV heads, and reports counts and bytes for these heads.

    ```python
    cache = lkv.RaggedCache(model, retention=0.15)
    output = model.generate(**inputs, past_key_values=cache)
    print(cache.realised_retention(), cache.nbytes(), cache.full_nbytes())
    ```

    One cache serves one conversation. To ask several questions about one prompt, call `fork()` for each question, or
    `rewind()` between them.

    Args:
        model: The model that the cache is used with. LKV patches its attention (`lkv.unpatch_attention` undoes it).
        retention: The share of the prompt's entries to keep, in (0, 1], 1 - kvpress's `compression_ratio`. Defaults to
            0.15 if only `bits` are given.
        method: A name that `lkv methods` lists, any "BUDGET+SELECTOR", or a `Method` of your own, whose budget then
            replaces `retention`.
        policy: For learned methods: a `Policy`, its folder or its hub id. The default is the policy shipped for the
            model.
        budget_tokens: The average number of tokens to keep per head, instead of a share of the prompt.
        memory: The memory budget of the prompt's k and v in full-attention layers, instead of `retention`: a share of
            their full cache in 16 bits a value (0.1 or "10%", the default), or bytes per batch row (200_000_000 or
            "200MB"). The best entries are stored in more bits, others in fewer. Tokens after the prompt (in the model's
            dtype), an explicit `slack` and sliding windows are not included; the former two are with `decode_eviction`.
        slack: Free slots of each head for appended tokens. The default depends on the number of entries.
        prompt_tokens: The length of the prompt in tokens, padding included. Required for chunked prefill
            (`prefill_chunk_size`), and if one pass contains more than the prompt (assisted decoding).
        streaming: Evict after each chunk of the prompt: a head keeps its best floor(retention * tokens read). The cache
            then never stores more than these and one chunk; later chunks see only the kept entries of earlier ones.
        decode_eviction: Evict from tokens after the prompt, too, whenever a layer's slack is used up.
        bits: Quantise the kept entries of the prompt to 8, "fp8", 4 or 3 bits. Appended tokens keep the model's dtype.
        pattern: DuoAttention's alphas `[L][H]`, for the budget rule "duo" (`lkv.methods.budgets.read_pattern`
            or `estimate_pattern`).
        compression_ratio: Not accepted; the error says which `retention` to give.

    Attributes:
        spec: The description of the model.
        ragged_layers: The layers with eviction, in order; `layers` also has the others.
        target: The eviction target; None for a `Method` of your own.
        policy: The policy that is used; None for methods without one.
        history: The token ids read so far, if known.
        weights: The digests of the model's weights, see `WeightDigests`.
        at_prompt_end: Copies of `others` from the end of the prompt; empty until a token follows it.
        on_layer_start: Called with the index of each layer before its attention. An exception that it raises ends the
            forward pass.

    Raises:
        RetentionError: If the retention, the budget or the memory is out of range, or two of them are given.
        PolicyMismatchError: If the policy was trained for another model.
        UnsupportedModelError: If eviction cannot work in this model.
        BudgetError: If the pattern's shape does not match the model.
        CacheError: If options exclude each other.
        LkvError: If the method is unknown.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        retention: float | None = None,
        method: str | Method = "lkv",
        policy: Policy | str | os.PathLike[str] | None = None,
        budget_tokens: int | None = None,
        memory: float | int | str | None = None,
        slack: int | None = None,
        prompt_tokens: int | None = None,
        streaming: bool = False,
        decode_eviction: bool = False,
        bits: int | str | None = None,
        pattern: list[list[float]] | None = None,
        compression_ratio: None = None,
    ):
        request = CompressionRequest(
            retention=retention, method=method, policy=policy, budget_tokens=budget_tokens, memory=memory, slack=slack,
            prompt_tokens=prompt_tokens, streaming=streaming, decode_eviction=decode_eviction, bits=bits,
            pattern=pattern, compression_ratio=compression_ratio,
        )  # fmt: skip
        self._build(model, CacheConfig.resolve(request, model))

    @classmethod
    def from_config(cls, model: PreTrainedModel, config: CacheConfig) -> "RaggedCache":
        """Make a cache from a resolved request. Raises CacheError for a method that needs the whole prompt."""
        cache = cls.__new__(cls)
        cache._build(model, config)
        return cache

    def _build(self, model: PreTrainedModel, config: CacheConfig) -> None:
        method, patched = config.method, patch_attention(model)
        if method.needs_whole_prompt:
            raise CacheError(
                f"{method.name!r} must see the whole text before the first layer is evicted from: use "
                f"lkv.compress(..., method={method.name!r})."
            )
        if method.compensation:
            query_rotations(model, COMPENSATION)
        self.spec: ModelSpec = patched.spec
        # Entries computed with different adapters must not be mixed.
        self.adapters = read_adapters(unwrap_model(model))
        self.config, self.target, self.policy, self.weights = config, method.target, method.policy, config.weights
        if config.is_tiered:
            check_width(self.spec.head_dim)
        self.on_layer_start: Callable[[int], None] | None = None
        self.history = TokenHistory()
        self.at_prompt_end: dict[int, OtherLayer] = {}
        self.shared = SharedState.of_model(patched)
        self.ragged_layers = [
            (ReadAgainLayer if kind.readers else RaggedLayer)(own)
            for kind, own in zip(evicted_kinds(patched.kinds), list_contexts(config, self.shared, patched), strict=True)
        ]
        super().__init__(*make_layers(patched.kinds, self.ragged_layers))
        self.reads_all_queries = method.reads_queries and any(kind.readers for kind in patched.kinds)
        self.pass_tracker = PassTracker(self.layers, self.others)
        for layer in self.ragged_layers:
            layer.model_config = patched.config.get_text_config(decoder=True)

    @property
    def is_rewindable(self) -> bool:
        """Whether `rewind` can remove the tokens after the prompt."""
        return not self.config.request.decode_eviction

    @property
    def is_shareable(self) -> bool:
        """Whether a `SharedCache` can continue the prompt, and any tokens after it can be cropped."""
        return self.is_rewindable and not self.others

    @property
    def is_stepwise(self) -> bool:
        """Whether tokens after the prompt must be read one by one, see `RecurrentLayer`."""
        return any(isinstance(other, RecurrentLayer) and other.is_stepwise for other in self.others.values())

    @property
    def prompt_length(self) -> int:
        """The number of tokens of the compressed prompt, 0 before it has ended."""
        return self.ragged_layers[-1].prompt_length

    def before_update(self, key_states: Tensor, layer_idx: int) -> None:
        """Raise CacheError or PromptError if a layer cannot take the new keys; the first layer checks all layers."""
        if layer_idx == self.pass_tracker.first_attention:
            self.begin_pass(key_states.shape[0], key_states.shape[2])
        before = self.layers[self.pass_tracker.attention_before[layer_idx]]
        if isinstance(before, RaggedLayer) and before.pending_key is not None:  # over which no attention was computed
            raise CacheError(NOT_PATCHED)
        self._start_layer(layer_idx, "attention")

    def before_states(self, layer_idx: int) -> None:
        """Raise CacheError if the states of a layer are out of step with the last pass."""
        self._start_layer(layer_idx, "states")

    def _start_layer(self, layer_idx: int, part: str) -> None:
        if self.on_layer_start is not None:
            self.on_layer_start(layer_idx)
        if self.others and self.pass_tracker.enter(layer_idx, part):
            self._note_prompt_end()

    def _note_prompt_end(self) -> None:
        """Copy the other layers at the end of the prompt, before the first token after it is read."""
        is_end = 0 < self.prompt_length == self.get_seq_length()
        if is_end and not self.at_prompt_end and self.is_rewindable:
            self.at_prompt_end = {index: other.fork() for index, other in self.others.items()}

    def begin_pass(self, rows: int, new: int) -> None:
        """Record a forward pass of `new` tokens in each of `rows` rows. Raises as `before_update`."""
        self.is_assisted = False
        length = self.get_seq_length()
        check_pass(self.layers, rows, length + new, self.spec)
        if (positions := take_prompt_images(self.config, self.shared, rows, length, new)) is not None:
            self.set_image_positions(positions)
        self.history.read(length, length + new)

    def set_image_positions(self, positions: Tensor | None) -> None:
        """Set the positions [3, B, T] of a prompt with images in a model with multimodal RoPE."""
        self.shared.positions = positions
        self.image_offset = None if positions is None else ImageOffset.of_prompt(positions)

    def announce_inputs(self, ids: Tensor, is_full: bool, is_first_step: bool, is_chunk: bool) -> None:
        """Compare the ids that `generate` is about to feed with the ids read so far, if both are known.

        Raises CacheError for ids that do not start with the ids read so far or contain no new ones, for chunks of a
        prompt of undeclared length, and for an answer that starts before the declared end of the prompt. For the
        arguments see `BaseCache.announce_inputs`.
        """
        length = self.get_seq_length()
        if self.history.continues_chunks(length, is_chunk):
            self.config.check_prompt_declared()
        elif length and not (is_first_step or is_chunk or self.prompt_length):
            self.config.check_prompt_ended(length)
        self.history.announce(ids, length, is_full, is_first_step)

    def announce_adapters(self, adapters: str) -> None:
        """Record the adapters that a text is read with. Raises CacheError if they have changed."""
        if self.get_seq_length():
            check_same_adapters(self.adapters, adapters)
        self.adapters = adapters

    def reorder_cache(self, beam_idx: Any) -> None:
        """Make row i a copy of the row `beam_idx[i]`."""
        super().reorder_cache(beam_idx)
        for other in self.at_prompt_end.values():
            other.reorder_cache(beam_idx)
        self.history.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` [n], in that order."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make `repeats` copies of each row. Raises CacheError for less than one."""
        limits = f"the number of copies of each row: give a whole number from 1 to {MAX_COUNT}."
        repeats = check_count(repeats, CacheError(f"repeats is {repeats!r}, but it is {limits}"), 1, MAX_COUNT)
        rows = torch.arange(self.ragged_layers[0].row_count, device="cpu")
        self.reorder_cache(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        """Drop all stored tokens and free their memory."""
        super().reset()
        self.history, self.at_prompt_end = TokenHistory(), {}
        self.set_image_positions(None)
        self.pass_tracker.reset()

    def activate_past_recording(self) -> None:
        """Prepare for assisted decoding, which cuts off rejected tokens.

        Raises CacheError if the prompt could not be distinguished from the first candidate tokens, or if the model's
        states cannot be rolled back.
        """
        if self.shared.has_states:
            raise CacheError(
                "assisted decoding cuts off rejected tokens, but the states of this model's recurrent or convolution "
                "layers cannot go back; leave it out."
            )
        if not self.prompt_length and self.config.request.prompt_tokens is None:
            raise CacheError(
                "assisted decoding sends its first candidates together with the prompt: give "
                "prompt_tokens=input_ids.shape[1] to RaggedCache, so that they are told apart."
            )
        self.is_assisted = True
        super().activate_past_recording()

    def fill(self, prompt: list[LayerKV]) -> None:
        """Evict from a prompt that has been read already, so that one prefill serves many methods.

        Args:
            prompt: The result of `read_prompt` for the model of this cache.

        Raises:
            CacheError: If the layers of prompt and cache do not match.
        """
        if len(prompt) != len(self.ragged_layers):
            raise CacheError(
                f"the prompt has {len(prompt)} layers, but this cache {len(self.ragged_layers)}; read it again."
            )
        layers, others = as_prompt_kv(prompt).continuation_layers(self.ragged_layers, prompt[0].key.shape[0])
        if others.keys() != self.others.keys():
            raise CacheError("the prompt lacks the sliding-window or recurrent layers; give what read_prompt returned.")
        self.layers, self.others = layers, others
        self.set_image_positions(as_prompt_kv(prompt).positions)
        for layer, kv in zip(self.ragged_layers, prompt, strict=True):
            layer.fill(kv)

    def set_method(self, method: Method) -> None:
        """Evict with `method` from now on, and free the state of the previous method, such as scores of the prompt."""
        self.config = replace(self.config, method=method)
        for layer in self.ragged_layers:
            layer.set_config(self.config)

    def fork(self) -> "RaggedCache":
        """Return a copy that continues independently; `copy.deepcopy` does the same."""
        twin = copy.copy(self)
        twin.name = register_cache(twin)
        twin.history = copy.copy(self.history)
        twin.shared = shared = self.shared.fork()
        twin.pass_tracker = self.pass_tracker.fork()
        twin.at_prompt_end = {index: other.fork() for index, other in self.at_prompt_end.items()}
        layers: list[Any] = self.layers
        twin.layers = [layer.fork(shared) if isinstance(layer, RaggedLayer) else layer for layer in layers]
        twin.ragged_layers = [layer for layer in twin.layers if isinstance(layer, RaggedLayer)]
        twin.set_others({index: other.fork() for index, other in self.others.items()})
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> "RaggedCache":
        # The model and the policy are shared with the copy.
        return self.fork()

    def rewind(self) -> None:
        """Forget all tokens after the prompt.

        Raises:
            CacheError: If some of them were evicted, or if they were read in one pass with the end of the prompt and
                the model has sliding-window or recurrent layers.
        """
        kept = [0 if layer.store is None else layer.store.appended_tokens for layer in self.ragged_layers]
        appended = self.get_seq_length() - self.prompt_length
        check_rewind(appended, min(kept), bool(self.others), self.is_rewindable, bool(self.at_prompt_end))
        if self.at_prompt_end:
            self.set_others({index: other.fork() for index, other in self.at_prompt_end.items()})
        self.pass_tracker.reset()
        for layer in self.ragged_layers:
            layer.crop(layer.prompt_length - layer.get_seq_length())

    @contextmanager
    def temporary_slots(self) -> Iterator[None]:
        """Free the slots that are added in a `with` block, which must remove the tokens that it appends."""
        free_slots = [layer.store.free_slots for layer in self.ragged_layers if layer.store is not None]
        try:
            yield
        finally:
            for layer, count in zip(self.ragged_layers, free_slots, strict=True):
                layer.release(count)

    @contextmanager
    def graphed(self, model: PreTrainedModel, max_new_tokens: int = 512) -> Iterator[None]:
        """Replay the decode steps of a `with` block as one CUDA graph.

        ```python
        with cache.graphed(model):
            output = model.generate(**inputs, past_key_values=cache, max_new_tokens=500)
        ```

        The first step after the prompt is captured, and each head gets free slots for `max_new_tokens` tokens. Other
        calls run without the graph, and the reason is logged: the prompt, a step with several tokens or unsupported
        arguments, a step without free slots, and all steps without a CUDA device.

        Args:
            model: The model that the cache was made for.
            max_new_tokens: The number of tokens that replays can append.
        """
        owner = unwrap_model(model)
        with override_method(owner, "forward", graphed_forward(owner, self, max_new_tokens)):
            yield

    def kept_counts(self) -> list[list[int]]:
        """Return the number of kept entries of each head, `[L][H]`, summed over the batch."""
        return [layer.lens.sum(0).tolist() for layer in self.ragged_layers]

    def realised_retention(self) -> float:
        """Return the share of entries that eviction kept, not counting padding."""
        kept_entries = sum(int(layer.lens.sum()) for layer in self.ragged_layers)
        total = sum(sum(layer.real_tokens) * layer.lens.shape[1] for layer in self.ragged_layers)
        return kept_entries / total if total else 1.0

    def nbytes(self) -> int:
        """Return the bytes of storage, free slots and `other_nbytes` included."""
        return sum(layer.nbytes() for layer in self.ragged_layers) + self.other_nbytes()

    def other_nbytes(self) -> int:
        """Return the bytes of sliding windows and recurrent states, including `at_prompt_end`."""
        return sum(other.nbytes() for other in (*self.others.values(), *self.at_prompt_end.values()))

    def full_nbytes(self) -> int:
        """Return the bytes of an uncompressed cache for the same tokens, other layers included."""
        return sum(layer.full_nbytes() for layer in self.ragged_layers) + sum(x.nbytes() for x in self.others.values())
