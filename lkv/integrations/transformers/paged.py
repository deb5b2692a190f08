"""transformers' continuous batching for requests that follow a compressed context (their prefix).

transformers sees the question alone and manages its pages. This module shifts positions by the prefix's length, merges
attention over the pages with attention over the prefix's KV entries by their log-sum-exp, and samples each request's
tokens separately. It is reached through the attention function of a patched model; other uses of that model, at the
same time, too, are unaffected.
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
from typing_extensions import override

from lkv.integrations.transformers.attention import override_attention, patch_attention
from lkv.kernels.ragged_attention import masked_attention, merge_attention, ragged_attention

# Attention scores of a head that are computed at once. Most are masked, but for many short requests one matrix product
# is the fastest.
_MAX_SCORES = 2**18


@dataclass(frozen=True, eq=False)
class Prefix:
    """A context that requests follow: its length, and a layer's k, v, starts and lengths for `ragged_attention`."""

    tokens: int
    pools: Callable[[int], tuple[Tensor, Tensor, Tensor, Tensor]]


class RequestInfo(NamedTuple):
    """One request's prefix and the function that chooses its next token from its ids and logits [V]; None: greedy."""

    prefix: Prefix | None
    choose_token: Callable[[list[int], Tensor], int] | None


class BatchRow(NamedTuple):
    """One request's part of a forward pass: `new` tokens after `past` ones in its pages."""

    new: int
    past: int
    prefix: Prefix | None


class PagedBatch:
    """The attention of one forward pass; its masks are shared by all layers."""

    def __init__(self, rows: list[BatchRow], device: torch.device):
        # New tokens, keys and their visibility [1, 1, n, k], for groups of requests that are computed at once.
        self._blocks: list[tuple[slice, slice, Tensor]] = []
        groups: list[list[BatchRow]] = []
        places: dict[Prefix, list[int]] = {}
        new = stored = start = first = 0
        for row in rows:
            new, stored = new + row.new, stored + row.new + row.past
            if not groups or new * stored > _MAX_SCORES:
                groups.append([])
                new, stored = row.new, row.new + row.past
            groups[-1].append(row)
            if row.prefix is not None:
                places.setdefault(row.prefix, []).extend(range(start, start + row.new))
            start += row.new
        # The positions in the batch of the new tokens that follow each prefix.
        self._prefixes = [(prefix, torch.tensor(positions, device=device)) for prefix, positions in places.items()]
        start = 0
        for group in groups:
            visible = torch.block_diag(
                *(torch.ones(row.new, row.new + row.past, dtype=torch.bool).tril(row.past) for row in group)
            )
            new, stored = visible.shape
            mask = visible.bool().to(device)[None, None]
            self._blocks.append((slice(start, start + new), slice(first, first + stored), mask))
            start, first = start + new, first + stored

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, kwargs: dict[str, Any]
    ) -> Tensor:
        """Attention [1, T, Hq, d] of the new tokens `query` [1, Hq, T, d] over their pages and their prefixes."""
        layer: Any = module.layer_idx
        key, value = kwargs["cache"].update(key_states=key, value_states=value, layer_idx=layer, kwargs=kwargs)
        parts = [
            masked_attention(query[:, :, new], key[:, :, stored], value[:, :, stored], visible, scale)
            for new, stored, visible in self._blocks
        ]
        out, lse = (torch.cat(pieces, 2) for pieces in zip(*parts, strict=True))
        for prefix, places in self._prefixes:
            over_prefix = ragged_attention(query[:, :, places], *prefix.pools(layer), scale, causal=False, lse=True)
            out[:, :, places] = merge_attention(out[:, :, places], lse[:, :, places], *over_prefix)[0]
        return out.transpose(1, 2)


class CallbackRouter(OutputRouter):
    """Passes every result to one function, in the thread that computes."""

    def __init__(self, deliver: Callable[[str, list[int], bool, str | None], None]):
        super().__init__()
        self._deliver = deliver

    @override
    def deliver(self, output: GenerationOutput) -> None:
        self._deliver(output.request_id, output.generated_tokens, output.is_finished(), output.error)

    @override
    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            self.deliver(output)


