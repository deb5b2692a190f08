"""The plugin's entry point, and a list of all hooks into vLLM.

- `register_backend`: attention over contexts (`attention.py`).
- `InputProcessor.process_inputs`, in the front end: requests are checked, and their pages salted (`requests.py`).
- `Scheduler.update_from_output`, in the engine: requests that lost their context end (`lost_requests.py`).
- `GPUModelRunner._model_forward` and `resolve_model_state_cls`, in workers: passes of both runners (`runners.py`).
- `Worker.sample_tokens`: its output names the requests that lost their context (`worker.py`).
- `Worker.determine_available_memory`: the contexts' memory is taken from that of the KV cache.
- `Worker.lkv_outcome`, `lkv_statistics`, `lkv_release`: RPCs of the front end (`collective_rpc`).

With an unsupported version of vLLM, the plugin logs one line and is disabled.
"""

import logging
from typing import Any

from lkv.integrations.vllm.hooks import check_parameters, wrap_method
from lkv.integrations.vllm.lost_requests import fail_lost_requests

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
        wrap_method(Scheduler, "update_from_output", _update_from_output)
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
        # Imported lazily: vLLM loads this module in every process, even without the packages of the extra.
        from lkv.integrations.vllm.requests import check_request

        params = args[2] if len(args) > 2 else kwargs["params"]
        check_request(processor, request, params.max_tokens)
    return request


def _update_from_output(method: Any, scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
    fail_lost_requests(scheduler, scheduler_output, model_runner_output)
    return method(scheduler, scheduler_output, model_runner_output)
