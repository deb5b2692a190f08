"""Decode steps as one CUDA graph, captured once and replayed for each token (`RaggedCache.graphed`).

Lengths, positions and pools are on the device, and the kernels update the lengths there, so a captured step is valid
for any length. Replay avoids kernel-launch overhead.
"""

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lkv.cache.cache_config import CacheConfig, SharedState
from lkv.cache.layer import RaggedLayer
from lkv.cache.ragged_store import KVStore
from lkv.errors import CacheError, check_count
from lkv.hf.cache_argument import NAMES, cache_argument, find_cache
from lkv.hf.image_positions import ImageOffset, following_positions
from lkv.hf.model_spec import ModelSpec
from lkv.hf.other_layers import OtherLayer
from lkv.hf.state import TokenHistory
from lkv.kernels.ragged_attention import can_replay
from lkv.methods.request import MAX_COUNT
from lkv.utils import devices
from lkv.utils.overrides import current_method

# A captured step may ignore these arguments if they have these values; otherwise the model runs without the graph.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "use_cache": (True,),
    "return_dict": (True,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "logits_to_keep": (0, 1),
}
_READ = ("input_ids", "position_ids", "attention_mask", *NAMES, "cache_position")


class ReplayableCache(Protocol):
    """The part of the interface of `RaggedCache` that a captured step uses."""

    spec: ModelSpec
    config: CacheConfig
    ragged_layers: list[RaggedLayer]
    on_layer_start: Callable[[int], None] | None
    others: dict[int, OtherLayer]
    history: TokenHistory
    shared: SharedState
    image_offset: ImageOffset | None

    @property
    def prompt_length(self) -> int:
        """The number of tokens of the compressed prompt, 0 before it has ended."""

    def get_seq_length(self) -> int:
        """Return the number of tokens read so far."""

    def begin_pass(self, rows: int, new: int) -> None:
        """Record a forward pass of `new` tokens in each of `rows` rows."""


def graphed_forward(model: PreTrainedModel, cache: ReplayableCache, tokens: int) -> Callable[..., Any]:
    """Return a `model.forward` that replays decode steps of `cache`, up to `tokens` tokens after the prompt.

    Raises CacheError if `tokens` is not a positive number.
    """
    problem = f"max_new_tokens is {tokens!r}, but it is a number of tokens: give one from 1 to {MAX_COUNT}."
    tokens = check_count(tokens, CacheError(problem), 1, MAX_COUNT)
    step, plain = GraphedStep(model, cache, tokens), current_method(model, "forward")

    @functools.wraps(plain)
    def forward(*args: object, **kwargs: object) -> Any:
        if find_cache(kwargs) is not cache:
            return plain(*args, **kwargs)
        if len(args) == 1:
            return forward(input_ids=args[0], **kwargs)
        reason = step.unsupported_reason(args, kwargs) or step.capture(plain, kwargs)
        if reason is None:
            return step.replay(kwargs)
        step.report(reason)
        return plain(*args, **kwargs)

    return forward


