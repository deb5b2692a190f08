"""How long a prompt fits into a GPU's memory: tensor by tensor, and under PyTorch's caching allocator.

python -m experiments.prompt_memory    (writes prompt_memory.json)

No GPU and no weights: transformers' own forward pass runs on PyTorch's meta device, where tensors have sizes alone,
with an attention that allocates what FlashAttention does. Its allocations and releases, in their order, are then played
to a model of the allocator, which keeps released memory in segments, cuts them to fit and gives them back only when the
device is full: the rules of PyTorch's CUDACachingAllocator with its default settings. Needs transformers 5.23:
older ones cannot run on the meta device.
"""

from bisect import bisect_left
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from experiments.common import parse_options, save_rows
from experiments.profile.memory import LiveBytes
from experiments.profile.predict import longest_prompt
from experiments.profile.random_models import read_config
from lkv.hf.shapes import Shape

_ATTENTION = "lkv_sizes_alone"
_SMALL, _STEP, _ROUND = 2**20, 2 * 2**20, 512  # up to _SMALL bytes: blocks of other segments, too few to matter
_MIDDLE, _SEGMENT = 10 * 2**20, 20 * 2**20  # below _MIDDLE a segment has _SEGMENT bytes


class Event(NamedTuple):
    """A storage that is made (`nbytes` above 0) or released (0)."""

    storage: int
    nbytes: int


class FullError(Exception):
    """The device has no room."""


class _Block:
    """A piece of a segment, which lists all of its pieces in their order."""

    def __init__(self, nbytes: int, segment: "list[_Block]"):
        self.nbytes, self.free, self.segment = nbytes, False, segment


