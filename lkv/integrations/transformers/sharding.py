"""A model whose weights are shared out over processes (PyTorch's FSDP), each of which reads prompts of its own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lkv.errors import UnsupportedModelError


def sharded(config: Any, dtype: torch.dtype, weights: Mapping[str, Tensor], device: torch.device) -> Any:
    """The model of `config` in eval mode, every process of the group with its share of each layer on `device`.

    `weights` are those of the whole model in the first process, which sends them to the others; empty there. A layer's
    are put together while it computes; embeddings and head lie in every process. All must call this, and make the same
    forward and backward passes afterwards. Raises UnsupportedModelError for a quantised model.
    """
    from accelerate import init_empty_weights
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError("a quantised model cannot be shared out over processes; give its full weights.")
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    if not layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not say what its layers are, so it cannot be shared out; spread it over the "
            "GPUs of one process instead."
        )
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = {parameter for parameter in model.parameters() if id(parameter) not in inside}
    for layer in layers:
        fully_shard(layer)
    # The decoder is what a prompt is read by: with it as the root the next layer's weights come while one computes.
    decoder, kind = model.base_model, type(model.base_model)
    fully_shard(decoder, ignored_params=outside)
    # It works by hooks; transformers looks up by the class, which FSDP replaces, what a model can record.
    decoder.__class__ = kind
    _materialise(model, device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(weights), options=options)
    return model.eval().requires_grad_(False)


def _materialise(model: Any, device: torch.device) -> None:
    """Memory for weights that have none yet; buffers, which no file holds, stay as they are."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    model.tie_weights()
