"""The transformers model of vLLM's checkpoint without its weights: its shape, rotary embedding and fingerprint."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lkv.errors import IntegrationError
from lkv.hf.attention import patch_attention
from lkv.hf.spec import inspect_model


def build_skeleton(
    name: str, revision: str | None, dtype: torch.dtype, device: torch.device, download_dir: str | None = None
) -> Any:
    """Return the transformers model of a checkpoint without its weights, patched by LKV.

    Only the weights that its fingerprint samples are read, and dropped again.

    Args:
        name: A folder or hub id.
        revision: Its commit, tag or branch on the hub.
        dtype: The model's dtype.
        device: Where its buffers are.
        download_dir: Where vLLM has downloaded the weights.

    Raises:
        IntegrationError: If weights cannot be read.
    """
    from accelerate import init_empty_weights

    config = AutoConfig.from_pretrained(name, revision=revision or "main", trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    depth = config.get_text_config(decoder=True).num_hidden_layers
    sampled_layers = {f".layers.{index}." for index in (0, depth // 2, depth - 1)}
    sampled_names = {key for key, _ in model.named_parameters() if any(part in f".{key}" for part in sampled_layers)}
    _replace_weights(model, lambda weight: torch.zeros((), dtype=weight.dtype).expand(weight.shape))
    missing = sampled_names - _read_weights(model, _checkpoint_files(name, revision, download_dir), sampled_names)
    if missing:
        raise IntegrationError(
            f"contexts cannot be used with {name}: its safetensors files have no {min(missing)}; quantised and other "
            "formats of weights cannot be recognised here."
        )
    spec = inspect_model(model)
    # No memory: every weight is one zero, seen in all places.
    _replace_weights(model, lambda weight: torch.zeros((), dtype=weight.dtype, device=device).expand(weight.shape))
    for buffer_owner in model.modules():
        for key, buffer in list(buffer_owner._buffers.items()):
            buffer_owner._buffers[key] = None if buffer is None else buffer.to(device)
    patch_attention(model, spec)
    return model


def _replace_weights(model: nn.Module, make_weight: Any) -> None:
    for module in model.modules():
        for key, weight in list(module._parameters.items()):
            if weight is not None:
                module._parameters[key] = nn.Parameter(make_weight(weight), requires_grad=False)


def _read_weights(model: nn.Module, files: list[Path], names: set[str]) -> set[str]:
    """Put the weights `names` of the files into the model; returns those that were found."""
    found_names = set()
    for file in files:
        with safe_open(file, "pt") as tensors:
            for key in names & set(tensors.keys()):
                owner, _, leaf = key.rpartition(".")
                module = model.get_submodule(owner)
                old = module._parameters[leaf]
                tensor = tensors.get_tensor(key)
                if old is not None and tensor.shape == old.shape:
                    module._parameters[leaf] = nn.Parameter(tensor.to(old.dtype), requires_grad=False)
                    found_names.add(key)
    return found_names


def _checkpoint_files(name: str, revision: str | None, download_dir: str | None) -> list[Path]:
    if os.path.isdir(name):
        folder = Path(name)
    else:
        from huggingface_hub import snapshot_download

        # vLLM has downloaded the weights already.
        folder = Path(
            snapshot_download(name, revision=revision, cache_dir=download_dir, allow_patterns=["*.safetensors"])
        )
    return sorted(folder.glob("*.safetensors"))
