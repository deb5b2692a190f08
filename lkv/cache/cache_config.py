"""The settings of a cache, and the state shared by its layers."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lkv.cache.ragged_store import PLAIN, SoftmaxOptions
from lkv.cache.tiers import TierSplit, check_norms, count_tiers
from lkv.errors import CacheError
from lkv.hf.attention import read_weights
from lkv.hf.masks import PaddingReader
from lkv.hf.prompt_kv import LayerKV
from lkv.hf.rotation import Rotation
from lkv.hf.state import PatchedModel
from lkv.kernels import BITS_BY_NAME
from lkv.methods.base import TierBudget, any_flag, check_no_nan
from lkv.methods.budgets import FixedBudget
from lkv.methods.method import Method
from lkv.methods.registry import COMPENSATION
from lkv.methods.request import CompressionRequest, resolve_method
from lkv.methods.selectors import Selector
from lkv.methods.targets import UNQUANTIZED, Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Bounds of the free slots for appended tokens, a quarter of a head's entries by default.
_MIN_SLACK = 16
_MAX_SLACK_CPU, _MAX_SLACK_GPU = 32, 256


@dataclass(frozen=True)
class CacheConfig:
    """The configuration of one model's cache: a request, the method resolved from it, and digests of the weights.

    The digests are those of `read_weights`. Raises CacheError for options that the method does not support.
    """

    method: Method
    request: CompressionRequest
    weights: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.request.streaming:
            self.check_prompt_declared()
        if self.request.bits is not None and self.method.tiers:
            raise CacheError("memory says in which precision entries are stored: leave bits out, or give a retention.")
        if self.stores_scores:
            feature = "streaming" if self.request.streaming else "decode eviction"
            selector = self.method.selector
            can_score = selector.is_local or (selector.scores_entries and not self.request.streaming)
            if not (can_score and isinstance(self.method.budget, FixedBudget)):
                raise CacheError(
                    f"{feature} does not work with {self.method.name!r}: it needs scores that do not depend on the "
                    "whole prompt and budgets that depend on the length alone; use 'lkv'."
                )
            if self.method.compensation:
                raise CacheError(
                    f"{feature} does not work with {self.method.name!r}: compensated entries cannot be evicted from "
                    f"again; use the method without {COMPENSATION!r}."
                )
            if self.method.protected:
                raise CacheError(f"{feature} cannot keep protected spans yet; leave one of the two out.")

    @classmethod
    def resolve(
        cls, request: CompressionRequest, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None" = None
    ) -> "CacheConfig":
        """Resolve a request for `model`; `tokenizer` for methods with a second pass. Raises as `resolve_method`.

        A request that says neither how much to keep nor in how many bits keeps `DEFAULT_MEMORY`.
        """
        request = request.with_default_memory()
        weights = read_weights(model)  # first, so that a policy is compared with the weights as they are now
        return cls(resolve_method(request, model, tokenizer), request, weights)

    @property
    def stores_scores(self) -> bool:
        """Whether scores are stored with the entries, for later evictions."""
        return self.request.streaming or self.request.decode_eviction

    @property
    def tiers(self) -> tuple[TierBudget, ...]:
        """The precisions of stored entries, best first."""
        bits = self.request.bits
        precision = UNQUANTIZED if bits is None else Precision(*[BITS_BY_NAME[bits]] * 2)
        return self.method.tiers or (TierBudget(precision, self.method.budget),)

    @property
    def is_tiered(self) -> bool:
        """Whether some entries may be quantised."""
        return self.request.bits is not None or bool(self.method.tiers)

    def split(self, lens: Tensor, order: Tensor | None) -> TierSplit:
        """Assign entries to tiers; `lens` [tiers, B, H] counts each head's entries, cumulative from the best on.

        `order`: as in `TierSplit`.
        """
        return TierSplit(tuple(tier.precision for tier in self.tiers), count_tiers(lens), order)

    def check_prompt_declared(self) -> None:
        """Raise CacheError unless the length of a prompt in several chunks is known."""
        if self.request.prompt_tokens is None:
            raise CacheError(
                "a prompt read in chunks needs its length: give prompt_tokens=input_ids.shape[1] to RaggedCache."
            )

    def check_prompt_ended(self, tokens: int) -> None:
        """Raise CacheError if an answer starts after `tokens` tokens, before the declared end of the prompt."""
        prompt_tokens = self.request.prompt_tokens
        if prompt_tokens is not None and tokens < prompt_tokens:
            raise CacheError(
                f"prompt_tokens is {prompt_tokens}, but the prompt has {tokens} tokens, and nothing of it has "
                "been evicted: give its own length, input_ids.shape[1]."
            )

    def slack_for(self, entries: int, device: torch.device) -> int:
        """Return the free slots of each head for an average of `entries` entries per head."""
        if self.request.slack is not None:
            return self.request.slack
        most = _MAX_SLACK_CPU if device.type == "cpu" else _MAX_SLACK_GPU
        return min(most, max(_MIN_SLACK, entries // 4))

    def budgeted_slots(self, lengths: list[int]) -> int | None:
        """Return the free slots of each head in the memory budget that decoding evicts to, None without one.

        `lengths`: the tokens of each row.
        """
        target = self.tiers[0].target
        return target.free_slots(min(lengths)) if self.request.decode_eviction and target and lengths else None

    def initial_slots(self, layer: int, lens: Tensor, device: torch.device, lengths: list[int] | None = None) -> int:
        """Return the free slots of `layer` after an eviction that kept `lens` [B, H] entries of `lengths` tokens.

        They differ between layers, so that not all layers reallocate in the same step.
        """
        if lengths and (slots := self.budgeted_slots(lengths)) is not None:
            return slots
        is_default = self.request.slack is None
        if self.method.tiers and is_default:
            return 0  # free slots would count in the prompt's memory budget; the first appended token reallocates
        slack = self.slack_for(mean_entries(lens), device)
        return slack // 2 + layer % (slack // 2) if is_default else slack


@dataclass
class SharedState:
    """State that the layers of one cache share.

    Attributes:
        last_layer: The index of the last evicting layer.
        has_states: Whether the model has recurrent or convolution states.
        has_image_positions: Whether the model has multimodal RoPE.
        positions: The positions [3, B, T] of a prompt with images in such a model, else None.
        buffers: As in `ragged_attention.append_and_attend`.
        padding: Reads the padding of each forward pass once.
        pending_nan_checks: Flags of NaN scores on their devices, not synchronised yet.
        pending_norm_checks: Flags of quantised entries that are not finite, likewise.
        nan_flags: Flags of NaN scores by device, uint8 [1], set by the kernels that rank scores.
    """

    last_layer: int
    has_states: bool = False
    has_image_positions: bool = False
    positions: Tensor | None = None
    buffers: dict[Any, Any] = field(default_factory=dict)
    padding: PaddingReader = field(default_factory=PaddingReader)
    pending_nan_checks: list[Tensor] = field(default_factory=list)
    pending_norm_checks: list[Tensor] = field(default_factory=list)
    nan_flags: dict[torch.device, Tensor] = field(default_factory=dict)

    @classmethod
    def of_model(cls, patched: PatchedModel) -> "SharedState":
        """Return the state of a new cache."""
        has_states = any(kind.is_recurrent for kind in patched.kinds)
        return cls(len(patched.rotations) - 1, has_states, patched.position_hook is not None)

    def fork(self) -> "SharedState":
        """Return the state of a copy of the cache."""
        return SharedState(self.last_layer, self.has_states, self.has_image_positions, self.positions)

    def nan_flag(self, device: torch.device) -> Tensor:
        """Return the flag of `nan_flags` on `device`."""
        if device not in self.nan_flags:
            self.nan_flags[device] = torch.zeros(1, dtype=torch.uint8, device=device)
        return self.nan_flags[device]

    def forget_checks(self) -> None:
        """Drop all pending checks."""
        self.pending_nan_checks.clear()
        self.pending_norm_checks.clear()
        self.nan_flags.clear()

    def check_scores(self, layer: int, selector: Selector, device: torch.device) -> None:
        """Raise CacheError if scores are NaN, or quantised entries not finite.

        On a GPU this synchronises once, in the last layer.
        """
        if device.type == "cpu" or layer == self.last_layer:
            flags = [flag.view(torch.bool)[0] for flag in self.nan_flags.values()]
            checks, norm_checks = self.pending_nan_checks + flags, [*self.pending_norm_checks]
            self.pending_nan_checks.clear()
            self.pending_norm_checks.clear()
            if not (checks or norm_checks) or not any_flag(checks + norm_checks):
                return
            try:
                check_no_nan(selector, checks)
                check_norms(norm_checks)
            except CacheError:
                self.nan_flags.clear()
                raise


@dataclass(frozen=True)
class LayerContext:
    """The context of one layer: its index among the evicting layers, its RoPE, attention sinks and cap of scores.

    `rotation` is None if LKV cannot undo the layer's RoPE.
    """

    index: int
    config: CacheConfig
    shared: SharedState
    rotation: Rotation | None
    softmax_options: SoftmaxOptions = PLAIN

    def prompt_kv(self, key: Tensor, value: Tensor, scale: float, queries: Tensor | None) -> LayerKV:
        """Return a prompt, or a part of it, with the properties of the layer.

        Args:
            key: k after RoPE, [B, H, T, d].
            value: v, [B, H, T, dv].
            scale: The attention scaling factor.
            queries: Queries of the last tokens, [B, Hq, n, d]; None without.
        """
        rotation = self.prompt_rotation
        return LayerKV(key, value, scale, queries, rotation=rotation, **self.softmax_options._asdict())

    @property
    def prompt_rotation(self) -> Rotation | None:
        """`rotation` at the positions of the prompt."""
        return self.rotation and self.rotation.at_positions(self.shared.positions)


def list_contexts(config: CacheConfig, shared: SharedState, patched: PatchedModel) -> list[LayerContext]:
    """Return the context of each evicting layer of a new cache."""
    pairs = enumerate(zip(patched.rotations, patched.sinks, strict=True))
    return [
        LayerContext(index, config, shared, rotation, SoftmaxOptions(sinks, patched.softcap))
        for index, (rotation, sinks) in pairs
    ]


def mean_entries(counts: Tensor) -> int:
    """Return the mean number of entries per head, rounded down."""
    return int(counts.sum()) // max(1, counts.numel())
