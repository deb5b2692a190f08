"""The plugin's entry point, and a list of all hooks into vLLM.

- `register_backend`: attention over contexts (`attention.py`).
- `InputProcessor.process_inputs`, in the front end: requests are checked, and their pages salted (`requests.py`).
- `GPUModelRunner._model_forward`, in workers (`worker.py`): positions are shifted, the pass is planned (`batch.py`).
- `Worker.determine_available_memory`: the contexts' memory is taken from that of the KV cache.
- `Worker.lkv_outcome`, `lkv_statistics`, `lkv_release`: RPCs of the front end (`collective_rpc`).

With an unsupported version of vLLM, the plugin logs one line and is disabled.
"""

import logging
from typing import Any

from lkv.integrations.vllm.hooks import check_parameters, wrap_method

_LOG = logging.getLogger("vllm.lkv")


def register() -> None:
    """Install the plugin in a process of vLLM (entry point `vllm.general_plugins`); it may be called again."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
        from vllm.v1.engine.input_processor import InputProcessor

        check_parameters(InputProcessor, "process_inputs", "request_id", "prompt", "params")
        wrap_method(InputProcessor, "process_inputs", _process_inputs)
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
