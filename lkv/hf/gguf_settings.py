"""A GGUF file's settings of the forward pass: applied to the transformers configuration, or rejected by name.

transformers reads the settings in its own mapping, silently drops the rest, and takes the defaults of its configuration
classes for those that a file lacks. The reference is how llama.cpp reads a setting: `llama_model::load_hparams` and
`ggml_rope_ext`.
"""

import re
from fnmatch import fnmatch
from typing import Any

import numpy as np
from tokenizers import Regex, decoders, pre_tokenizers

# The configuration attributes that a setting may correspond to; those that the model has are assigned.
_ATTRIBUTES = {
    "attention.layer_norm_*epsilon": (
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_eps",
        "norm_epsilon",
    ),
    "attention.key_length": ("head_dim",),
    "context_length": ("max_position_embeddings",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logit_scale",),
    "use_parallel_residual": ("use_parallel_residual",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
# Settings that tensor shapes imply, that transformers maps for every architecture, or that are only descriptive.
_SHAPES = (
    "embedding_length", "block_count", "feed_forward_length", "vocab_size", "attention.head_count*",
    "attention.value_length", "attention.*_length_swa", "expert_count", "expert_shared_count", "ssm.*", "shortconv.*",
    "pooling_type", "tensor_data_layout", "rope.scaling.finetuned", "rope.dimension_count_swa",
)  # fmt: skip
# Settings that llama.cpp requires, of all architectures and of some. It has a default for two of Gemma 4 and for that
# of Llama, without which transformers leaves the rows of queries and keys in llama.cpp's order.
_REQUIRED = ("block_count", "context_length", "embedding_length", "attention.head_count")
_REQUIRED_BY = {
    "llama": ("attention.head_count_kv",),
    "qwen2moe": ("expert_count", "expert_used_count"),
    "qwen3moe": ("expert_count", "expert_used_count"),
    "lfm2": ("attention.head_count_kv", "shortconv.l_cache"),
    "gemma4": (
        "attention.key_length", "attention.key_length_swa", "attention.sliding_window",
        "attention.sliding_window_pattern", "final_logit_softcapping",
    ),
}  # fmt: skip
# Settings with another neutral value than 0, "" and "none", the values that mean the same as a missing setting.
_NEUTRAL = {"attention.causal": (True,), "expert_gating_func": (0, 1), "expert_weights_scale": (0, 1)}
# llama.cpp and transformers compute the attention scale of these models from the hidden size instead of the head size.
_WIDE_SCALE = {("gemma2", 46), ("gemma3", 62)}
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")  # llama.cpp loads no file with another one
_INFINITE = 1e29  # a factor in `rope_freqs` that disables a frequency
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # of 3.1 to 3.3
# Values of `tokenizer.ggml.pre` for which llama.cpp splits as GPT-2 does, for some after each digit. transformers knows
# those of other splits. Files without the setting are read as GPT-2's, and SmolLM as in all its measurements here.
_LIKE_GPT2 = frozenset("gpt-2 gpt2 default smollm mpt olmo jais phi-2 trillion exaone4 gigachat mellum".split())
_SINGLE_DIGITS = frozenset("starcoder refact command-r codeshell exaone minerva-7b".split())
# Those for which llama.cpp takes a word of the vocabulary whole, whatever its merges give, and begins texts with BOS.
_WHOLE_WORDS = frozenset(
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken".split()
)


class UnreadPartError(ValueError):
    """A GGUF file has a setting or tensor that changes the model's outputs and that transformers does not support."""


class AbsentSettingError(ValueError):
    """A GGUF file lacks a setting that its conversion needs."""


def check_settings(reader: Any) -> None:
    """Raise AbsentSettingError for a GGUF file without a setting that its conversion needs.

    Args:
        reader: The file's `gguf.GGUFReader`.
    """
    settings = _settings(reader)
    architecture = reader.get_field("general.architecture").contents()
    required = [*_REQUIRED, *_REQUIRED_BY.get(architecture, ())]
    if not {"attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"} & settings.keys():
        required.append("attention.layer_norm_rms_epsilon")
    if "attention.key_length" not in settings and any(
        tensor.name.endswith(".attn_output.weight") and tensor.shape[0] != settings.get("embedding_length")
        for tensor in reader.tensors
    ):  # the heads are not `embedding_length / head_count` wide
        required.append("attention.key_length")
    for name in required:
        if name not in settings:
            raise AbsentSettingError(f"{architecture}.{name}")


def apply_tokenizer_settings(tokenizer: Any, reader: Any) -> None:
    """Apply the settings of a GGUF file that say how text is split, of which transformers reads some.

    Args:
        tokenizer: The tokenizer that transformers made from the file, modified in place.
        reader: The file's `gguf.GGUFReader`.

    Raises:
        UnreadPartError: For a way to split that neither transformers nor this function knows.
    """
    backend = tokenizer.backend_tokenizer
    fields = (reader.get_field(f"tokenizer.ggml.{name}") for name in ("pre", "add_space_prefix", "add_bos_token"))
    split, has_space, has_bos = (None if field is None else field.contents() for field in fields)
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace) and has_space is False:
        backend.pre_tokenizer.prepend_scheme = "never"
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    if isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        if split in _SINGLE_DIGITS:
            digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
        elif split is not None and split not in _LIKE_GPT2:
            raise UnreadPartError(f"tokenizer.ggml.pre {str(split)[:80]!r}")
    elif split in _WHOLE_WORDS:
        backend.model.ignore_merges = True
        tokenizer.add_bos_token = has_bos is not False and tokenizer.bos_token is not None


def apply_settings(config: Any, reader: Any) -> None:
    """Apply a GGUF file's settings of the forward pass to the configuration that transformers made from it.

    Args:
        config: The configuration, modified in place.
        reader: The file's `gguf.GGUFReader`.

    Raises:
        UnreadPartError: For a setting or a tensor of RoPE factors that the configuration cannot express.
    """
    architecture = reader.get_field("general.architecture").contents()
    text, prefix = config.get_text_config(decoder=True), f"{architecture}."
    unread = _settings(reader)
    _add_defaults(text, unread)
    tensors = {tensor.name for tensor in reader.tensors}
    for setting in [name for name in unread if any(fnmatch(name, pattern) for pattern in _SHAPES)]:
        del unread[setting]
    # Gemma 4 has two head sizes, which transformers reads.
    if hasattr(text, "global_head_dim") or unread.get("attention.key_length") == _head_dim(text):
        unread.pop("attention.key_length", None)
    if {(rms := "attention.layer_norm_rms_epsilon"), (plain := "attention.layer_norm_epsilon")} <= unread.keys():
        del unread[plain if hasattr(text, "rms_norm_eps") else rms]
    for name in list(unread):
        for pattern, attributes in _ATTRIBUTES.items():
            own = [attribute for attribute in attributes if hasattr(text, attribute)] if fnmatch(name, pattern) else []
            for attribute in own:
                setattr(text, attribute, unread[name])
            if own:
                del unread[name]
                break
    scale = unread.pop("attention.scale", None)
    if hasattr(text, "query_pre_attn_scalar"):
        is_wide = (architecture, text.num_hidden_layers) in _WIDE_SCALE
        scalar = text.hidden_size / text.num_attention_heads if is_wide else text.head_dim
        scalar = round(scale**-2, 3) if scale else scalar
        text.query_pre_attn_scalar = int(scalar) if scalar == int(scalar) else scalar
    elif scale and not np.isclose(scale, _head_dim(text) ** -0.5):
        raise UnreadPartError(f"{prefix}attention.scale")
    _apply_window(text, unread, text.max_position_embeddings if hasattr(text, "max_position_embeddings") else 0)
    for attribute, parts in (("attention_bias", "attn_(q|k|v|qkv|output)"), ("mlp_bias", "ffn_(gate|up|down)")):
        if any(re.search(rf"\.{parts}\.bias$", name) for name in tensors) and hasattr(text, attribute):
            setattr(text, attribute, True)
    factors = {
        tensor.name: np.array(tensor.data, np.float64).ravel()
        for tensor in reader.tensors
        if tensor.name.startswith("rope_f")
    }
    if hasattr(text, "rope_parameters"):
        _apply_rope(text, unread, factors)
    changes = [name for name, value in unread.items() if value not in _NEUTRAL.get(name, (0, "", "none"))]
    for part in (*factors, *(prefix + name for name in changes)):
        raise UnreadPartError(part)
    type(config).from_dict(config.to_dict())  # validates the values, as loading the folder will


def _settings(reader: Any) -> dict[str, Any]:
    """Return the settings of a file's architecture, without its name before each."""
    prefix = f"{reader.get_field('general.architecture').contents()}."
    return {
        name.removeprefix(prefix): field.contents() for name, field in reader.fields.items() if name.startswith(prefix)
    }


def _add_defaults(text: Any, settings: dict[str, Any]) -> None:
    """Add llama.cpp's values for absent settings, where the configuration class may have those of another model."""
    heads, width = settings["attention.head_count"], settings.get("feed_forward_length")
    if hasattr(text, "num_key_value_heads") and "attention.head_count_kv" not in settings:
        text.num_key_value_heads = text.num_attention_heads
    if hasattr(text, "head_dim") and isinstance(heads, int) and heads:
        settings.setdefault("attention.key_length", settings["embedding_length"] // heads)
    if hasattr(text, "moe_intermediate_size") and isinstance(width, int) and "expert_used_count" in settings:
        settings.setdefault("expert_feed_forward_length", width // settings["expert_used_count"])
        if hasattr(text, "shared_expert_intermediate_size"):
            settings.setdefault("expert_shared_feed_forward_length", width)
    if hasattr(text, "rope_parameters"):
        settings.setdefault("rope.freq_base", 10000.0)


def _head_dim(text: Any) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _apply_window(text: Any, unread: dict[str, Any], longest: int) -> None:
    """Assign the sliding window's length and the layers that use it."""
    window, pattern = unread.get("attention.sliding_window"), unread.get("attention.sliding_window_pattern")
    if text.model_type == "mistral":
        text.sliding_window = window or None  # the class default is a window
    layer_types = getattr(text, "layer_types", None)
    if text.model_type == "gemma3_text" and not window:
        pattern, unread["attention.sliding_window_pattern"] = 1, 1  # no layer slides
    if pattern and layer_types:
        if isinstance(pattern, int):
            pattern = [(layer + 1) % pattern != 0 for layer in range(len(layer_types))]
        text.layer_types = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern]
        del unread["attention.sliding_window_pattern"]
    if not window or window >= longest:
        unread.pop("attention.sliding_window", None)
    elif hasattr(text, "sliding_window") and (not layer_types or "sliding_attention" in layer_types):
        text.sliding_window = unread.pop("attention.sliding_window")


def _apply_rope(text: Any, unread: dict[str, Any], factors: dict[str, Any]) -> None:
    """Assign RoPE's base, rotated part and scaling; removes applied settings from `unread` and `factors`."""
    nested = "full_attention" in text.rope_parameters
    rope = dict(text.rope_parameters["full_attention"] if nested else text.rope_parameters)
    head_dim = _head_dim(text)
    rope["rope_theta"] = unread.pop("rope.freq_base")
    if (base := unread.pop("rope.freq_base_swa", None)) is not None:
        if not nested and base != rope["rope_theta"]:
            unread["rope.freq_base_swa"] = base
        elif nested:
            text.rope_parameters["sliding_attention"]["rope_theta"] = base
    rotated = unread.get("rope.dimension_count") or head_dim
    is_read = hasattr(text, "global_head_dim") or hasattr(text, "rotary_dim")
    if "partial_rotary_factor" in rope and not is_read:
        rope["partial_rotary_factor"] = rotated / head_dim
    if rotated == head_dim or "partial_rotary_factor" in rope or is_read:
        unread.pop("rope.dimension_count", None)
    # llama.cpp treats a missing type as "linear" and falls back to the factor's older name.
    kind = unread.pop("rope.scaling.type", "") or "linear"
    if kind not in _ROPE_SCALINGS:
        raise UnreadPartError(f"rope.scaling.type {str(kind)[:80]!r}")
    factor = unread.pop("rope.scaling.factor", 0) or unread.pop("rope.scale_linear", 0) or 1.0
    unread.pop("rope.scale_linear", None)
    original = unread.pop("rope.scaling.original_context_length", 0) or text.max_position_embeddings
    attention = unread.pop("rope.scaling.attn_factor", 0) or 1.0
    if kind == "none":
        factor = 1.0
    if kind == "yarn" and factor != 1 and not factors:
        betas = {name: unread.pop(f"rope.scaling.yarn_{name}", 0) for name in ("beta_fast", "beta_slow")}
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        rope |= {name: beta for name, beta in betas.items() if beta}
        if attention != 1:
            rope["attention_factor"] = attention * (0.1 * float(np.log(factor)) + 1)
        for name in ("yarn_ext_factor", "yarn_attn_factor"):
            if unread.get(f"rope.scaling.{name}") == 1:
                del unread[f"rope.scaling.{name}"]
    elif factors and kind != "yarn":
        short, long = _take_factors(factors, rotated // 2)
        rope |= _divided(short * factor, long * factor, rope["rope_theta"], original, attention)
    elif attention != 1 or (text.model_type == "phi3" and factor != 1):  # transformers supports it for LongRoPE only
        constant = np.full(rotated // 2, factor)
        rope |= _divided(constant, constant, rope["rope_theta"], original, attention)
    elif factor != 1 and kind != "yarn":
        rope |= {"rope_type": "linear", "factor": factor}
    if rope.get("rope_type") == "longrope" and hasattr(text, "original_max_position_embeddings"):
        text.original_max_position_embeddings = original
    text.rope_parameters = text.rope_parameters | {"full_attention": rope} if nested else rope


def _take_factors(factors: dict[str, Any], pairs: int) -> tuple[Any, Any]:
    """Remove and return the factors for short and long texts; they are equal if the file has only one tensor."""
    if wrong := [name for name, values in factors.items() if len(values) != pairs]:
        raise UnreadPartError(f"{len(factors[wrong[0]])} factors in {wrong[0]} for {pairs} pairs")
    if (both := factors.pop("rope_freqs.weight", None)) is not None:
        return both, both
    short, long = (factors.get(f"rope_factors_{length}.weight") for length in ("short", "long"))
    if short is None or long is None:
        raise UnreadPartError(next(iter(factors)))
    factors.clear()
    return short, long


def _divided(short: Any, long: Any, base: float, original: int, attention: float) -> dict[str, Any]:
    """Return RoPE settings that divide each frequency by its own factor.

    Args:
        short: The factors [d / 2] of texts of up to `original` tokens, for d rotated dimensions.
        long: The factors of longer texts.
        base: RoPE's base.
        original: The model's context length in tokens before its RoPE was scaled.
        attention: The scale of cos and sin.
    """
    if np.array_equal(short, long) and attention == 1:
        if short.max() > _INFINITE and set(short[short < _INFINITE]) <= {1.0}:
            return {"rope_type": "proportional", "partial_rotary_factor": float((short < _INFINITE).mean())}
        if np.allclose(short, _llama3_factors(base, len(short), factor := float(short.max())), rtol=1e-4):
            return {"rope_type": "llama3", "factor": round(factor, 4), **_LLAMA3}
    return {
        "rope_type": "longrope",
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "original_max_position_embeddings": original,
        "attention_factor": attention,
    }


def _llama3_factors(base: float, pairs: int, factor: float) -> Any:
    """Return the frequency divisors [pairs] of Llama 3.1 to 3.3's RoPE scaling, with its original settings."""
    low, high, original = _LLAMA3.values()
    turns = original * base ** (-np.arange(pairs) / pairs) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