class GraphedStep:
    """One decode step of a cache, captured at its first use.

    It keeps references to the stores and buffers that the graph points to, so that their memory is not reused.
    """

    def __init__(self, model: PreTrainedModel, cache: ReplayableCache, tokens: int):
        """`tokens`: the free slots of each head when the step is captured."""
        self._cache, self._tokens = cache, tokens
        self._permanent_reason = _permanent_reason(model, cache)
        self._reported: set[str] = set()
        self._stores: list[KVStore] | None = None

    def unsupported_reason(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """Return why this call cannot be replayed, in one sentence, or None."""
        cache, ids = self._cache, kwargs.get("input_ids")
        if self._permanent_reason is not None:
            return self._permanent_reason
        if not cache.prompt_length:
            return "a prompt is being read."
        if args or ids is None or ids.shape[1] != 1:
            return "more than one token is read, or no token id is given."
        if torch.is_grad_enabled():
            return "gradients are recorded: use torch.no_grad() or model.generate."
        if cache.on_layer_start is not None:
            return "on_layer_start is set, which a replay does not call."
        mask, places = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if (mask is not None and mask.ndim != 2) or (places is not None and places.ndim != 2):
            return "the call has a mask or positions of a form of its own."
        others = [name for name in kwargs if name not in _READ and not _is_default(name, kwargs[name])]
        if others:
            return f"the call has the argument {others[0]!r}, which the captured step does not know."
        if self._stores is None:
            return None
        if any(layer.store is not store for layer, store in zip(cache.ragged_layers, self._stores, strict=True)):
            return "the entries have moved since the step was captured: open a new graphed() block."
        if min(store.free_slots for store in self._stores) < 1:
            return f"no slot that was captured is free: give more than {self._tokens} as max_new_tokens."
        return None

    def report(self, reason: str) -> None:
        """Log why the model runs without a graph, once per reason."""
        if reason not in self._reported:
            self._reported.add(reason)
            logging.getLogger(__name__).info("A step runs without a CUDA graph: %s", reason)

    def capture(self, plain: Callable[..., Any], kwargs: dict[str, Any]) -> str | None:
        """Capture the step unless it is captured already; return the reason if it cannot be, in one sentence."""
        if self._stores is not None:
            return None
        cache, ids = self._cache, kwargs["input_ids"]
        with torch.inference_mode(False):
            self._ids, self._positions = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.long)
        self._positions.fill_(cache.get_seq_length())

        def step() -> Any:
            return plain(input_ids=self._ids, position_ids=self._positions, **cache_argument(cache), use_cache=True)

        try:
            # Warm-up steps before the capture add no tokens to the text.
            with _discarded_steps(cache) as self._buffers:
                for layer in cache.ragged_layers:
                    layer.reserve(max(self._tokens, devices.STEPS_OF_CAPTURE))
                stores = [layer.store for layer in cache.ragged_layers if layer.store is not None]
                self._replay, self._output = devices.capture(step, ids.device)
                self._stores = stores
        except Exception as error:
            self._permanent_reason = (
                f"it could not be captured ({type(error).__name__}: {str(error).splitlines()[0][:200]})."
            )
        return self._permanent_reason

    def replay(self, kwargs: dict[str, Any]) -> Any:
        """Replay the step for one more token and return the model's output."""
        cache, ids, positions = self._cache, kwargs["input_ids"], kwargs.get("position_ids")
        self._ids.copy_(ids)
        if positions is None:
            positions = following_positions(cache.image_offset, None, cache.get_seq_length(), ids)
        self._positions.copy_(positions)
        cache.begin_pass(*ids.shape)
        self._replay()
        for store in self._stores or ():
            store.count_appended(1)
        output = self._output
        return type(output)(**{name: x.clone() if isinstance(x, Tensor) else x for name, x in output.items()})


@contextmanager
def _discarded_steps(cache: ReplayableCache) -> Iterator[dict[Any, Any]]:
    """Undo the warm-up decode steps of a `with` block; yields the work buffers of these steps."""
    length, history, buffers = cache.get_seq_length(), copy.copy(cache.history), cache.shared.buffers
    cache.shared.buffers = {}
    try:
        yield cache.shared.buffers
    finally:
        for layer in cache.ragged_layers:
            layer.crop(length - layer.get_seq_length())
        cache.history, cache.shared.buffers = history, buffers


def _is_default(name: str, value: object) -> bool:
    return value is None or (isinstance(value, int) and value in _DEFAULTS.get(name, ()))


def _permanent_reason(model: PreTrainedModel, cache: ReplayableCache) -> str | None:
    """Return why no step of `cache` can be captured, in one sentence; None if it can."""
    weights = next(model.parameters())
    if not devices.can_capture(weights.device):
        return f"the model is on {weights.device.type!r}, but CUDA graphs need a CUDA device."
    if len({weight.device for weight in model.parameters()}) > 1:
        return "the model is spread over several devices."
    if cache.others:
        return "the model has sliding-window or recurrent layers, which lie elsewhere after every token."
    if any(layer.context.softmax_options.sinks is not None for layer in cache.ragged_layers):
        return "the model has attention sinks, which are not joined by the kernel."
    if cache.config.request.decode_eviction:
        return "decode_eviction chooses among the entries while tokens are generated."
    if not can_replay(weights.device, weights.dtype, cache.spec.head_dim):
        return "attention over the entries runs without Triton here, and waits for the host."
    return None
