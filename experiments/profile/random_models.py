"""Models with random weights from published configurations, and random policies. Nothing is downloaded."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lkv.errors import UnsupportedModelError
from lkv.hf.model_spec import ModelSpec
from lkv.policy.policy import Policy
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.utils import devices

_SPREAD = 1.4  # standard deviation of the heads' scores in the policy trained for SmolLM2
_LLAMA_3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_SHAPE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "rope_parameters",
)  # fmt: skip


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


# What the models' own config.json files state.
_CONFIGS: dict[str, tuple[Any, ...]] = {
    "llama-3.1-8b": ("llama", 128_256, 4096, 14_336, 32, 32, 8, 128, 131_072, False, _LLAMA_3_ROPE),
    "llama-3.2-1b": ("llama", 128_256, 2048, 8192, 16, 32, 8, 64, 131_072, True, _LLAMA_3_ROPE | {"factor": 32.0}),
    "mistral-7b-v0.3": ("mistral", 32_768, 4096, 14_336, 32, 32, 8, 128, 32_768, False, _rope(1e6)),
    "qwen3-8b": ("qwen3", 151_936, 4096, 12_288, 36, 32, 8, 128, 40_960, False, _rope(1e6)),
    "qwen3-0.6b": ("qwen3", 151_936, 1024, 3072, 28, 16, 8, 128, 40_960, True, _rope(1e6)),
    "smollm2-135m": ("llama", 49_152, 576, 1536, 30, 9, 3, 64, 8192, True, _rope(1e5)),
}
CONFIGS: dict[str, dict[str, Any]] = {
    name: dict(zip(_SHAPE, values, strict=True)) | ({"sliding_window": None} if values[0] == "mistral" else {})
    for name, values in _CONFIGS.items()
}


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


def random_policy(spec: ModelSpec, seed: int = 0, inputs: ScorerInputs | None = None) -> Policy:
    """An untrained policy with budgets as unequal as after training, so that its decisions cost the same."""
    with _seeded(seed, torch.device("cpu")), torch.device("cpu"), torch.no_grad():
        policy = Policy(spec, {"random": seed}, inputs=inputs)
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