class PrefixBatchingManager(ContinuousBatchingManager):
    """transformers' manager for requests with prefixes; add them with `submit`.

    `deliver(request, ids so far, whether it has ended, error)` is called in the computing thread, as is
    `on_failure(error)` when an exception has ended that thread. All requests have then been delivered as failed.
    """

    def __init__(
        self, model: Any, pages: int, page_size: int, batch_tokens: int, requests: int,
        deliver: Callable[[str, list[int], bool, str | None], None], on_failure: Callable[[Exception], None],
    ):  # fmt: skip
        patch_attention(model)
        settings = ContinuousBatchingConfig(
            num_blocks=pages, page_size=page_size, max_batch_tokens=batch_tokens, max_requests_per_batch=requests,
            # Pages are found by ids alone: equal questions about different contexts would share them.
            allow_block_sharing=False,
            # Every layer reads the rows of the current pass, in Python.
            use_async_batching=False, use_cuda_graph=False, auto_switch_to_flash=False,
        )  # fmt: skip
        ends = model.generation_config.eos_token_id
        config = GenerationConfig(do_sample=False, eos_token_id=-1 if ends is None else ends, pad_token_id=0)
        super().__init__(model, config, settings)
        self.requests: dict[str, RequestInfo] = {}
        self._cancelled: set[str] = set()
        self._sampling: list[tuple[str, Callable[[Tensor], int] | None]] = []
        self._failures: dict[str, Exception] = {}
        self._deliver, self._on_failure = deliver, on_failure
        self.output_router = CallbackRouter(self._deliver_and_forget)

    @override
    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        pass  # LKV's own attention is used and needs no masks of transformers

    @override
    def start(self) -> None:
        self.background_thread_status.clear()
        thread: Any = threading.Thread(target=self._run, daemon=True)
        self._generation_thread = thread
        thread.start()

    def _run(self) -> None:
        self._run_generation_loop()
        if (error := self.background_thread_status.fatal_error) is not None:
            self._on_failure(error)

    def submit(self, request: str, ids: list[int], max_new_tokens: int, info: RequestInfo) -> bool:
        """Add a request; False if the computing thread has ended."""
        self.requests[request] = info
        if self.add_request(ids, request_id=request, max_new_tokens=max_new_tokens, streaming=True) is not None:
            return True
        self.requests.pop(request, None)
        return False

    @override
    def cancel_request(self, request_id: str) -> None:
        # Its pages and its prefix are released after the current pass.
        self._cancelled.add(request_id)
        super().cancel_request(request_id)

    def _deliver_and_forget(self, request: str, ids: list[int], ended: bool, error: str | None) -> None:
        if ended:
            self.requests.pop(request, None)
        self._deliver(request, ids, ended, error)

    @override
    def _create_batch_processor(self) -> Any:
        processor: Any = super()._create_batch_processor()
        processor.model_runner._sample = self._sample
        return processor

    @override
    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        should_continue = super()._generation_loop_body(batch_processor, bootstrapping)
        for request, error in self._failures.items():
            self._deliver(request, [], True, str(error))
            self.cancel_request(request)
        self._failures = {}
        scheduler = batch_processor.scheduler
        for request in [name for name in list(self._cancelled) if self.cancel_queue.empty()]:
            if request not in scheduler.active_requests and request not in scheduler.waiting_requests:
                self._cancelled.discard(request)
                self.requests.pop(request, None)
        return should_continue

    @override
    def _generation_step(self) -> None:
        assert self.batch_processor is not None
        io: Any = self.batch_processor.inputs_and_outputs
        rows, start = [], 0
        for future in io.requests_in_batch:
            name = future.state.request_id
            info = self.requests.get(name) or RequestInfo(None, None)
            new = future.query_length
            # transformers has counted the new tokens already.
            rows.append(BatchRow(new, future.state.position_offset - new, info.prefix))
            if info.prefix is not None:
                io.position_ids[start : start + new] += info.prefix.tokens
            if future.has_new_token:
                ids = future.state.initial_tokens + future.state.generated_tokens
                self._sampling.append((name, info.choose_token and partial(info.choose_token, ids)))
            start += new
        try:
            # In the block alone, so that prefixes that no request follows any more are released.
            with override_attention(PagedBatch(rows, io.device).attend):
                super()._generation_step()
        finally:
            self._sampling = []

    def _sample(self, scores: Tensor, output_ids: Tensor) -> None:
        """Choose each request's next token from `scores` [1, n, V], instead of transformers' one way for all."""
        chosen = scores[0].argmax(-1)
        for row, (request, choose_token) in enumerate(self._sampling):
            if choose_token is None:
                continue
            try:
                chosen[row] = choose_token(scores[0, row])
            except Exception as error:  # ends this request alone
                self._failures[request] = error
        output_ids[0, : len(chosen)].copy_(chosen)
