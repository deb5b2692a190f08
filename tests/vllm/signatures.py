"""What the plugin uses of vLLM, read from its source without importing it: vLLM for CUDA needs no GPU for this.

    python -m tests.vllm.signatures FOLDER...

reads unpacked wheels (with `vllm` and `vllm-*.dist-info`) and writes `signatures.json`, which `test_signatures.py`
compares with what the plugin needs.
"""

import ast
import json
import sys
from pathlib import Path

FILE = Path(__file__).with_name("signatures.json")
# module:name of functions, methods and classes -> parameters or fields that the plugin needs.
NEEDED: dict[str, tuple[str, ...]] = {
    "v1/engine/input_processor:InputProcessor.process_inputs": ("request_id", "prompt", "params"),
    "v1/core/sched/scheduler:Scheduler.update_from_output": ("scheduler_output", "model_runner_output"),
    "v1/core/sched/scheduler:Scheduler": ("kv_cache_manager", "block_size", "requests", "encoder_cache_mismatch_reqs"),
    "v1/core/kv_cache_manager:KVCacheManager.get_block_ids": ("request_id",),
    "v1/core/kv_cache_manager:KVCacheManager.evict_blocks": ("block_ids",),
    "v1/core/sched/output:SchedulerOutput": ("scheduled_new_reqs", "scheduled_cached_reqs"),
    "v1/core/sched/output:NewRequestData": ("req_id", "prompt_token_ids", "sampling_params", "block_ids"),
    "v1/core/sched/output:CachedRequestData": ("req_ids", "new_block_ids"),
    "v1/outputs:ModelRunnerOutput": (
        "req_id_to_index", "sampled_token_ids", "prompt_logprobs_dict", "prompt_token_id_logprobs_dict",
    ),
    "v1/outputs:AsyncModelRunnerOutput.get_output": (),
    "v1/worker/gpu_worker:Worker.sample_tokens": ("grammar_output",),
    "v1/worker/gpu_worker:Worker.determine_available_memory": (),
    "v1/worker/gpu_model_runner:GPUModelRunner._model_forward": ("input_ids", "positions"),
    "v1/worker/gpu_input_batch:CachedRequestState": ("prompt_token_ids", "sampling_params"),
    "v1/worker/gpu/model_states/__init__:resolve_model_state_cls": ("vllm_config", "model"),
    "v1/worker/gpu/model_states/interface:ModelState.__init__": ("vllm_config", "model", "encoder_cache", "device"),
    "v1/worker/gpu/model_states/interface:ModelState.add_request": ("req_index", "new_req_data"),
    "v1/worker/gpu/model_states/interface:ModelState.remove_request": ("req_id",),
    "v1/worker/gpu/model_states/interface:ModelState.preprocess_state": ("input_batch",),
    "v1/worker/gpu/model_states/interface:ModelState.prepare_attn": ("input_batch",),
    "v1/worker/gpu/model_states/interface:ModelState.prepare_inputs": ("input_batch", "req_states"),
    "v1/worker/gpu/model_states/interface:ModelState.postprocess_state": (),
    "v1/worker/gpu/input_batch:InputBatch": (
        "req_ids", "query_start_loc_np", "num_computed_tokens_np", "positions",
    ),
    "v1/attention/backends/registry:register_backend": ("backend", "class_path"),
    "v1/attention/backends/cpu_attn:CPUAttentionMetadata": ("block_table",),
    "v1/attention/backends/flash_attn:FlashAttentionMetadata": ("block_table",),
    "v1/attention/backends/flash_attn:FlashAttentionBackend.get_builder_cls": (),
    "v1/attention/backends/cpu_attn:CPUAttentionBackendImpl.forward": (
        "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output",
    ),
    "v1/attention/backends/flash_attn:FlashAttentionImpl.forward": (
        "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output",
    ),
    "vllm_flash_attn/flash_attn_interface:flash_attn_varlen_func": (
        "q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "seqused_k", "softmax_scale", "causal",
        "block_table", "return_softmax_lse", "fa_version",
    ),
    "plugins/endpoint_plugins/interface:EndpointPlugin.attach_router": ("app",),
    "plugins/endpoint_plugins/interface:EndpointPlugin.init_state": ("engine_client", "state", "args"),
}  # fmt: skip
# The second runner's pass, which plans before it makes metadata, and these before inputs.
CALLS = "v1/worker/gpu/model_runner:GPUModelRunner.execute_model"


def read_signatures(package: Path) -> dict[str, list[str]]:
    """Return the parameters or fields of all names in `NEEDED`, and the calls of the model state in a pass.

    Args:
        package: vLLM's own folder.
    """
    found = {}
    for name in (*NEEDED, CALLS):
        module, _, path = name.partition(":")
        node: ast.AST = ast.parse((package / f"{module}.py").read_text())
        for part in path.split("."):
            children = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part]
            if not children:
                break
            node = children[-1]
        else:
            fields = _calls(node) if name == CALLS else _names(node)
            found[name] = [x for x in fields if x in NEEDED[name]] if isinstance(node, ast.ClassDef) else fields
    return found


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return [argument.arg for argument in arguments if argument.arg != "self"]
    fields = {
        part.target.id if isinstance(part.target, ast.Name) else part.target.attr
        for part in ast.walk(node)
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name | ast.Attribute)
    }
    for part in ast.walk(node):
        if isinstance(part, ast.Assign):
            fields |= {target.attr for target in part.targets if isinstance(target, ast.Attribute)}
    return sorted(fields)


def _calls(node: ast.AST) -> list[str]:
    """The methods of the model state that a function calls, in their order."""
    calls = [
        (part.lineno, part.func.attr)
        for part in ast.walk(node)
        if isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and isinstance(part.func.value, ast.Attribute)
        and part.func.value.attr == "model_state"
    ]
    return [name for _, name in sorted(calls)]


def main(folders: list[str]) -> None:
    """Write the signatures of these unpacked wheels."""
    versions = {}
    for folder in map(Path, folders):
        (info,) = folder.glob("vllm*-*.dist-info")
        versions[info.name.split("-")[1].removesuffix(".dist")] = read_signatures(folder / "vllm")
    FILE.write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
