"""transformers' continuous batching where requests follow texts that were read elsewhere.

The library sees the question alone: its scheduler, its pages and their freeing are its own. Here positions are shifted
by the text's length, attention over the pages is joined with attention over the text's pools by their log-sum-exp, and
each request draws its tokens in its own way. Nothing global changes: a model to which LKV is attached reaches this by
the attention function that it has already, and its other uses go on meanwhile.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager, OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput

from lkv.integrations.transformers.attention import PAGED, patch_attention
from lkv.kernels.ragged_attention import masked_attention, merge_attention, ragged_attention

# Scores of a head that are computed at once, most of them hidden: of many short requests one product is the fastest.
_SCORES = 2**18


@dataclass(frozen=True, eq=False)
class Prefix:
    """A text that requests follow: its length, and the pools, starts and lengths of a layer as `ragged_attention` has
    them. It is only read."""

    tokens: int
    pools: Callable[[int], tuple[Tensor, Tensor, Tensor, Tensor]]


class Follower(NamedTuple):
    """What the batch must know of one request: the text that it follows, and what chooses its tokens from the request's
    ids so far and logits [V]; None takes the most probable."""

    prefix: Prefix | None
    choose: Callable[[list[int], Tensor], int] | None


class Row(NamedTuple):
    """One request's share of a forward pass: `new` tokens after `past` ones that lie in its pages."""

    new: int
    past: int
    prefix: Prefix | None


class PagedBatch:
    """The attention of one forward pass: all its layers share the masks."""

    def __init__(self, rows: list[Row], device: torch.device):
        self._blocks = _blocks(rows, device)
        self._texts = _followers(rows, device)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, kwargs: dict[str, Any]
    ) -> Tensor:
        """Attention [1, T, Hq, d] of the new tokens `query` [1, Hq, T, d] over their pages and their texts."""
        layer: Any = module.layer_idx
        key, value = kwargs["cache"].update(key_states=key, value_states=value, layer_idx=layer, kwargs=kwargs)
        parts = [
            masked_attention(query[:, :, new], key[:, :, held], value[:, :, held], visible, scale)
            for new, held, visible in self._blocks
        ]
        out, lse = (torch.cat(pieces, 2) for pieces in zip(*parts, strict=True))
        for prefix, places in self._texts:
            over_text = ragged_attention(query[:, :, places], *prefix.pools(layer), scale, causal=False, lse=True)
            out[:, :, places] = merge_attention(out[:, :, places], lse[:, :, places], *over_text)[0]
        return out.transpose(1, 2)


def _blocks(rows: list[Row], device: torch.device) -> list[tuple[slice, slice, Tensor]]:
    """New tokens, keys and what of these is visible [1, 1, n, k], for runs of requests that are computed at once."""
    runs: list[list[Row]] = []
    new = held = 0
    for row in rows:
        new, held = new + row.new, held + row.new + row.past
        if not runs or new * held > _SCORES:
            runs.append([])
            new, held = row.new, row.new + row.past
        runs[-1].append(row)
    blocks, start, first = [], 0, 0
    for run in runs:
        visible = torch.block_diag(
            *(torch.ones(row.new, row.new + row.past, dtype=torch.bool).tril(row.past) for row in run)
        )
        new, held = visible.shape
        mask = visible.bool().to(device)[None, None]
        blocks.append((slice(start, start + new), slice(first, first + held), mask))
        start, first = start + new, first + held
    return blocks


def _followers(rows: list[Row], device: torch.device) -> list[tuple[Prefix, Tensor]]:
    """The places of the new tokens that follow each text."""
    places: dict[Prefix, list[int]] = {}
    start = 0
    for row in rows:
        if row.prefix is not None:
            places.setdefault(row.prefix, []).extend(range(start, start + row.new))
        start += row.new
    return [(prefix, torch.tensor(rows_of, device=device)) for prefix, rows_of in places.items()]


class Results(OutputRouter):
    """Gives every result to one function, in the thread that computes."""

    def __init__(self, deliver: Callable[[str, list[int], bool, str | None], None]):
        super().__init__()
        self._deliver = deliver

    def deliver(self, output: GenerationOutput) -> None:
        self._deliver(output.request_id, output.generated_tokens, output.is_finished(), output.error)

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            self.deliver(output)


