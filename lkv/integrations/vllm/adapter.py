"""The plugin's entry point, and every place where it hooks into vLLM: what a new version of vLLM may change.

- `register_backend`: attention over contexts (`attention.py`).
- `InputProcessor.process_inputs`, in the front end: requests are checked, and their pages salted (`requests.py`).
- `GPUModelRunner._model_forward`, in workers: positions are shifted, and the pass is planned (`batch.py`).
- `Worker.determine_available_memory`: the contexts' memory is taken from that of the KV cache.
- `Worker.lkv_outcome`, `lkv_statistics`, `lkv_release`: what the front end asks workers (`collective_rpc`).

On a version that does not fit, one line says so and vLLM runs as it would without the plugin.
"""

import functools
import logging
import signal
from inspect import signature
from typing import Any

_HOOK_MARK = "_lkv_hooked"
_LOG = logging.getLogger("vllm.lkv")


def register() -> None:
    """Install the plugin in a process of vLLM (entry point `vllm.general_plugins`); it may be called again."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
        from vllm.v1.engine.input_processor import InputProcessor

        _check(InputProcessor, "process_inputs", "request_id", "prompt", "params")
        _wrap(InputProcessor, "process_inputs", _process_inputs)
        module = "lkv.integrations.vllm.attention"
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{module}.LkvCPUAttentionBackend")
        register_backend(AttentionBackendEnum.FLASH_ATTN, f"{module}.LkvFlashAttentionBackend")
    except (ImportError, AttributeError, TypeError) as error:
        _LOG.warning("this version of vLLM does not fit lkv-cache, which leaves it unchanged (%s)", error)


@functools.cache
def install_in_worker() -> None:
    """Hook into the worker's classes; called when attention is built: no other process loads them."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    _check(GPUModelRunner, "_model_forward", "input_ids", "positions")
    _wrap(GPUModelRunner, "_model_forward", _model_forward)
    for worker in (Worker, *Worker.__subclasses__()):
        if "determine_available_memory" in vars(worker):
            _wrap(worker, "determine_available_memory", _determine_available_memory)
    Worker.lkv_outcome, Worker.lkv_statistics, Worker.lkv_release = _outcome, _statistics, _release
    _leave_the_end_to_the_engine()


def _leave_the_end_to_the_engine() -> None:
    """Ignore, in a worker's own process, the signals that a terminal or a service manager sends to all processes.

    The engine gets them too, lets running requests end, and then ends its workers. vLLM's workers would end at once.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if getattr(signal.getsignal(number), "__qualname__", "").startswith("WorkerProc."):
            signal.signal(number, signal.SIG_IGN)


def _check(owner: type, name: str, *parameters: str) -> None:
    """Raise AttributeError unless `owner` has the method `name` with these parameters."""
    missing = set(parameters) - set(signature(getattr(owner, name)).parameters)
    if missing:
        raise AttributeError(f"{owner.__name__}.{name} has no parameter {min(missing)}")


def _wrap(owner: type, name: str, wrapper: Any) -> None:
    """Replace a method by `wrapper`, which gets the method as its first argument; once."""
    method = vars(owner)[name]
    if hasattr(method, _HOOK_MARK):
        return

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(method, *args, **kwargs)

    setattr(wrapped, _HOOK_MARK, True)
    setattr(owner, name, wrapped)


def _process_inputs(method: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
    request = method(processor, *args, **kwargs)
    extra = request.sampling_params and request.sampling_params.extra_args
    # Others name no context, and are not LKV's.
    if any(name.startswith("lkv_") for name in (*(extra or ()), request.cache_salt or "")):
        from lkv.integrations.vllm.requests import check_request

        params = args[2] if len(args) > 2 else kwargs["params"]
        check_request(processor, request, params.max_tokens)
    return request


def _model_forward(method: Any, runner: Any, input_ids: Any = None, positions: Any = None, **kwargs: Any) -> Any:
    from vllm.forward_context import get_forward_context

    from lkv.integrations.vllm.attention import BATCH_KEY
    from lkv.integrations.vllm.batch import Batch

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
    from lkv.integrations.vllm.contexts import PluginSettings

    reserved = int(PluginSettings.of(config).memory * 2**20)
    _LOG.info("%.2f GiB of the KV cache's memory are reserved for contexts", reserved / 2**30)
    return available - reserved


def _outcome(worker: Any, name: str) -> str | None:
    """RPC: `VllmContexts.outcome`."""
    contexts = _loaded_contexts(worker)
    return "" if contexts is None else contexts.outcome(name)


def _statistics(worker: Any) -> dict[str, Any]:
    """RPC: bytes of the contexts in this worker's memory, and how often contexts were asked for and were there."""
    contexts = _loaded_contexts(worker)
    if contexts is None:
        return {"resident": {}, "queries": 0, "hits": 0}
    store = contexts.store
    return {"resident": store.resident(), "queries": store.queries, "hits": store.hits}


def _release(worker: Any, name: str) -> None:
    """RPC: drop a deleted context from this worker's memory."""
    contexts = _loaded_contexts(worker)
    if contexts is not None:
        contexts.store.release(name)


def _loaded_contexts(worker: Any) -> Any:
    from lkv.integrations.vllm.contexts import loaded_contexts

    return loaded_contexts(worker.model_runner)
