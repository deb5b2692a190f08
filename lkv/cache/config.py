"""How a cache reads and evicts, and what its layers share."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lkv.cache.quantization import BITS, require_library
from lkv.errors import CacheError, PromptError
from lkv.integrations.transformers.masks import PaddingReader
from lkv.integrations.transformers.rotation import Rotation
from lkv.methods.budgets import ROUNDING, FixedBudget, RetentionTarget
from lkv.methods.method import Method
from lkv.methods.registry import REFIT
from lkv.methods.selectors import Selector, check_numbers

# Room for appended tokens: a quarter of what a head holds, between these.
_LEAST_SLACK = 16
_CPU_SLACK, _GPU_SLACK = 32, 256
MOST = 2**24  # rows, or tokens of slack: more than memory has room for


@dataclass(frozen=True)
class CacheConfig:
    """How a cache reads and evicts; see `RaggedCache` for the meaning of each, and for the errors."""

    method: Method
    target: RetentionTarget | None
    slack: int | None = None
    prompt_tokens: int | None = None
    streaming: bool = False
    decode_eviction: bool = False
    bits: int | None = None
    rotations: tuple[Rotation | None, ...] = ()

    def __post_init__(self) -> None:
        for name, flag in (("streaming", self.streaming), ("decode_eviction", self.decode_eviction)):
            if not isinstance(flag, bool):
                raise CacheError(f"{name} is {flag!r}, but it is either True or False.")
        if self.slack is not None and (type(self.slack) is not int or not 0 <= self.slack <= MOST):
            raise CacheError(
                f"slack is {self.slack!r}, but it is a number of tokens: give one from 0 to {MOST}, or None."
            )
        if self.prompt_tokens is not None and (type(self.prompt_tokens) is not int or self.prompt_tokens < 1):
            raise CacheError(f"prompt_tokens is {self.prompt_tokens!r}, but a prompt has at least one token.")
        if self.streaming:
            self.check_announced()
        if self.bits is not None and (type(self.bits) is not int or self.bits not in BITS or self.decode_eviction):
            raise CacheError(
                f"bits is {self.bits!r}, but it must be one of {BITS}, and decode eviction works without it."
            )
        if self.scored and not (self.method.selector.is_local and isinstance(self.method.budget, FixedBudget)):
            raise CacheError(
                f"{'streaming' if self.streaming else 'decode eviction'} does not work with {self.method.name!r}: it "
                "needs scores that depend on k and v of the token alone and budgets that depend on the length alone; "
                "use 'lkv'."
            )
        if self.scored and self.method.compensation:
            raise CacheError(
                f"{'streaming' if self.streaming else 'decode eviction'} does not work with {self.method.name!r}: what "
                f"is refitted is not evicted from again; use the method without {REFIT!r}."
            )
        if self.bits is not None:
            require_library()

    def check_announced(self) -> None:
        """Raise CacheError unless it is known how long a prompt in several parts is."""
        if self.prompt_tokens is None:
            raise CacheError(
                "a prompt that comes in parts must be announced: give prompt_tokens=input_ids.shape[1] to RaggedCache."
            )

    def check_ended(self, tokens: int) -> None:
        """Raise CacheError where an answer begins after `tokens`, before the prompt that was announced has ended."""
        if self.prompt_tokens is not None and tokens < self.prompt_tokens:
            raise CacheError(
                f"prompt_tokens is {self.prompt_tokens}, but the prompt has {tokens} tokens, and nothing of it has "
                "been evicted: give its own length, input_ids.shape[1]."
            )

    @property
    def scored(self) -> bool:
        """Whether scores stay with the entries, because some are to be evicted later."""
        return self.streaming or self.decode_eviction

    @property
    def announced(self) -> int:
        """`prompt_tokens`, where it must be known."""
        assert self.prompt_tokens is not None
        return self.prompt_tokens

    def slack_for(self, held: int, device: torch.device) -> int:
        """Room that each head gets, where a head holds `held` entries on average."""
        if self.slack is not None:
            return self.slack
        most = _CPU_SLACK if device.type == "cpu" else _GPU_SLACK
        return min(most, max(_LEAST_SLACK, held // 4))

    def first_room(self, index: int, kept: Tensor, device: torch.device) -> int:
        """Room after an eviction that left `kept` [B, H] to layer number `index`: of another size in each, so that the
        layers are not all re-laid at one step."""
        slack = self.slack_for(mean(kept), device)
        return slack if self.slack is not None else slack // 2 + index % (slack // 2)

    def check_length(self, tokens: int) -> None:
        """Raise PromptError for a prompt of which nothing would be kept."""
        if self.target is not None and tokens * self.target.share(tokens) + ROUNDING < 1:
            raise PromptError(
                f"the prompt has {tokens} tokens: at {self.target} nothing of it would be kept. Give at least "
                f"{math.ceil(1 / self.target.retention)} tokens, or a higher retention."
            )


@dataclass
class Shared:
    """What the layers of one cache, numbered up to `last`, have in common: `buffers` as in
    `ragged_attention.append_and_attend`, and of scores that no device was asked about yet whether some are no numbers,
    `doubts`."""

    last: int
    buffers: dict[Any, Any] = field(default_factory=dict)
    doubts: list[Tensor] = field(default_factory=list)
    padding: PaddingReader = field(default_factory=PaddingReader)

    def check_doubts(self, index: int, selector: Selector, device: torch.device) -> None:
        """Raise CacheError where scores are no numbers. A GPU is asked in the last layer, for all: each would wait."""
        if device.type == "cpu" or index == self.last:
            doubts = self.doubts.copy()
            self.doubts.clear()
            check_numbers(selector, doubts)


@dataclass(frozen=True)
class Layer:
    """What the entries of one layer, number `index`, are held by."""

    index: int
    plan: CacheConfig
    shared: Shared

    @property
    def rotation(self) -> Rotation | None:
        """The layer's RoPE, None where LKV cannot undo it."""
        return self.plan.rotations[self.index]


def mean(counts: Tensor) -> int:
    """Entries a head, rounded down."""
    return int(counts.sum()) // max(1, counts.numel())
