"""The plugin's entry point, and a list of all hooks into vLLM.

- `register_backend`: attention over contexts (`attention.py`).
- `InputProcessor.process_inputs`, in the front end: requests are checked, and their pages salted (`requests.py`).
- `Scheduler.update_from_output`, in the engine: requests that lost their context end with an error.
- `GPUModelRunner._model_forward` and `resolve_model_state_cls`, in workers: passes of both runners (`worker.py`).
- `Worker.sample_tokens`: its output names the requests that lost their context.
- `Worker.determine_available_memory`: the contexts' memory is taken from that of the KV cache.
- `Worker.lkv_outcome`, `lkv_statistics`, `lkv_release`: RPCs of the front end (`collective_rpc`).

With an unsupported version of vLLM, the plugin logs one line and is disabled. A context may become unreadable after its
request was checked. The request was then computed without it, in pages that vLLM's prefix cache holds under the
context's salt: the worker names it in its output, and the scheduler takes these pages out of the prefix cache, together
with the requests that have found them there meanwhile, before it schedules any other request.

vLLM loads this module in every process, even without the packages of the extra.
"""

import functools
import logging
from collections.abc import Callable
from inspect import signature
from types import ModuleType
from typing import Any

_HOOK_MARK = "_lkv_hooked"
_LOST = "lkv_lost_requests"  # attribute of ModelRunnerOutput
_LOG = logging.getLogger("vllm.lkv")


def register() -> None:
    """Install the plugin in a process of vLLM (entry point `vllm.general_plugins`); it may be called again."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.input_processor import InputProcessor

        check_parameters(InputProcessor, "process_inputs", "request_id", "prompt", "params")
        check_parameters(Scheduler, "update_from_output", "scheduler_output", "model_runner_output")
        wrap_method(InputProcessor, "process_inputs", _process_inputs)
        wrap_method(Scheduler, "update_from_output", _fail_lost_requests)
        module = "lkv.integrations.vllm.attention"
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{module}.LkvCPUAttentionBackend")
        register_backend(AttentionBackendEnum.FLASH_ATTN, f"{module}.LkvFlashAttentionBackend")
    except (ImportError, AttributeError, TypeError) as error:
        _LOG.warning("Unsupported vLLM version; lkv-cache is disabled (%s).", error)


def _process_inputs(method: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
    request = method(processor, *args, **kwargs)
    extra = request.sampling_params and request.sampling_params.extra_args
    # Other requests do not name a context.
    if any(name.startswith("lkv_") for name in (*(extra or ()), request.cache_salt or "")):
        from lkv.integrations.vllm.requests import check_request

        params = args[2] if len(args) > 2 else kwargs["params"]
        check_request(processor, request, params.max_tokens)
    return request


def check_parameters(owner: type, name: str, *parameters: str) -> None:
    """Raise AttributeError unless `owner` has the method `name` with these parameters."""
    missing = set(parameters) - set(signature(getattr(owner, name)).parameters)
    if missing:
        raise AttributeError(f"{owner.__name__}.{name} has no parameter {min(missing)}")


def wrap_method(owner: type | ModuleType, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method, or a function of a module, by `wrapper`, which gets it as its first argument; once."""
    method = vars(owner)[name]
    if hasattr(method, _HOOK_MARK):
        return

    @functools.wraps(method)
    def wrapped(*args: object, **kwargs: object) -> Any:
        return wrapper(method, *args, **kwargs)

    setattr(wrapped, _HOOK_MARK, True)
    setattr(owner, name, wrapped)


def report_lost_requests(output: object, lost: dict[str, int]) -> Any:
    """Name lost requests in a worker's output, and return it.

    Args:
        output: The output of a pass, or one that is fetched later.
        lost: Each request's first tokens in pages that are right.
    """
    from vllm.v1.outputs import AsyncModelRunnerOutput

    if not isinstance(output, AsyncModelRunnerOutput):
        setattr(output, _LOST, lost)
        return output
    fetch = output.get_output
    output.get_output = lambda: report_lost_requests(fetch(), lost)
    return output


def _fail_lost_requests(method: Any, scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
    """Have the scheduler end lost requests with an error, and forget their pages, before it takes an output."""
    if lost := getattr(model_runner_output, _LOST, None):
        _end_lost_requests(scheduler, scheduler_output, model_runner_output, lost)
    return method(scheduler, scheduler_output, model_runner_output)


def _end_lost_requests(scheduler: Any, scheduled: Any, output: Any, lost: dict[str, int]) -> None:
    manager, size = scheduler.kv_cache_manager, scheduler.block_size
    blocks = {name: list(manager.get_block_ids(name)[0]) for name in scheduler.requests}
    wrong = {block for name, right in lost.items() for block in blocks.get(name, ())[right // size :]}
    # Also those of requests that were aborted or preempted during the pass.
    for request in scheduled.scheduled_new_reqs:
        if request.req_id in lost:
            wrong.update(request.block_ids[0][lost[request.req_id] // size :])
    cached = scheduled.scheduled_cached_reqs
    for name, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if name in lost and new_blocks is not None:
            wrong.update(new_blocks[0])
    failed = lost.keys() & blocks.keys()
    while found := {name for name in blocks.keys() - failed if not wrong.isdisjoint(blocks[name])}:
        failed |= found
        for name in found:
            first = next(place for place, block in enumerate(blocks[name]) if block in wrong)
            wrong.update(blocks[name][first:])
    manager.evict_blocks(wrong)
    for name in failed & output.req_id_to_index.keys():
        if output.sampled_token_ids:
            output.sampled_token_ids[output.req_id_to_index[name]] = []
        output.prompt_logprobs_dict.pop(name, None)
        output.prompt_token_id_logprobs_dict.pop(name, None)
    # vLLM ends these with FINISHED_ERROR as soon as it has taken the output.
    scheduler.encoder_cache_mismatch_reqs |= failed
