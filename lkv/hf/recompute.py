"""Gradient checkpointing of decoder layers that read a cache."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lkv.hf.spec import unwrap_model
from lkv.utils.overrides import override_method


@contextmanager
def checkpoint_layers(model: PreTrainedModel) -> Iterator[None]:
    """Save no more of each decoder layer in the block than its input; the backward pass computes the layer again.

    transformers' own gradient checkpointing needs a model in training mode, and leaves out the cache. The cache of the
    passes in the block must give a layer the same when it is computed again. Random numbers are not restored.
    """
    decoder = unwrap_model(model).get_decoder()
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    with ExitStack() as stack:
        for layer in layers:
            # Not `__call__`: hooks, such as those of FSDP, stay outside and run once.
            forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
            stack.enter_context(override_method(layer, "forward", forward))
        yield
