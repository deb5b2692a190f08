"""Where the frozen model of a training lies: in each process, over its GPUs, or shared out over the processes."""

import os
from typing import Any

import torch

from lkv.config import ModelSpec
from lkv.errors import LkvError, TrainingError
from lkv.integrations.transformers.attention import patch_attention
from lkv.integrations.transformers.sharding import sharded
from lkv.integrations.transformers.spec import inspect_model
from lkv.models.loading import load_config, load_model, load_tokenizer


def place(name: str, dtype: torch.dtype, revision: str | None, spread: str, accelerator: Any) -> tuple[Any, Any]:
    """(model, tokenizer) with LKV attached. `spread`: "no", the whole model in every process; "devices", over all GPUs
    of the one process of a machine; "processes", each with a share of every layer.

    Raises TrainingError where processes and `spread` do not go together, and what `load_model` raises.
    """
    alone = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1
    if spread == "devices" and not alone:
        raise TrainingError(
            "a model that is spread over all GPUs leaves none to a second process of the machine; start one process, "
            "or give --spread processes."
        )
    if spread == "processes" and accelerator.num_processes == 1:
        raise TrainingError(
            "the model cannot be shared out over processes, as there is one; start several with `accelerate launch "
            "--num_processes N -m lkv train`, or give --spread devices."
        )
    if spread == "processes":
        return _shared_out(name, dtype, revision, accelerator)
    device = "auto" if spread == "devices" else accelerator.device
    # The first process of a node reads the disk; the others find the file in memory.
    with accelerator.local_main_process_first():
        model, tokenizer = load_model(name, dtype, revision, device)
    if spread == "no":
        model.to(accelerator.device)
    patch_attention(model)
    return model, tokenizer


def _shared_out(name: str, dtype: torch.dtype, revision: str | None, accelerator: Any) -> tuple[Any, Any]:
    """The first process alone loads the model, and sends each of the others its share."""
    from accelerate.utils import broadcast_object_list

    weights: dict[str, torch.Tensor] = {}
    told: list[ModelSpec | LkvError | None] = [None]
    if accelerator.is_main_process:
        try:
            whole, _ = load_model(name, dtype, revision)
            told, weights = [inspect_model(whole)], whole.state_dict()
        except LkvError as error:
            told = [error]  # the others wait for an answer
    spec = broadcast_object_list(told)[0]
    if isinstance(spec, LkvError):
        raise spec
    model = sharded(load_config(name, revision), dtype, weights, accelerator.device)
    patch_attention(model, spec)
    return model, load_tokenizer(name, revision)
