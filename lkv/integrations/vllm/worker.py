"""Hooks into vLLM's worker: its runners, lost requests, the memory of contexts, and calls of the front end (RPC)."""

import functools
import logging
import signal
from typing import Any

from lkv.integrations.vllm.contexts import VllmContexts, loaded_contexts, plugin_settings
from lkv.integrations.vllm.hooks import wrap_method
from lkv.integrations.vllm.lost_requests import report_lost_requests
from lkv.integrations.vllm.runners import install_runners, passes_of

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


def _sample_tokens(method: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    output = method(worker, *args, **kwargs)
    passes = passes_of(worker.model_runner)
    lost = passes.take_lost_requests() if passes is not None else None
    return report_lost_requests(output, lost) if lost else output


def _determine_available_memory(method: Any, worker: Any) -> int:
    available = method(worker)
    config = worker.vllm_config
    extra = config.additional_config
    if config.cache_config.kv_cache_memory_bytes is not None or not isinstance(extra, dict) or "lkv" not in extra:
        return available
    reserved = plugin_settings(config).contexts_bytes
    _LOG.info("%.2f GiB of the KV cache's memory are reserved for contexts", reserved / 2**30)
    return available - reserved


def _worker_contexts(worker: Any) -> VllmContexts | None:
    passes = passes_of(worker.model_runner)
    return None if passes is None else loaded_contexts(passes)


def _outcome(worker: Any, name: str) -> str | None:
    """RPC: `VllmContexts.outcome`."""
    contexts = _worker_contexts(worker)
    return "" if contexts is None else contexts.outcome(name)


def _statistics(worker: Any) -> dict[str, Any]:
    """RPC: bytes of the contexts in this worker's memory, and how often contexts were asked for and were there."""
    contexts = _worker_contexts(worker)
    if contexts is None:
        return {"resident": {}, "queries": 0, "hits": 0}
    store = contexts.store
    return {"resident": store.resident(), "queries": store.queries, "hits": store.hits}


def _release(worker: Any, name: str) -> None:
    """RPC: drop a deleted context from this worker's memory."""
    contexts = _worker_contexts(worker)
    if contexts is not None:
        contexts.store.release(name)
