"""Training with several threads, processes and devices: split the work, and place the frozen model."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from lkv.errors import LkvError, TrainingError
from lkv.hf.attention import patch_attention
from lkv.hf.loading import load_config, load_model, load_tokenizer
from lkv.hf.model_spec import ModelSpec
from lkv.hf.sharding import shard_model
from lkv.hf.spec import inspect_model
from lkv.utils.devices import distributed_state, find_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_at_once(
    function: Callable[[Item], Result], items: Sequence[Item], device: torch.device, most: int
) -> list[Result]:
    """Apply `function` to each item; concurrently on a CPU, where small operations use few cores.

    The sum of the gradients of two items is bitwise equal in either order.

    Args:
        function: What to call.
        items: Its arguments, one for each call.
        device: Where the function computes.
        most: The most concurrent calls, in threads that share PyTorch's.
    """
    threads = torch.get_num_threads()
    workers = min(len(items), most, threads)
    # Autocast is thread-local.
    if device.type != "cpu" or workers < 2 or torch.is_autocast_enabled("cpu"):
        return [function(item) for item in items]
    torch.set_num_threads(threads // workers)
    try:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(function, items))
    finally:
        torch.set_num_threads(threads)


def all_reduce(tensor: Tensor, reduction: str = "sum") -> Tensor:
    """Return the sum or mean of a tensor over all processes."""
    from accelerate.utils import reduce

    return reduce(tensor, reduction)


def average_gradients(parameters: Iterable[torch.nn.Parameter], reduction: str) -> None:
    """Replace each gradient by its sum or mean over all processes; a parameter without one counts as zero."""
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = all_reduce(gradient, reduction)


def split_by_cost(costs: Sequence[float], processes: int) -> list[list[int]]:
    """Split items among processes, with counts that differ by at most one and balanced costs."""
    shares: list[list[int]] = [[] for _ in range(processes)]
    sizes = [len(range(process, len(costs), processes)) for process in range(processes)]
    # Assign the most expensive first, to the process with the least work among those that still need items.
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        free = (process for process in range(processes) if len(shares[process]) < sizes[process])
        shares[min(free, key=lambda process: sum(costs[i] for i in shares[process]))].append(item)
    return [sorted(items) for items in shares]


def select_device(name: str) -> None:
    """Make Accelerate train on the device of --device; each process of a machine uses a separate device of that type.

    Raises LkvError for a device that PyTorch lacks, or that does not support several processes.
    """
    processes = _num_local_processes()
    if name == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    elif processes == 1:
        find_device(name)
        os.environ["ACCELERATE_TORCH_DEVICE"] = name
    elif ":" in name:
        raise TrainingError(
            f"{processes} processes would share the device {name!r}; give --device {name.partition(':')[0]}, of which "
            "each process takes its own, or start one process."
        )
    elif name != (used := distributed_state("train", "training").device.type):
        raise TrainingError(
            f"{processes} processes cannot train on the device {name!r}; give --device {used} or cpu, or start one "
            "process."
        )


def _num_local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def place_model(
    name: str, dtype: torch.dtype, revision: str | None, spread: str
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Load model and tokenizer, with LKV's attention.

    Args:
        name: Folder or hub id of the model.
        dtype: The dtype of its weights.
        revision: Its revision on the hub.
        spread: "no", the whole model in every process; "devices", over all GPUs of the only process of a machine; or
            "processes", each process with a shard of every layer (FSDP).
    """
    state = distributed_state("train", "training")
    if spread == "devices" and _num_local_processes() > 1:
        raise TrainingError(
            "a model that is spread over all GPUs leaves none to a second process of the machine; start one process, "
            "or give --spread processes."
        )
    if spread != "processes":
        # The first process of a node reads the disk; the others find the file in memory.
        with state.local_main_process_first():
            model, tokenizer = load_model(name, dtype, revision, "auto" if spread == "devices" else state.device)
        if spread == "no":
            model.to(state.device)
        patch_attention(model)
        return model, tokenizer
    if state.num_processes == 1:
        raise TrainingError(
            "the model cannot be sharded over processes, as there is one; start several with `accelerate launch "
            "--num_processes N -m lkv train`, or give --spread devices."
        )
    from accelerate.utils import broadcast_object_list

    # Only the first process loads the model; it sends each of the others its shard.
    weights: dict[str, Tensor] = {}
    outcome: list[ModelSpec | LkvError | None] = [None]
    if state.is_main_process:
        try:
            whole, _ = load_model(name, dtype, revision)
            outcome, weights = [inspect_model(whole)], whole.state_dict()
        except LkvError as error:
            outcome = [error]  # the others wait for an answer
    spec = broadcast_object_list(outcome)[0]
    if isinstance(spec, LkvError):
        raise spec
    model = shard_model(load_config(name, revision), dtype, weights, state.device)
    patch_attention(model, spec)
    return model, load_tokenizer(name, revision)
