"""Progress of a forward pass, counted as the decoder layers run, and estimates of its time and memory."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lkv.hf.attention import patch_attention
from lkv.hf.spec import decoder_layers

_PROBE_SIZE, _PROBES = 512, 40  # matrix size, number of products


@contextmanager
def report_progress(model: PreTrainedModel, on_tokens: Callable[[float], None]) -> Iterator[None]:
    """Call `on_tokens` whenever a decoder layer has run in this thread.

    Args:
        model: The model that reads a text within the block.
        on_tokens: Called L times in a pass over T tokens, with T / L each. An exception from it ends the pass. It is
            never called for a model whose decoder layers cannot be found.
    """
    layers = decoder_layers(model)
    thread = threading.get_ident()

    def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: object) -> None:
        if threading.get_ident() != thread:
            return  # another thread's pass, which an exception of `on_tokens` must not end
        states = args[0] if args else kwargs["hidden_states"]
        on_tokens(states.shape[0] * states.shape[1] / len(layers))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(hook, with_kwargs=True))
        yield


def estimate_reading_seconds(model: PreTrainedModel, tokens: int) -> float:
    """Estimate the prefill time of `tokens` tokens on this machine, from the speed of one matrix product."""
    weight = torch.zeros(_PROBE_SIZE, _PROBE_SIZE, dtype=model.dtype, device=model.device)
    seconds = []
    for _ in range(_PROBES + 1):
        start = time.perf_counter()
        (weight @ weight).sum().item()
        seconds.append(time.perf_counter() - start)
    # The mean, not the minimum: other programs slow prefill down as well. The first product starts the threads.
    return model.num_parameters() * tokens * sum(seconds[1:]) / _PROBES / _PROBE_SIZE**3


def full_cache_nbytes(model: PreTrainedModel, tokens: int) -> int:
    """Return the bytes of k and v of `tokens` tokens in the model's dtype, without eviction."""
    spec = patch_attention(model).spec
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * tokens * model.dtype.itemsize
