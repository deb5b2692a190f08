"""Models with random weights from published configurations, and random policies. Nothing is downloaded."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lkv.config import ModelSpec
from lkv.errors import UnsupportedModelError
from lkv.policy.policy import Policy
from lkv.utils import devices

_SPREAD = 1.4  # standard deviation of the heads' scores in the policy trained for SmolLM2
_LLAMA_3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


# What the models' own config.json files state.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_parameters": _LLAMA_3_ROPE,
        "max_position_embeddings": 131_072,
    },
    "llama-3.2-1b": {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "rope_parameters": _LLAMA_3_ROPE | {"factor": 32.0}, "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    "mistral-7b-v0.3": {
        "model_type": "mistral", "vocab_size": 32_768, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None,
        "rope_parameters": _rope(1e6), "max_position_embeddings": 32_768,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "rope_parameters": _rope(1e6), "max_position_embeddings": 40_960,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "rope_parameters": _rope(1e6), "max_position_embeddings": 40_960, "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "rope_parameters": _rope(1e5),
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
}  # fmt: skip


def read_config(name: str) -> PretrainedConfig:
    """The configuration `name`: one of CONFIGS, or a path to a config.json of transformers.

    Raises:
        UnsupportedModelError: For any other name and a malformed file.
    """
    if name in CONFIGS:
        return AutoConfig.for_model(**CONFIGS[name])
    path = Path(name)
    if not path.is_file():
        raise UnsupportedModelError(
            f"there is no configuration {name!r}; use one of {', '.join(CONFIGS)}, or a path to a config.json."
        )
    try:
        return AutoConfig.for_model(**json.loads(path.read_text(encoding="utf-8")))
    except Exception as error:  # transformers' own checks raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise UnsupportedModelError(
            f"{path} is not a model configuration ({reason}); give the config.json of a transformers model."
        ) from error


def random_model(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """A causal language model of this configuration with random weights, made on `device`, in eval mode."""
    with _seeded(seed, device), device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def random_policy(spec: ModelSpec, seed: int = 0) -> Policy:
    """An untrained policy with budgets as unequal as after training, so that its decisions cost the same."""
    with _seeded(seed, torch.device("cpu")), torch.device("cpu"), torch.no_grad():
        policy = Policy(spec, {"random": seed})
        torch.nn.init.normal_(policy.heads.embeddings)
        policy.heads.output.weight *= _SPREAD / policy.heads().std()
    return policy.eval().requires_grad_(False)


def extend_positions(model: PreTrainedModel, tokens: int) -> None:
    """Let `model` read texts of `tokens` tokens; beyond its own limit the output means nothing but costs the same."""
    text = model.config.get_text_config(decoder=True)
    text.max_position_embeddings = max(text.max_position_embeddings, tokens)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    is_gpu = devices.is_gpu(device)
    with torch.random.fork_rng([device] if is_gpu else [], device_type=device.type if is_gpu else "cuda"):
        torch.manual_seed(seed)
        yield
