"""Every family of models that LKV is tested with: a tiny random one of each. `model_table.py` writes docs/models.md."""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from packaging.version import Version

SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 67, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
_MIXED = {
    "num_hidden_layers": 4, "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
# The last four layers read the keys and values of the two before them.
_SHARED = {
    "num_hidden_layers": 8, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"] * 4,
    "num_kv_shared_layers": 4, "vocab_size_per_layer_input": 67, "hidden_size_per_layer_input": 8,
}  # fmt: skip
_GLOBAL = {"global_head_dim": 16, "hidden_size_per_layer_input": 0}
# Low enough to cap most scores; SDPA would leave the cap out.
CAPPED = {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0, "attn_implementation": "eager"}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}


# The main families, by what their tiny models have of their own.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": None},
    "Phi3": {"resid_pdrop": 0.0},
    "Gemma3": {
        "num_hidden_layers": 5, "query_pre_attn_scalar": 8, "sliding_window": 12,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
}  # fmt: skip


def build(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A tiny random model of a family by its name."""
    names = (
        ("Gemma3TextConfig", "Gemma3ForCausalLM") if family == "Gemma3" else (f"{family}Config", f"{family}ForCausalLM")
    )
    config, model = (getattr(transformers, name) for name in names)
    torch.manual_seed(0)
    return model(config(**(SHAPE | FAMILIES.get(family, {}) | changes))).to(dtype).eval()


def tiny_gpt2() -> Any:
    """A model without rotary positions, whose projections are transposed."""
    return next(family for family in SERVED if family.name == "GPT2").build()


def longrope_model(change: int = 64, **changes: Any) -> Any:
    """A tiny Phi-3 whose frequencies change at `change` tokens."""
    scaling = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4,
        "original_max_position_embeddings": change,
    }  # fmt: skip
    return build("Phi3", rope_parameters=scaling, original_max_position_embeddings=change, **changes)


@dataclass(frozen=True)
class Family:
    """`name` is the prefix of the classes in transformers, `changes` what its tiny model has of its own.

    `layers`: which layers are evicted from. `rotation`: which of these LKV knows the rotary embedding of; without it a
    policy must read k as cached. `refused`: why it is not served, as the error says it.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    layers: str = "all"
    rotation: str = "yes"
    refused: str = ""
    drop: tuple[str, ...] = ()
    fits: bool = True  # whether policies can be trained for it
    variant: str = ""  # what models of this shape there are
    since: str = ""  # the version of transformers from which on LKV serves it, where older ones have it too

    @property
    def label(self) -> str:
        """The name, with the variant."""
        return f"{self.name} ({self.variant})" if self.variant else self.name

    @property
    def is_served_in_vllm(self) -> bool:
        """Whether LKV's plugin for vLLM takes contexts of it."""
        return self.layers == "all"

    @property
    def missing(self) -> str:
        """Why this version of transformers cannot run it with LKV, if it cannot."""
        if self.since and Version(transformers.__version__) < Version(self.since):
            return f"{self.name} needs transformers {self.since}"
        if not (hasattr(transformers, self._config) and hasattr(transformers, self._model)):
            return f"this version of transformers has no {self.name}"
        return ""

    @property
    def _config(self) -> str:
        return self.config or f"{self.name}Config"

    @property
    def _model(self) -> str:
        return f"{self.name}ForCausalLM" if self.name != "GPT2" else "GPT2LMHeadModel"

    def build(self, dtype: torch.dtype = torch.float64) -> Any:
        """A tiny random model."""
        torch.manual_seed(0)
        settings = {key: value for key, value in (SHAPE | self.changes).items() if key not in self.drop}
        config = getattr(transformers, self._config)(**settings)
        model = getattr(transformers, self._model)(config)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the fused one knows no float64
        for name, weight in model.named_parameters():
            if "norm" in name:  # at 1 everywhere, a norm of k after RoPE would change nothing that counts
                torch.nn.init.uniform_(weight, 0.5, 1.5)
        return model.to(dtype).eval()


_SINKS = _MIXED | {"num_local_experts": 2, "num_experts_per_tok": 1}
_NORM_AFTER_ROPE = "none: k as cached, whose norm follows RoPE"
_SLIDING = {"layers": "full attention; sliding ones stay"}
_READ_AGAIN = "full attention with keys of its own; sliding ones stay"
SERVED = [
    Family("Llama"),
    Family("Qwen2"),
    Family("Qwen3"),
    Family("Mistral", {"sliding_window": None}),
    Family("Phi3", {"resid_pdrop": 0.0}),
    Family("Gemma"),
    Family("Gemma2", _MIXED | CAPPED, **_SLIDING),
    Family("VaultGemma", _MIXED | CAPPED, **_SLIDING),
    Family("Gemma3", _MIXED | {"query_pre_attn_scalar": 8}, "Gemma3TextConfig", **_SLIDING),
    Family(
        "Gemma3n",
        _SHARED | {"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 8},
        "Gemma3nTextConfig",
        layers=_READ_AGAIN,
        since="5.24",
    ),
    Family(
        "Gemma4",
        _MIXED | _GLOBAL | {"num_global_key_value_heads": 1, "attention_k_eq_v": True},
        "Gemma4TextConfig",
        **_SLIDING,
        variant="31B",
        since="5.24",
    ),
    Family(
        "Gemma4",
        _MIXED | _GLOBAL | _EXPERTS | {"enable_moe_block": True, "top_k_experts": 2},
        "Gemma4TextConfig",
        **_SLIDING,
        variant="26B-A4B",
        since="5.24",
    ),
    Family(
        "Gemma4",
        _SHARED | {"global_head_dim": 16},
        "Gemma4TextConfig",
        layers=_READ_AGAIN,
        variant="E2B, E4B",
        since="5.24",
    ),
    Family(
        "Llama4",
        {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "attention_chunk_size": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "floor_scale": 16,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
        },
        "Llama4TextConfig",
        layers="full attention; chunked ones stay",
        rotation="none: k as cached",
    ),
    Family("Apertus"),
    Family("Arcee"),
    Family("BitNet"),
    Family("Cohere"),
    Family("Cohere2", _MIXED, **_SLIDING, rotation="layers without one, as it is"),
    Family("Cwm", _MIXED, **_SLIDING),
    Family("Dots1", _ROUTED | {"n_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": None}),
    Family("Ernie4_5"),
    Family("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    Family("Exaone4", _MIXED, **_SLIDING, rotation="layers without one, as it is"),
    Family("FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("Glm"),
    Family("Glm4"),
    Family("Glm4Moe", _ROUTED | {"n_shared_experts": 1, "first_k_dense_replace": 1}),
    Family("Granite"),
    Family("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Helium"),
    Family("HunYuanDenseV1", rotation=_NORM_AFTER_ROPE),
    Family("Jais2"),
    Family(
        "Kolibri1",
        _MIXED | _EXPERTS | {"shared_expert_intermediate_size": 16},
        **_SLIDING,
        rotation="layers without one, as it is",
    ),
    Family("HyperCLOVAX"),
    Family("Mellum", _EXPERTS),
    Family("SolarOpen", _ROUTED),
    Family("Ministral", _MIXED, **_SLIDING),
    Family("Ministral3", {"sliding_window": None}),
    Family("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    Family("MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("NanoChat"),
    Family("Nemotron", since="5.3"),
    Family("Olmo"),
    Family("Olmo2"),
    Family("Olmo3", _MIXED, **_SLIDING),
    Family("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("Persimmon", drop=("num_key_value_heads",)),
    Family("Phi"),
    Family("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}, since="5.3"),
    Family("Qwen2Moe", _EXPERTS | {"shared_expert_intermediate_size": 16}),
    Family("Qwen3Moe", _EXPERTS),
    Family("SeedOss"),
    Family(
        "SmolLM3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}, rotation="layers without one, as it is"
    ),
    Family("StableLm"),
    Family("Starcoder2", {"sliding_window": None}),
    Family("CodeGen", {"rotary_dim": 4}, rotation="none: k as cached", drop=("num_key_value_heads",), since="5.24"),
    Family("GPTJ", {"rotary_dim": 4}, rotation="none: k as cached", drop=("num_key_value_heads",), since="5.24"),
    Family("GPTNeoX", drop=("num_key_value_heads",)),
    Family(
        "GPT2",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512},
        rotation="none: k as cached",
        drop=(
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
            "num_key_value_heads",
            "head_dim",
        ),
    ),
    Family(
        "OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}, drop=("num_key_value_heads",), rotation="none: k as cached"
    ),
    Family("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2}, rotation=_NORM_AFTER_ROPE),
    Family("GptOss", _SINKS, **_SLIDING),
]
_STATES = {"layers": "full attention; states stay", "since": "5.24"}
_LINEAR = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_HYBRID = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_DELTA = {
    "num_hidden_layers": 4, "layer_types": _LINEAR, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16,
}  # fmt: skip
_CONVOLUTION = {
    "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
}  # fmt: skip
_MAMBA = {
    "num_hidden_layers": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
_SHARED_EXPERT = _EXPERTS | {"shared_expert_intermediate_size": 16}
_UNROTATED = "layers without one, as it is"
# Models that have recurrent or convolution layers, too.
HYBRIDS = [
    Family("Qwen3_5", _DELTA, "Qwen3_5TextConfig", **_STATES),
    Family("Qwen3_5Moe", _DELTA | _SHARED_EXPERT, "Qwen3_5MoeTextConfig", **_STATES),
    Family("Qwen3Next", _DELTA | _SHARED_EXPERT, **_STATES),
    Family("Lfm2", _CONVOLUTION, **_STATES),
    Family("Lfm2Moe", _CONVOLUTION | _EXPERTS | {"num_dense_layers": 1}, **_STATES),
    Family("Lfm3", _CONVOLUTION, **_STATES),
    Family(
        "GraniteMoeHybrid",
        _MAMBA
        | {"layer_types": _LINEAR, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
        **_STATES,
        rotation=_UNROTATED,
    ),
    Family(
        "NemotronH",
        _ROUTED
        | {
            "layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe", "full_attention"],
            "num_hidden_layers": 6, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8,
            "conv_kernel": 4, "chunk_size": 16, "moe_shared_expert_intermediate_size": 16,
        },
        **_STATES,
        rotation=_UNROTATED,
    ),
    Family("FalconH1", _MAMBA | {"mamba_d_ssm": 64}, layers="all; states stay", since="5.24"),
    Family(
        "Jamba",
        {
            "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
            "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8,
            "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4,
        },
        **_STATES,
        fits=False,
        rotation=_UNROTATED,
    ),
    Family("Bamba", _MAMBA | {"attn_layer_indices": [1, 3]}, **_STATES),
    Family(
        "Zamba2",
        {
            "num_hidden_layers": 4, "layers_block_type": _HYBRID, "mamba_d_state": 8, "mamba_d_conv": 4,
            "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 8, "chunk_size": 16, "num_mem_blocks": 1,
            "use_mem_rope": True, "adapter_rank": 4, "attention_head_dim": 16, "head_dim": 16,
        },
        **_STATES,
        rotation="none: k as cached",
    ),
    Family(
        "Zamba",
        {
            "num_hidden_layers": 4, "layers_block_type": _HYBRID, "mamba_d_state": 8, "mamba_d_conv": 4,
            "mamba_expand": 2, "mamba_dt_rank": 4, "n_mamba_heads": 2, "attention_hidden_size": 64,
            "attention_head_dim": 16,
        },
        **_STATES,
        fits=False,
        rotation=_UNROTATED,
    ),
    Family("OlmoHybrid", _DELTA | {"linear_num_key_heads": 4, "head_dim": 8}, **_STATES),
    Family("LaraMini", _DELTA, **_STATES, rotation=_UNROTATED),
]  # fmt: skip
# Models with layers of several kinds, without states.
MIXED = [family for family in SERVED if family.name in ("Gemma2", "Gemma3", "Gemma3n", "Gemma4", "GptOss", "Llama4")]
_LATENT = "multi-head latent attention (MLA)"
REFUSED = [
    Family("Youtu", refused=_LATENT),
    Family("DeepseekV2", _ROUTED, refused=_LATENT),
    Family("Glm4MoeLite", _ROUTED, refused=_LATENT),
    Family(
        "LongcatFlash",
        {"num_layers": 2, "n_routed_experts": 4, "moe_topk": 2, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 32},
        refused=_LATENT,
    ),
    Family("MiniCPM3", refused=_LATENT),
    Family("Mistral4", _ROUTED, refused=_LATENT),
    Family("Bloom", refused="attention by code of its own"),
    Family("Mpt", refused="attention by code of its own"),
    Family("DeepseekV3", _ROUTED, refused=_LATENT),
    Family("DeepseekV32", _ROUTED | {"kv_lora_rank": 16, "q_lora_rank": 16, "index_n_heads": 2}, refused=_LATENT),
    Family(
        "MiniMax",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 2,
            "block_size": 16,
        },
        refused="a cache of its own",
    ),
    Family("KimiLinear", {"layer_types": _LINEAR[:3], "kv_lora_rank": 16}, refused=_LATENT),
    Family("BailingHybrid", refused=_LATENT),
    Family("RecurrentGemma", refused="keeps recurrent states outside of its cache", since="5.24"),
]
