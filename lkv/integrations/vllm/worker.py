"""Hooks into vLLM's worker: forward passes with contexts, the memory of contexts, and calls of the front end (RPC)."""

import functools
import logging
import signal
from typing import Any

from lkv.integrations.vllm.batch import BATCH_KEY, Batch
from lkv.integrations.vllm.contexts import loaded_contexts, plugin_settings
from lkv.integrations.vllm.hooks import check_parameters, wrap_method

_LOG = logging.getLogger("vllm.lkv")


@functools.cache
def install_in_worker() -> None:
    """Replace methods of the worker's classes; called when attention is built: no other process loads them."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    check_parameters(GPUModelRunner, "_model_forward", "input_ids", "positions")
    wrap_method(GPUModelRunner, "_model_forward", _model_forward)
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


def _model_forward(method: Any, runner: Any, input_ids: Any = None, positions: Any = None, **kwargs: Any) -> Any:
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    batch = None if context.attn_metadata is None else Batch.plan(runner)
    if batch is None:
        return method(runner, input_ids=input_ids, positions=positions, **kwargs)
    # In place: a CUDA graph reads this tensor and no other.
    batch.shift(positions)
    context.additional_kwargs[BATCH_KEY] = batch
    try:
        out = method(runner, input_ids=input_ids, positions=positions, **kwargs)
    finally:
        del context.additional_kwargs[BATCH_KEY]
        batch.shift(positions, -1)
    batch.finish(out)
    return out


def _determine_available_memory(method: Any, worker: Any) -> int:
    available = method(worker)
    config = worker.vllm_config
    extra = config.additional_config
    if config.cache_config.kv_cache_memory_bytes is not None or not isinstance(extra, dict) or "lkv" not in extra:
        return available
    reserved = plugin_settings(config).memory_bytes
    _LOG.info("%.2f GiB of the KV cache's memory are reserved for contexts", reserved / 2**30)
    return available - reserved


def _outcome(worker: Any, name: str) -> str | None:
    """RPC: `VllmContexts.outcome`."""
    contexts = loaded_contexts(worker.model_runner)
    return "" if contexts is None else contexts.outcome(name)


def _statistics(worker: Any) -> dict[str, Any]:
    """RPC: bytes of the contexts in this worker's memory, and how often contexts were asked for and were there."""
    contexts = loaded_contexts(worker.model_runner)
    if contexts is None:
        return {"resident": {}, "queries": 0, "hits": 0}
    store = contexts.store
    return {"resident": store.resident(), "queries": store.queries, "hits": store.hits}


def _release(worker: Any, name: str) -> None:
    """RPC: drop a deleted context from this worker's memory."""
    contexts = loaded_contexts(worker.model_runner)
    if contexts is not None:
        contexts.store.release(name)
