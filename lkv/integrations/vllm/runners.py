"""vLLM's two model runners, each with `ContextPasses` around its forward pass.

- The first runner has no interface for this: `GPUModelRunner._model_forward` is replaced.
- The second runner has one, the model state, which sees every request, pass, metadata and input of the model. vLLM
  takes its class from the model; `resolve_model_state_cls` is replaced, so that it is extended for any model.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lkv.integrations.vllm.batch import RequestWork, Row, attach_batch
from lkv.integrations.vllm.hooks import check_parameters, wrap_method
from lkv.integrations.vllm.passes import ContextPasses

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_states.interface import ModelState
else:
    ModelState = object
_PASSES, _WORK = "lkv_passes", "_lkv_work"


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


def passes_of(runner: Any) -> ContextPasses | None:
    """Return LKV's part of a runner of either kind; None before its first pass."""
    return getattr(getattr(runner, "model_state", runner), _PASSES, None)


def _model_forward(method: Any, runner: Any, input_ids: Any = None, positions: Any = None, **kwargs: Any) -> Any:
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


def _scheduled(runner: Any, passes: ContextPasses) -> Iterator[tuple[str, RequestWork, Row]]:
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

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any):
        super().__init__(vllm_config, model, encoder_cache, device)
        self.lkv_passes = ContextPasses(vllm_config, device)
        self._lkv_requests: dict[str, RequestWork] = {}
        self._lkv_batch: Any = None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
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

    def preprocess_state(self, input_batch: Any, *args: Any, **kwargs: Any) -> None:
        """Plan the pass; vLLM does not call this for dummy passes."""
        super().preprocess_state(input_batch, *args, **kwargs)
        self._lkv_batch = self.lkv_passes.plan(self._scheduled(input_batch))

    def _scheduled(self, input_batch: Any) -> Iterator[tuple[str, RequestWork, Row]]:
        starts, computed = input_batch.query_start_loc_np, input_batch.num_computed_tokens_np
        for index, name in enumerate(input_batch.req_ids):
            if (work := self._lkv_requests.get(name)) is not None:
                yield name, work, Row.of_request(index, starts, computed)

    def prepare_attn(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Give attention LKV's part of the pass."""
        metadata = super().prepare_attn(*args, **kwargs)
        attach_batch(self._lkv_batch, metadata)
        return metadata

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
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

    def postprocess_state(self, *args: Any, **kwargs: Any) -> None:
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


def _resolve_model_state(method: Any, *args: Any, **kwargs: Any) -> type:
    state = method(*args, **kwargs)
    return type(f"Lkv{state.__name__}", (ContextModelState, state), {})