class FollowingManager(ContinuousBatchingManager):
    """transformers' manager for requests that follow texts; `follow` them before they are added.

    `deliver(request, ids so far, whether it has ended, error)` is called in the computing thread.
    """

    def __init__(
        self, model: Any, pages: int, page_size: int, batch_tokens: int, requests: int,
        deliver: Callable[[str, list[int], bool, str | None], None],
    ):  # fmt: skip
        patch_attention(model)
        settings = ContinuousBatchingConfig(
            num_blocks=pages, page_size=page_size, max_batch_tokens=batch_tokens, max_requests_per_batch=requests,
            # Pages are found by ids alone: equal questions about different texts would share them.
            allow_block_sharing=False,
            # The rows of the pass at hand are read by every layer, in Python.
            use_async_batching=False, use_cuda_graph=False, auto_switch_to_flash=False,
        )  # fmt: skip
        ends = model.generation_config.eos_token_id
        config = GenerationConfig(do_sample=False, eos_token_id=-1 if ends is None else ends, pad_token_id=0)
        super().__init__(model, config, settings)
        self.followers: dict[str, Follower] = {}
        self._cancelled: set[str] = set()
        self._choices: list[Callable[[Tensor], int] | None] = []
        self._deliver = deliver
        self.output_router = Results(self._delivered)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Nothing: LKV's own attention computes here too, and needs no masks of the library's."""

    def start(self) -> None:
        """Begin to compute, in a thread that does not keep a program from ending."""
        self.background_thread_status.clear()
        thread: Any = threading.Thread(target=self._run_generation_loop, daemon=True)
        self._generation_thread = thread
        thread.start()

    def _delivered(self, request: str, ids: list[int], ended: bool, error: str | None) -> None:
        if ended:
            self.followers.pop(request, None)
        self._deliver(request, ids, ended, error)

    def follow(self, request: str, follower: Follower) -> None:
        """Say what the request of that name, to be added next, follows."""
        self.followers[request] = follower

    def cancel_request(self, request_id: str) -> None:
        """End a request; its pages are free, and its text let go, after the pass at hand."""
        self._cancelled.add(request_id)
        super().cancel_request(request_id)

    def free_pages(self) -> tuple[int, int]:
        """Pages that no request holds, and all of them."""
        pool = self.batch_processor.cache.pool if self.batch_processor is not None else None
        if pool is None:
            return 0, 0
        pool.try_to_free_sectors()
        return pool.num_free_sectors, pool.num_sectors

    def _create_batch_processor(self) -> Any:
        processor: Any = super()._create_batch_processor()
        processor.model_runner._sample = self._drawn
        return processor

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        goes_on = super()._generation_loop_body(batch_processor, bootstrapping)
        scheduler = batch_processor.scheduler
        for request in [name for name in list(self._cancelled) if self.cancel_queue.empty()]:
            if request not in scheduler.active_requests and request not in scheduler.waiting_requests:
                self._cancelled.discard(request)
                self.followers.pop(request, None)
        return goes_on

    def _generation_step(self) -> None:
        assert self.batch_processor is not None
        io: Any = self.batch_processor.inputs_and_outputs
        rows, start = [], 0
        for future in io.requests_in_batch:
            follower = self.followers.get(future.state.request_id) or Follower(None, None)
            new = future.query_length
            # The library has counted the new tokens already.
            rows.append(Row(new, future.state.position_offset - new, follower.prefix))
            if follower.prefix is not None:
                io.position_ids[start : start + new] += follower.prefix.tokens
            if future.has_new_token:
                ids = future.state.initial_tokens + future.state.generated_tokens
                self._choices.append(follower.choose and partial(follower.choose, ids))
            start += new
        setattr(io.cache, PAGED, PagedBatch(rows, io.device).attend)
        try:
            super()._generation_step()
        finally:
            # What no request follows any more is not held on to.
            delattr(io.cache, PAGED)
            self._choices = []

    def _drawn(self, scores: Tensor, output_ids: Tensor) -> None:
        """In place of the library's own choice, which is one for all requests. `scores` [1, n, V]."""
        chosen = scores[0].argmax(-1)
        for row, choose in enumerate(self._choices):
            if choose is not None:
                chosen[row] = choose(scores[0, row])
        output_ids[0, : len(chosen)].copy_(chosen)
