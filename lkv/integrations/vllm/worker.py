"""Hooks into vLLM's worker: its two model runners, lost requests, the memory of contexts, and RPCs of the front end.

`ContextPasses` is around the forward pass of both runners:

- The first runner has no interface for this: `GPUModelRunner._model_forward` is replaced.
- The second runner has one, the model state, which sees every request, pass, metadata and input of the model. vLLM
  takes its class from the model; `resolve_model_state_cls` is replaced, so that it is extended for any model.
"""

import functools
import logging
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lkv.integrations.vllm.adapter import check_parameters, report_lost_requests, wrap_method
from lkv.integrations.vllm.contexts import VllmContexts, plugin_settings
from lkv.integrations.vllm.passes import Batch, ContextPasses, RequestWork, Row, attach_batch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_states.interface import ModelState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker
else:
    ModelState = object
_PASSES, _WORK = "lkv_passes", "_lkv_work"
_LOG = logging.getLogger("vllm.lkv")


@functools.cache
def install_in_worker() -> None:
    """Replace methods of the worker's classes; called when attention is built: no other process loads them."""
    from vllm.v1.worker.gpu_worker import Worker

    install_runners()
    wrap_method(Worker, "sample_tokens", _sample_tokens)
    for worker in (Worker, *Worker.__subclasses__()):
        if "determine_available_memory" in vars(worker):
            wrap_method(worker, "determine_available_memory", _determine_available_memory)
    Worker.lkv_outcome, Worker.lkv_statistics, Worker.lkv_release = _outcome, _statistics, _release
    _ignore_termination_signals()


def _ignore_termination_signals() -> None:
    """Ignore SIGINT and SIGTERM in a worker process, where vLLM would exit at once.

    The engine process receives them too, finishes its requests and then stops its workers.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if getattr(signal.getsignal(number), "__qualname__", "").startswith("WorkerProc."):
            signal.signal(number, signal.SIG_IGN)


def _sample_tokens(method: Any, worker: "Worker", *args: object, **kwargs: object) -> Any:
    output = method(worker, *args, **kwargs)
    passes = passes_of(worker.model_runner)
    lost = passes.take_lost_requests() if passes is not None else None
    return report_lost_requests(output, lost) if lost else output


def _determine_available_memory(method: Any, worker: "Worker") -> int:
    available = method(worker)
    config = worker.vllm_config
    extra = config.additional_config
    if config.cache_config.kv_cache_memory_bytes is not None or not isinstance(extra, dict) or "lkv" not in extra:
        return available
    reserved = plugin_settings(config).contexts_bytes
    _LOG.info("%.2f GiB of the KV cache's memory are reserved for contexts", reserved / 2**30)
    return available - reserved


def _worker_contexts(worker: "Worker") -> VllmContexts | None:
    passes = passes_of(worker.model_runner)
    return None if passes is None else vars(passes).get("contexts")  # not opened for this


def _outcome(worker: "Worker", name: str) -> str | None:
    """RPC: `VllmContexts.outcome`."""
    contexts = _worker_contexts(worker)
    return "" if contexts is None else contexts.outcome(name)


def _statistics(worker: "Worker") -> dict[str, Any]:
    """RPC: bytes of the contexts in this worker's memory, and how often contexts were asked for and were there."""
    contexts = _worker_contexts(worker)
    if contexts is None:
        return {"resident": {}, "queries": 0, "hits": 0}
    store = contexts.store
    return {"resident": store.resident(), "queries": store.queries, "hits": store.hits}


def _release(worker: "Worker", name: str) -> None:
    """RPC: drop a deleted context from this worker's memory."""
    contexts = _worker_contexts(worker)
    if contexts is not None:
        contexts.store.release(name)


def install_runners() -> None:
    """Extend both runners. Raises AttributeError or ImportError if this vLLM does not fit."""
    from vllm.v1.worker.gpu import model_states
    from vllm.v1.worker.gpu.model_states.interface import ModelState as State
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    check_parameters(GPUModelRunner, "_model_forward", "input_ids", "positions")
    for name, parameters in _STATE_METHODS.items():
        check_parameters(State, name, *parameters)
    wrap_method(GPUModelRunner, "_model_forward", _model_forward)
    wrap_method(model_states, "resolve_model_state_cls", _resolve_model_state)


def passes_of(runner: "GPUModelRunner") -> ContextPasses | None:
    """Return LKV's part of a runner of either kind; None before its first pass."""
    return getattr(getattr(runner, "model_state", runner), _PASSES, None)


