"""Digests of a model's exact weights, and its settings, by which a saved context recognises its model.

Policies compare models by `lkv.hf.fingerprint`, which survives quantisation and therefore light fine-tuning too.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from lkv.hf.fingerprint import layer_index, without_adapters

# Parts of the names in a configuration that do not change what a model computes, or that `ModelSpec` compares.
_WITHOUT_EFFECT = (
    "name_or_path", "transformers_version", "dtype", "architectures", "use_cache", "output_attentions",
    "output_hidden", "output_router", "return_dict", "token_id", "dropout", "pdrop", "initializer", "loss", "label",
    "problem_type", "attn_implementation", "experts_implementation", "auto_map", "rope_parameters", "rope_theta",
    "rope_scaling", "max_position", "max_window", "vocab_size", "quantization", "pretraining", "gradient",
    "chunk_size_feed", "is_encoder", "is_decoder",
)  # fmt: skip
SETTING = "config.json: "
_SAMPLES = 2048  # of each tensor; smaller tensors are read whole
_EXACT_IN_FLOAT32 = (torch.bfloat16, torch.float32, torch.float64)


def settings(config: PreTrainedConfig) -> dict[str, str]:
    """Return the settings of a model's configuration that change what it computes, as JSON by name after `SETTING`."""
    values = config.get_text_config(decoder=True).to_dict()
    return {
        SETTING + name: json.dumps(_rounded(value), sort_keys=True)
        for name, value in values.items()
        if not any(part in name for part in _WITHOUT_EFFECT)
    }


def _rounded(value: object) -> Any:
    """Return JSON values with floats in six digits, as single precision has them in GGUF files."""
    return json.loads(json.dumps(value, default=str), parse_float=lambda number: float(f"{float(number):.6g}"))


class WeightDigests:
    """The digests of a model's weights as they are when this is made."""

    def __init__(self, model: nn.Module) -> None:
        self._state, self._digests = _tensor_states(model), dict[str, str]()

    def are_of(self, model: nn.Module) -> bool:
        """Return whether the weights of `model` have not changed since."""
        return self._state == _tensor_states(model)

    def read(self, model: nn.Module) -> dict[str, str]:
        """Return digests of samples of all weights and persistent buffers of `model`, without adapters.

        Returns:
            A digest for each decoder layer and for each tensor outside of the layers. The key is a digest of names,
            shapes and dtypes, so that models stored in other ways share no key. What has bfloat16, float32 or float64
            values has a second key, for these values in bfloat16. Empty if weights are sharded over processes.
        """
        self._digests = self._digests or _read_digests(model)
        return self._digests


def _read_digests(model: nn.Module) -> dict[str, str]:
    groups: dict[object, list[tuple[str, Tensor]]] = {}
    for name, tensor in _tensors(model):
        if getattr(tensor, "device_mesh", None) is not None:
            return {}
        group = layer_index(name)
        groups.setdefault(name if group is None else group, []).append((name, tensor))
    digests = {}
    for tensors in groups.values():
        samples = [(f"{name} {tuple(tensor.shape)}", _samples(tensor)) for name, tensor in tensors]
        forms = [samples]
        if all(sample.dtype in _EXACT_IN_FLOAT32 for _, sample in samples):
            forms.append([(name, sample.bfloat16()) for name, sample in samples])
        for form in forms:
            layout, values = hashlib.sha256(), hashlib.sha256()
            for name, sample in form:
                layout.update(f"{name} {sample.dtype}\n".encode())
                values.update(sample.view(torch.uint8).numpy().tobytes())
            digests[layout.hexdigest()[:16]] = values.hexdigest()[:16]
    return digests


def _samples(tensor: Tensor) -> Tensor:
    """Return values of `tensor` in even steps, on the CPU; the step is odd, so that the columns vary."""
    values = tensor.detach().flatten()
    return values[:: (len(values) // _SAMPLES) | 1].cpu().contiguous()


@torch.no_grad()
def _tensor_states(model: nn.Module) -> list[str]:
    """Return what changes with the tensors: addresses, versions, and a value of each for writes through `.data`."""
    states, values = [], defaultdict[object, list[Tensor]](list)
    for _, tensor in _tensors(model):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        states.append(f"{local.data_ptr()} {0 if local.is_inference() else local._version}")
        if local.numel() and local.is_contiguous():
            middle = local.as_strided((1,), (1,), local.storage_offset() + local.numel() // 2)
            values[local.device, local.dtype].append(middle)
    return states + [str(torch.cat(same).view(torch.uint8).tolist()) for same in values.values()]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, plain tensor) of the base model's weights and persistent buffers.

    Weights that an adapter is merged into are left out, because they change and the model's outputs do not.
    """
    weights, adapted, merged = {}, False, []
    for prefix, module in model.named_modules():
        if "base_layer" in module._modules:
            adapted = True
            if getattr(module, "merged_adapters", None):
                merged.append(f"{prefix}.base_layer.")
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                weights[f"{prefix}.{name}"] = tensor
    if adapted:
        own = {name: weight for name, weight in weights.items() if not name.startswith(tuple(merged))}
        weights = without_adapters(own)
    for name, weight in weights.items():
        for number, part in enumerate(_plain_parts(weight)):
            yield f"{name}{number or ''}", part


def _plain_parts(weight: Any) -> list[Tensor]:
    """Return the tensors that `weight` stores: itself, or the packed codes and the scales of a quantised one."""
    if type(weight) in (Tensor, nn.Parameter) or hasattr(weight, "device_mesh"):
        return [weight]
    if hasattr(weight, "__tensor_flatten__"):  # of torchao
        return [part for name in weight.__tensor_flatten__()[0] for part in _plain_parts(getattr(weight, name))]
    # Scales of bitsandbytes, in 4 and in 8 bits.
    scales = (getattr(getattr(weight, "quant_state", None), "absmax", None), getattr(weight, "SCB", None))
    return [weight, *(scale for scale in scales if scale is not None)]
