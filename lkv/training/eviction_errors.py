"""Eviction errors: the change in attention output without each token, measured while the model repeats the text."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import LayerKV
from lkv.hf.spec import full_attention_modules, reader_modules
from lkv.methods.replay import REQUEST, ReplayLayer, replay
from lkv.utils.devices import full_precision
from lkv.utils.prompts import encode_question

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LEAST_REST = 1e-3  # lower bound on the residual attention mass 1 - a, from its rounding error


def longest_text(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the longest text, in tokens, that the model can read and then repeat; at least one."""
    request = encode_question(tokenizer, REQUEST)
    return max(1, (patch_attention(model).spec.max_positions - len(request)) // 2)


@torch.no_grad()
def measure_eviction_errors(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", ids: list[int], prompt: list[LayerKV]
) -> Tensor:
    """Compute the change of a layer's output without each entry of a prompt, [L, 1, H, T] in float32.

    Without a token of attention a and value v, the output o of a query head becomes o + a / (1 - a) (o - v) (CAOTE,
    Goel et al. 2025). With a head's part W of the output projection, the squared error |a / (1 - a) W (o - v)|^2 is
    averaged over the rows of the repeated prompt and summed over the query heads that share the entry. Its root is
    divided by the root mean square norm of the layer's residual stream, so that layers are comparable.

    Args:
        model: The model.
        tokenizer: Its tokenizer, for the request to repeat.
        ids: The token ids of the prompt, T.
        prompt: The keys and values of its L layers.

    Raises:
        PromptError: The prompt does not fit into the model's context twice.
    """
    pairs = zip(full_attention_modules(model), reader_modules(model), strict=True)
    projections = [[getattr(module, name) for module, name in (own, *readers)] for own, readers in pairs]
    layers = [_ErrorLayer(part, projection) for part, projection in zip(prompt, projections, strict=True)]
    repeated = encode_question(tokenizer, REQUEST) + ids
    out = replay(model, prompt, layers, repeated, hidden_states=True)
    kinds, device = patch_attention(model).kinds, prompt[0].key.device
    inputs = [hidden for hidden, kind in zip(out.hidden_states, kinds, strict=False) if kind.is_evicted]
    norms = (hidden.float().square().sum().to(device) for hidden in inputs)
    errors = (layer.squares.to(device) / norm for layer, norm in zip(layers, norms, strict=True))
    return torch.stack([error.clamp(min=0).sqrt() for error in errors])


class _ErrorLayer(ReplayLayer):
    """Sums the squared errors of a layer's tokens over rows and query heads: `squares` [B, H, T].

    |W (o - v)|^2 is o P o - 2 o P v + v P v with P = W^T W; the factors of v are summed over rows first.
    """

    attention_dtype = torch.float32  # 1 - a must be accurate

    def __init__(self, prompt: LayerKV, projections: list[nn.Module]):
        super().__init__(prompt)
        self.squares = prompt.key.new_zeros(prompt.key.shape[:3], dtype=torch.float32)
        self._projections = projections  # of the layer, then of those that read its k and v too

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        """Compute attention as in `ReplayLayer`."""
        heads, dim = value.shape[1], value.shape[-1]
        # Sharded weights are gathered only during the layer's pass, so products of them are made here.
        with full_precision(value.device):
            projection = self._projections[self.readers - self.reads_left]
            products = _products_of_weights(projection, heads, query.shape[1] // heads, dim)
            self._value = self._prompt.value.float()[:, :, None]
            self._products = products.to(value.device)  # P [H, G, d, d]
            self._projected_value = self._value @ self._products  # v P [B, H, G, T, d]
        output = super().attend(query, key, value, mask, scale, stock)
        del self._value, self._products, self._projected_value
        return output

    def record(self, logits: Tensor, attention: Tensor, output: Tensor) -> None:
        output, dim = output.float(), output.shape[-1]
        with full_precision(output.device):
            attention = attention[..., : self._value.shape[3]]
            odds = (1 - attention).clamp_(min=_LEAST_REST).reciprocal_().mul_(attention).square_()
            projected = output @ self._products
            norms = (projected * output).sum(-1, keepdim=True)
            rows = torch.cat([-2 * projected, norms, torch.ones_like(norms)], -1)
            crossed, of_outputs, total_odds = (odds.transpose(-1, -2) @ rows).split([dim, 1, 1], -1)
            crossed += total_odds * self._projected_value
            self.squares += ((crossed * self._value).sum(-1) + of_outputs[..., 0]).sum(2)


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
