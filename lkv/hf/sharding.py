"""A model with weights sharded over processes by PyTorch's FSDP; each process reads its own prompts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lkv.errors import UnsupportedModelError


def shard_model(
    config: PreTrainedConfig, dtype: torch.dtype, weights: Mapping[str, Tensor], device: torch.device
) -> Any:
    """Build the model of `config` in eval mode, with a shard of each layer on `device` in every process of the group.

    A layer's weights are gathered while it computes; embeddings and head are replicated. All processes must call this,
    and run the same forward and backward passes afterwards.

    Args:
        config: The model's configuration.
        dtype: The dtype of the weights.
        weights: The state dict of the whole model in rank 0, which broadcasts it; empty in other processes.
        device: This process's device.

    Returns:
        The model.

    Raises:
        UnsupportedModelError: For a quantised model, or one whose decoder layers cannot be found.
    """
    from accelerate import init_empty_weights
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError("a quantised model cannot be sharded over processes; give its full weights.")
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    if not layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not name its layers, so it cannot be sharded; spread it over the GPUs of "
            "one process instead."
        )
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = {parameter for parameter in model.parameters() if id(parameter) not in inside}
    for layer in layers:
        fully_shard(layer)
    # Prefill calls the decoder directly; as the FSDP root it prefetches the next layer's weights during a layer.
    decoder, kind = model.base_model, type(model.base_model)
    fully_shard(decoder, ignored_params=outside)
    # FSDP replaces the class, which transformers uses to look up the outputs that a model can record.
    decoder.__class__ = kind
    _materialise(model, device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(weights), options=options)
    return model.eval().requires_grad_(False)


def _materialise(model: PreTrainedModel, device: torch.device) -> None:
    """Allocate the weights on `device`; buffers keep their values, because no checkpoint contains them."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    model.tie_weights()
