"""Gradient checkpointing of decoder layers that read a cache."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lkv.hf.spec import unwrap_model
from lkv.utils.overrides import current_method, override_method


@contextmanager
def checkpoint_layers(model: PreTrainedModel) -> Iterator[None]:
    """Checkpoint decoder layers in the block: save each layer's input and recompute the layer in the backward pass.

    transformers' own gradient checkpointing needs a model in training mode and drops the cache. The cache used in the
    block must return the same tensors when a layer is recomputed. The random state is not restored.
    """
    decoder = unwrap_model(model).get_decoder()
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    with ExitStack() as stack:
        for layer in layers:
            # Not `__call__`: hooks, such as those of FSDP, stay outside and run once.
            forward = partial(
                checkpoint, current_method(layer, "forward"), use_reentrant=False, preserve_rng_state=False
            )
            stack.enter_context(override_method(layer, "forward", forward))
        yield
