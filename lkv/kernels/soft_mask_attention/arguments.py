"""The arguments of attention of continuations over a frozen prompt, as its backends take them."""

from typing import NamedTuple

from torch import Tensor


class Continuations(NamedTuple):
    """Tensors of `api.continuation_attention`."""

    q: Tensor
    key: Tensor
    value: Tensor
    prompt_key: Tensor
    prompt_value: Tensor
    log_mask: Tensor | None
    owners: Tensor | None
