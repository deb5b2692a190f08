"""Eviction errors: the change of attention output without a token, measured while the model repeats the text."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lkv.hf.attention import patch_attention
from lkv.hf.masks import Mask
from lkv.hf.prompt_kv import LayerKV
from lkv.hf.spec import full_attention_modules, reader_modules
from lkv.methods.selectors.kvzip import REQUEST, ReplayLayer, replay
from lkv.utils.devices import full_precision
from lkv.utils.prompts import encode_question

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LEAST_REST = 1e-3  # lower bound on the residual attention mass 1 - a, from its rounding error


@torch.no_grad()
def measure_eviction_errors(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", ids: list[int], prompt: list[LayerKV]
) -> Tensor:
    """Compute the change of a layer's output without each entry of a prompt, [L, 1, H, T] in float32.

    Without a token of attention a and value v, the output o of a query head becomes o + a / (1 - a) (o - v) (CAOTE,
    Goel et al. 2025). With a head's part W of the output projection, after the model's gate if it has one, the squared
    error |a / (1 - a) W (o - v)|^2 is averaged over the rows of the repeated prompt and summed over the query heads
    that share the entry. Its root is divided by the root mean square norm of the layer's residual stream, so that
    layers are comparable.

    Args:
        model: The model.
        tokenizer: Its tokenizer, for the request to repeat.
        ids: The token ids of the prompt, T.
        prompt: The keys and values of its L layers.

    Raises:
        PromptError: The prompt does not fit into the model's context twice.
    """
    modules = [
        [own, *readers] for own, readers in zip(full_attention_modules(model), reader_modules(model), strict=True)
    ]
    projections = [[getattr(module, name) for module, name in attention] for attention in modules]
    layers = [_ErrorLayer(part, own) for part, own in zip(prompt, projections, strict=True)]
    with ExitStack() as hooks:
        for layer, own in zip(layers, projections, strict=True):
            for projection in own:  # before other hooks, which may shard the input
                hooks.enter_context(projection.register_forward_pre_hook(layer.apply_gates, prepend=True))
        out = replay(model, prompt, layers, encode_question(tokenizer, REQUEST) + ids, hidden_states=True)
    kinds, device = patch_attention(model).kinds, prompt[0].key.device
    inputs = [hidden for hidden, kind in zip(out.hidden_states, kinds, strict=False) if kind.is_evicted]
    norms = (hidden.float().square().sum().to(device) for hidden in inputs)
    errors = (layer.squares.to(device) / norm for layer, norm in zip(layers, norms, strict=True))
    return torch.stack([error.clamp(min=0).sqrt() for error in errors])


class _ErrorLayer(ReplayLayer):
    """Sums the squared errors of a layer's tokens over rows and query heads: `squares` [B, H, T].

    |W (o - v)|^2 is o P o - 2 o P v + v P v with P = W^T W; the factors of v are summed over rows first. In some models
    a gate multiplies o before W, a number for each row and channel, which `apply_gates` infers from the projection's
    input. There W's columns are taken as orthogonal, so that the gates can be summed over rows too.

    Args:
        prompt: The layer's keys and values.
        projections: The output projections of the attention modules that read them, in the order of their passes.
    """

    attention_dtype = torch.float32  # 1 - a must be accurate

    def __init__(self, prompt: LayerKV, projections: Iterable[nn.Module]):
        super().__init__(prompt)
        self.squares = prompt.key.new_zeros(prompt.key.shape[:3], dtype=torch.float32)
        self._projections = iter(projections)
        self._attend_again: Callable[[], Tensor] | None = None  # the last attention, until its output is projected

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, model_attention: Callable[[], Tensor]
    ) -> Tensor:
        """Compute attention and add its errors without gates."""
        own = self._prompt.value.float()[:, :, None]
        with full_precision(own.device):
            products = _products_of_weights(
                next(self._projections), own.shape[1], query.shape[1] // own.shape[1], own.shape[-1]
            )
            self._products, self._gates = products.to(own.device), None  # P [H, G, d, d]
            self._squared_value = ((own @ self._products) * own).sum(-1, keepdim=True)  # v P v
        attend = partial(super().attend, query, key, value, mask, scale, model_attention)
        self._before = self.squares.clone()
        self._output = attend()
        self._attend_again = attend
        return self._output

    def apply_gates(self, projection: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Add the errors of the last attention again if it is gated before the projection; a forward pre-hook."""
        if self._attend_again is None:  # called for the products of its weights
            return
        entered, output = inputs[0].reshape(self._output.shape), self._output
        if not torch.equal(entered, output):
            gates = (entered.float() / output.float()).nan_to_num(1.0, 1.0, 1.0).transpose(1, 2)
            diagonal = self._products.diagonal(dim1=-2, dim2=-1)[..., None, :]
            self._gates = gates.unflatten(1, diagonal.shape[:2]).square() * diagonal  # [B, H, G, n, d]
            self._squared_value = self._prompt.value.float()[:, :, None].square()
            self.squares = self._before
            self._attend_again()
        self._attend_again = None
        del self._before, self._output, self._products, self._gates, self._squared_value

    def record(self, logits: Tensor, attention: Tensor, output: Tensor) -> None:
        output, value, (rows, dim) = output.float(), self._prompt.value.float()[:, :, None], output.shape[-2:]
        with full_precision(output.device):
            last = attention.shape[-1] - value.shape[3]
            attention = attention[..., : value.shape[3]]
            odds = (1 - attention).clamp_(min=_LEAST_REST).reciprocal_().mul_(attention).square_()
            if self._gates is None:
                projected, weights = output @ self._products, torch.ones_like(output[..., :1])
            else:
                weights = self._gates[..., last - rows : last, :]
                projected = output * weights
            factors = torch.cat([-2 * projected, (projected * output).sum(-1, keepdim=True), weights], -1)
            crossed, of_outputs, of_values = (odds.transpose(-1, -2) @ factors).tensor_split([dim, dim + 1], -1)
            squares = (crossed * value).sum(-1) + of_outputs[..., 0] + (of_values * self._squared_value).sum(-1)
            self.squares += squares.sum(2)


def _products_of_weights(projection: nn.Module, kv_heads: int, groups: int, dim: int) -> Tensor:
    """Return W^T W [H, G, d, d] of each query head's part of an output projection.

    W is computed by applying the module to unit vectors, since it may be quantised, sharded or adapted.
    """
    parameter = next(iter([*projection.parameters(), *projection.buffers()]))
    dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
    units = torch.eye(kv_heads * groups * dim, dtype=dtype, device=parameter.device)
    weight = (projection(units) - projection(torch.zeros_like(units[:1]))).float()
    weight = weight.unflatten(0, (kv_heads, groups, dim))
    return weight @ weight.transpose(-1, -2)
