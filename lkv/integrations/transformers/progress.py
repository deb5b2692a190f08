"""How far a text has been read: decoder layers tell of the tokens that pass through them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def report_progress(model: Any, passed: Callable[[float], None]) -> Iterator[None]:
    """In the block, `passed` is given the tokens that a layer has read, in tokens of the whole model.

    One pass over T tokens calls it L times with T / L each. A model whose layers cannot be told apart calls it never.
    """
    layers, thread = _decoder_layers(model), threading.get_ident()

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if threading.get_ident() != thread:
            return  # another use of the model, which an exception of `passed` must not end
        states = args[0] if args else kwargs["hidden_states"]
        passed(states.shape[0] * states.shape[1] / len(layers))

    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _decoder_layers(model: Any) -> list[nn.Module]:
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList))
    return next((list(layers) for layers in lists if len(layers) == count), [])