class CachingAllocator:
    """Segments of a device of `memory` bytes: `held` by tensors, and `reserved` from the device."""

    def __init__(self, memory: float):
        self._memory = memory
        self.held = self.reserved = 0
        self._free: list[_Block] = []

    def take(self, nbytes: int) -> _Block:
        """A block for a tensor of `nbytes` bytes. Raises FullError."""
        nbytes = -(-nbytes // _ROUND) * _ROUND
        fitting = [block for block in self._free if block.nbytes >= nbytes]
        block = min(fitting, key=lambda own: own.nbytes) if fitting else self._segment(nbytes)
        if block in self._free:
            self._free.remove(block)
        block.free = False
        if block.nbytes - nbytes > _SMALL:
            rest, block.nbytes = _Block(block.nbytes - nbytes, block.segment), nbytes
            block.segment.insert(block.segment.index(block) + 1, rest)
            self._release(rest)
        self.held += block.nbytes
        return block

    def give(self, block: _Block) -> None:
        """Take the block of a tensor back."""
        self.held -= block.nbytes
        self._release(block)

    def _release(self, block: _Block) -> None:
        """Mark a block as free, one with free neighbours in its segment."""
        place = block.segment.index(block)
        for other in block.segment[max(0, place - 1) : place + 2]:
            if other.free:
                self._free.remove(other)
                block.segment.remove(other)
                block.nbytes += other.nbytes
        block.free = True
        self._free.append(block)

    def _segment(self, nbytes: int) -> _Block:
        size = _SEGMENT if nbytes < _MIDDLE else -(-nbytes // _STEP) * _STEP
        if self.reserved + size > self._memory:
            # Only whole segments can be given back.
            whole = [block for block in self._free if len(block.segment) == 1]
            self._free = [block for block in self._free if block not in whole]
            self.reserved -= sum(block.nbytes for block in whole)
        if self.reserved + size > self._memory:
            raise FullError
        self.reserved += size
        segment: list[_Block] = []
        segment.append(_Block(size, segment))
        return segment[0]


class _Recorder(LiveBytes):
    """The storages that are made and released, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._numbers: dict[int, int] = {}

    def add(self, address: int, size: int) -> None:
        self._numbers[address] = len(self.events)
        self.events.append(Event(self._numbers[address], size))
        super().add(address, size)

    def release(self, address: int, size: int) -> None:
        self.events.append(Event(self._numbers.pop(address), 0))
        super().release(address, size)


def _attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[torch.Tensor, None]:
    """What FlashAttention allocates: the output, and a float32 number a row and head."""
    batch, heads, tokens, dim = query.shape
    query.new_empty((batch, heads, tokens), dtype=torch.float32)
    return query.new_empty((batch, tokens, heads, dim)), None


class _Evicting(DynamicLayer):
    """Keeps a share of k and v, and lets the whole go once the layer has attended to it."""

    def __init__(self, share: float):
        super().__init__()
        self._share = share

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        kept_tokens = int(self._share * key_states.shape[2])
        self.held = [x.new_empty((*x.shape[:2], kept_tokens, x.shape[3])) for x in (key_states, value_states)]
        return key_states, value_states


class Trace:
    """What reading a prompt with the model of `config` allocates and releases, in bfloat16."""

    def __init__(self, config: Any, retention: float | None = None, all_logits: bool = False):
        """`retention`: the share kept layer by layer (None: transformers' own cache, whole); `all_logits`: those of
        every token rather than of the last."""
        AttentionInterface.register(_ATTENTION, _attend)
        config._attn_implementation = _ATTENTION
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self._retention, self._all = retention, all_logits

    @torch.no_grad()
    def events(self, tokens: int) -> list[Event]:
        """The weights, then the forward pass over `tokens` tokens."""
        weights = [p.untyped_storage() for p in {id(p): p for p in self._model.parameters()}.values()]
        cache = DynamicCache(config=self._model.config)
        if self._retention is not None:
            cache.layers = [_Evicting(self._retention) for _ in cache.layers]
        ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
        with _Recorder() as recorder:
            self._model(
                ids, past_key_values=cache, use_cache=True, logits_to_keep=0 if self._all else 1,
                position_ids=torch.arange(tokens, device="meta")[None],
            )  # fmt: skip
        return [Event(-1 - i, storage.nbytes()) for i, storage in enumerate(weights)] + list(recorder.events)


def peak(events: list[Event]) -> int:
    """The most bytes that tensors hold at any time."""
    sizes = {event.storage: event.nbytes for event in events if event.nbytes}
    return max(accumulate(event.nbytes or -sizes[event.storage] for event in events))


def fits(events: list[Event], memory: float) -> bool:
    """Whether the allocator has room for all of it in `memory` bytes."""
    allocator, blocks = CachingAllocator(memory), dict[int, _Block]()
    try:
        for storage, nbytes in events:
            if nbytes > _SMALL:
                blocks[storage] = allocator.take(nbytes)
            elif not nbytes and storage in blocks:
                allocator.give(blocks.pop(storage))
    except FullError:
        return False
    return True


def most(trace: Trace, memory: float, allocated: bool, step: int = 1024) -> int:
    """The most tokens, a multiple of `step`, of a prompt that fits: under the allocator, or counting tensors alone."""

    def too_long(number: int) -> bool:
        events = trace.events(number * step)
        return not fits(events, memory) if allocated else peak(events) > memory

    return (bisect_left(range(1024), True, lo=1, key=too_long) - 1) * step


def main() -> None:
    options = parse_options(__doc__, "prompt_memory", config="llama-3.1-8b", memory=[80.0, 79.0], retention=0.15)
    config, methods, rows = read_config(options.config), (("full", None), ("lkv", options.retention)), []
    for memory, (method, retention), logits in product(options.memory, methods, ("last", "all")):
        trace, nbytes = Trace(config, retention, logits == "all"), memory * 2**30
        found = {f"counted by {how}": most(trace, nbytes, how == "allocator") for how in ("allocator", "tensors")}
        if logits == "last":
            found["predicted from the shape"] = longest_prompt(Shape.of(config), nbytes, retention is not None)
        for how, value in found.items():
            row = {"method": method, "logits": logits, "gib": memory, "how": how}
            rows.append(row | {"value": value, "unit": "tokens of the longest prompt"})
            print(f"{memory:g} GiB {method:5} logits of {logits:4} {how:36} {value:>9,}", flush=True)
    save_rows(options, "prompt_memory", rows)


if __name__ == "__main__":
    main()