def _model_forward(
    method: Any, runner: "GPUModelRunner", input_ids: Any = None, positions: Any = None, **kwargs: object
) -> Any:
    """Run a pass of the first runner."""
    from vllm.forward_context import get_forward_context

    metadata, batch = get_forward_context().attn_metadata, None
    passes = passes_of(runner)
    if passes is None:
        passes = ContextPasses(runner.vllm_config, runner.device)
        setattr(runner, _PASSES, passes)
    if isinstance(metadata, dict):  # neither a dummy pass nor one of micro-batches
        batch = passes.plan(_scheduled(runner, passes))
        attach_batch(batch, metadata)
    if batch is None:
        return method(runner, input_ids=input_ids, positions=positions, **kwargs)
    # In place: a CUDA graph reads this tensor and no other.
    batch.shift(positions)
    try:
        out = method(runner, input_ids=input_ids, positions=positions, **kwargs)
    finally:
        batch.shift(positions, -1)
    passes.finish(batch)
    return out


def _scheduled(runner: "GPUModelRunner", passes: ContextPasses) -> Iterator[tuple[str, RequestWork, Row]]:
    """Yield LKV's requests in a pass of the first runner."""
    batch, starts = runner.input_batch, runner.query_start_loc.np
    for index, name in enumerate(batch.req_ids):
        state = runner.requests[name]
        if not hasattr(state, _WORK):
            setattr(state, _WORK, passes.open_request(name, state.prompt_token_ids, state.sampling_params))
        work = getattr(state, _WORK)
        if work is not None:
            yield name, work, Row.of_request(index, starts, batch.num_computed_tokens_cpu)


class ContextModelState(ModelState):
    """A model state of the second runner, in front of the one that vLLM has for the model."""

    def __init__(self, vllm_config: "VllmConfig", model: nn.Module, encoder_cache: object, device: torch.device):
        super().__init__(vllm_config, model, encoder_cache, device)
        self.lkv_passes = ContextPasses(vllm_config, device)
        self._lkv_requests: dict[str, RequestWork] = {}
        self._lkv_batch: Batch | None = None

    def add_request(self, req_index: int, new_req_data: "NewRequestData") -> None:
        """Load the request's context; a request that was preempted comes again."""
        super().add_request(req_index, new_req_data)
        name = new_req_data.req_id
        work = self.lkv_passes.open_request(name, new_req_data.prompt_token_ids, new_req_data.sampling_params)
        if work is not None:
            self._lkv_requests[name] = work

    def remove_request(self, req_id: str) -> None:
        """Drop what `add_request` made."""
        super().remove_request(req_id)
        self._lkv_requests.pop(req_id, None)

    def preprocess_state(self, input_batch: "InputBatch", *args: object, **kwargs: object) -> None:
        """Plan the pass; vLLM does not call this for dummy passes."""
        super().preprocess_state(input_batch, *args, **kwargs)
        self._lkv_batch = self.lkv_passes.plan(self._scheduled(input_batch))

    def _scheduled(self, input_batch: "InputBatch") -> Iterator[tuple[str, RequestWork, Row]]:
        starts, computed = input_batch.query_start_loc_np, input_batch.num_computed_tokens_np
        for index, name in enumerate(input_batch.req_ids):
            if (work := self._lkv_requests.get(name)) is not None:
                yield name, work, Row.of_request(index, starts, computed)

    def prepare_attn(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """Give attention LKV's part of the pass."""
        metadata = super().prepare_attn(*args, **kwargs)
        attach_batch(self._lkv_batch, metadata)
        return metadata

    def prepare_inputs(self, input_batch: "InputBatch", req_states: object) -> dict[str, Any]:
        """Shift the positions that the model gets."""
        inputs = super().prepare_inputs(input_batch, req_states)
        if self._lkv_batch is None:
            return inputs
        # In place: a CUDA graph reads this tensor and no other. The next pass fills it anew, and sampling, which reads
        # positions too (min_tokens, seeds), gets those of the question.
        positions = input_batch.positions
        input_batch.positions = positions.clone()
        self._lkv_batch.shift(positions)
        return {**inputs, "positions": positions}

    def postprocess_state(self, *args: object, **kwargs: object) -> None:
        """Finish the pass."""
        super().postprocess_state(*args, **kwargs)
        batch, self._lkv_batch = self._lkv_batch, None
        if batch is not None:
            self.lkv_passes.finish(batch)


_STATE_METHODS = {
    "__init__": ("vllm_config", "model", "encoder_cache", "device"),
    "add_request": ("req_index", "new_req_data"),
    "remove_request": ("req_id",),
    "preprocess_state": ("input_batch",),
    "prepare_attn": ("input_batch",),
    "prepare_inputs": ("input_batch", "req_states"),
    "postprocess_state": (),
}


def _resolve_model_state(method: Any, *args: object, **kwargs: object) -> type:
    state = method(*args, **kwargs)
    return type(f"Lkv{state.__name__}", (ContextModelState, state), {})
