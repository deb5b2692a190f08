"""Tiny GGUF files, and a forward pass over them by gguf's own reader, as llama.cpp computes one."""

import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch

from lkv.hf.loading import load_model

HIDDEN, HEADS, KV_HEADS, DIM, LAYERS, VOCABULARY, WIDE = 64, 4, 2, 16, 2, 260, 64
CONTEXT, EXPERTS = 512, 4
Settings = dict[str, object]


EPSILON: Settings = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0}


def write_gguf(
    path: Path,
    architecture: str = "llama",
    settings: Settings = EPSILON,
    tensors: Callable | None = None,
    matrices: str = "F32",
    leave_out: str = "",
    end_tokens: tuple[int, int] | None = None,
    **more: np.ndarray,
) -> Path:
    """A tiny random model with a byte-level tokenizer, as llama.cpp writes one.

    Args:
        path: The file.
        architecture: The name of the architecture, before each setting.
        settings: Settings beside those of the sizes; None leaves one out.
        tensors: Yields names and shapes, as `decoder` makes them.
        matrices: The type of all matrices.
        leave_out: The name of a tensor that the file lacks.
        end_tokens: The ids that end a turn (eot) and a message (eom).
        more: Further tensors by their names, with `__` for dots.
    """
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    base: Settings = {
        "context_length": CONTEXT, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": WIDE,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": DIM,
        "attention.value_length": DIM, "rope.dimension_count": DIM, "vocab_size": VOCABULARY,
    }  # fmt: skip
    for name, value in (base | settings).items():
        if value is None:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(f"{architecture}.{name}", value)
    letters = [chr(0x100 + number) for number in range(VOCABULARY - 5)]
    pairs = [letters[0:2], letters[2:4]]  # of one merge, transformers 5.2 reads a text instead of a list
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<pad>", "<s>", "</s>", *letters, *map("".join, pairs)])
    writer.add_token_types([3, 3, 3, *[1] * (len(letters) + 2)])
    writer.add_token_scores([0.0] * (len(letters) + 5))  # which transformers 5.2 reads for Gemma
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    if end_tokens is not None:
        writer.add_eot_token_id(end_tokens[0])
        writer.add_eom_token_id(end_tokens[1])
    for name, shape in (tensors or decoder())():
        values = (generator.normal(size=shape) * 0.3 + ("norm.weight" in name)).astype(np.float32)
        kind = gguf.GGMLQuantizationType[matrices if len(shape) == 2 else "F32"]
        if name != leave_out:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in more.items():
        writer.add_tensor(name.replace("__", "."), values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def decoder(
    biases: str = "",
    norms: str = "",
    head_norms: bool = False,
    output: bool = True,
    fused: bool = False,
    experts: str = "",
):
    """Names and shapes of a decoder's tensors; `biases` and `norms` are the names of further ones.

    `experts` is "exps" for a mixture, "exps shexp" for one with a shared expert.
    """
    shapes = {
        "attn_q": (HEADS * DIM, HIDDEN), "attn_k": (KV_HEADS * DIM, HIDDEN), "attn_v": (KV_HEADS * DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * DIM), "ffn_gate": (WIDE, HIDDEN), "ffn_up": (WIDE, HIDDEN),
        "ffn_down": (HIDDEN, WIDE),
    }  # fmt: skip
    if fused:
        shapes |= {"attn_qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), "ffn_up": (2 * WIDE, HIDDEN)}
        for name in ("attn_q", "attn_k", "attn_v", "ffn_gate"):
            del shapes[name]

    if experts:
        for part in ("gate", "up", "down"):
            shape = shapes.pop(f"ffn_{part}")
            shapes |= {f"ffn_{part}_{kind}": (EXPERTS, *shape) if kind == "exps" else shape for kind in experts.split()}
        shapes |= {"ffn_gate_inp": (EXPERTS, HIDDEN)} | ({"ffn_gate_inp_shexp": (HIDDEN,)} if "sh" in experts else {})

    def tensors():
        yield "token_embd.weight", (VOCABULARY, HIDDEN)
        for layer in range(LAYERS):
            for name, shape in shapes.items():
                yield f"blk.{layer}.{name}.weight", shape
                if name in biases.split():
                    yield f"blk.{layer}.{name}.bias", shape[:1]
            for name in ("attn_norm", "ffn_norm", *norms.split()):
                yield f"blk.{layer}.{name}.weight", (HIDDEN,)
            for name in ("attn_q_norm", "attn_k_norm") if head_norms else ():
                yield f"blk.{layer}.{name}.weight", (DIM,)
        yield "output_norm.weight", (HIDDEN,)
        if output:
            yield "output.weight", (VOCABULARY, HIDDEN)

    return tensors


def rope(x, settings: Settings, tensors, base: float, is_interleaved: bool, is_scaled: bool = True):
    """Rotate x [T, heads, DIM] as `ggml_rope_ext` does."""
    tokens, rotated = len(x), int(settings.get("rope.dimension_count", DIM))
    kind = settings.get("rope.scaling.type", "linear")
    factor = settings.get("rope.scaling.factor", settings.get("rope.scale_linear", 0)) or 1
    scale = 1 / factor if kind != "none" and is_scaled else 1.0
    original = settings.get("rope.scaling.original_context_length", CONTEXT)
    length = "long" if tokens > original else "short"
    divisors = tensors.get("rope_freqs.weight", tensors.get(f"rope_factors_{length}.weight", np.ones(rotated // 2)))
    pair = np.arange(rotated // 2)
    extrapolated = np.arange(tokens)[:, None] * base ** (-2 * pair / rotated) / divisors
    magnitude = settings.get("rope.scaling.attn_factor", 1.0)
    angle = scale * extrapolated
    if kind == "yarn":
        low, high = (
            rotated * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(base))
            for beta in (
                settings.get("rope.scaling.yarn_beta_fast", 32),
                settings.get("rope.scaling.yarn_beta_slow", 1),
            )
        )
        low, high = max(0, math.floor(low)), min(rotated - 1, math.ceil(high))
        mix = 1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)
        angle = angle * (1 - mix) + extrapolated * mix
        magnitude *= 1 + 0.1 * math.log(1 / scale)
    cos, sin = np.cos(angle)[:, None] * magnitude, np.sin(angle)[:, None] * magnitude
    head, rest = x[..., :rotated], x[..., rotated:]
    one, two = (head[..., 0::2], head[..., 1::2]) if is_interleaved else np.split(head, 2, -1)
    turned = [one * cos - two * sin, two * cos + one * sin]
    turned = np.stack(turned, -1).reshape(head.shape) if is_interleaved else np.concatenate(turned, -1)
    return np.concatenate([turned, rest], -1)


def normalised(x, weight, epsilon: float):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


def mix_experts(x, tensors, used: int, is_normalised: bool):
    """A layer's experts for each row of x, and the one that all rows share, if any."""
    weights = softmax(x @ tensors["ffn_gate_inp.weight"].T)
    gate, up, down = (tensors[f"ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
    mixed = np.zeros_like(x)
    for row, chances in enumerate(weights):
        chosen = np.argsort(-chances)[:used]
        total = chances[chosen].sum() if is_normalised else 1
        for expert in chosen:
            inner = silu(gate[expert] @ x[row]) * (up[expert] @ x[row])
            mixed[row] += chances[expert] / total * (down[expert] @ inner)
    if "ffn_gate_inp_shexp.weight" in tensors:
        gate, up, down = (tensors[f"ffn_{part}_shexp.weight"] for part in ("gate", "up", "down"))
        share = 1 / (1 + np.exp(-x @ tensors["ffn_gate_inp_shexp.weight"]))
        mixed += share[:, None] * ((silu(x @ gate.T) * (x @ up.T)) @ down.T)
    return mixed


def forward(path: Path, ids: list[int]) -> np.ndarray:
    """Logits [T, vocabulary] of a file, computed from its own tensors and settings."""
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    start = f"{architecture}."
    settings = {name.removeprefix(start): f.contents() for name, f in reader.fields.items() if name.startswith(start)}
    all_tensors = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        for tensor in reader.tensors
    }
    is_gemma, epsilon = architecture.startswith("gemma"), settings["attention.layer_norm_rms_epsilon"]
    cap = lambda x, limit: limit * np.tanh(x / limit) if limit else x  # noqa: E731
    x = all_tensors["token_embd.weight"][ids] * (math.sqrt(HIDDEN) if is_gemma else 1)
    positions, default_caps = np.arange(len(ids)), (50.0, 30.0) if architecture == "gemma2" else (None, None)
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    caps = [settings.get(name, default) for name, default in zip(names, default_caps, strict=True)]
    for layer in range(LAYERS):
        own = {
            name.removeprefix(f"blk.{layer}."): values
            for name, values in all_tensors.items()
            if name.startswith(f"blk.{layer}.")
        }
        project = lambda x, name: x @ own[f"{name}.weight"].T + own.get(f"{name}.bias", 0)  # noqa: B023, E731
        y = normalised(x, own["attn_norm.weight"], epsilon)
        if "attn_qkv.weight" in own:
            q, k, v = np.split(project(y, "attn_qkv"), [HEADS * DIM, (HEADS + KV_HEADS) * DIM], -1)
        else:
            q, k, v = (project(y, f"attn_{name}") for name in "qkv")
        q, k, v = (part.reshape(len(ids), -1, DIM) for part in (q, k, v))
        if "attn_q_norm.weight" in own:
            q, k = normalised(q, own["attn_q_norm.weight"], epsilon), normalised(k, own["attn_k_norm.weight"], epsilon)
        pattern = settings.get("attention.sliding_window_pattern", {"gemma2": 2, "gemma3": 6}.get(architecture))
        is_sliding = pattern is None or (pattern[layer] if isinstance(pattern, list) else (layer + 1) % pattern != 0)
        if architecture == "gemma3" and "attention.sliding_window" not in settings:
            is_sliding = False
        base = settings.get("rope.freq_base", 10000.0)
        if architecture == "gemma3" and is_sliding:
            base = settings.get("rope.freq_base_swa", 10000.0)
        turn = (settings, all_tensors, base, architecture == "llama", not (architecture == "gemma3" and is_sliding))
        q, k = rope(q, *turn), rope(k, *turn)
        scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, HEADS // KV_HEADS, 1))
        scores = cap(scores * (settings.get("attention.scale") or DIM**-0.5), caps[0])
        distance = positions[:, None] - positions
        window = settings.get("attention.sliding_window", CONTEXT) if is_sliding else CONTEXT
        scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
        y = np.einsum("hqk,khd->qhd", softmax(scores), np.repeat(v, HEADS // KV_HEADS, 1)).reshape(len(ids), -1)
        y = project(y, "attn_output")
        if is_gemma:
            y = normalised(y, own["post_attention_norm.weight"], epsilon)
        x = x + y
        y = normalised(x, own["ffn_norm.weight"], epsilon)
        if "ffn_gate_inp.weight" in own:
            y = mix_experts(y, own, settings["expert_used_count"], architecture == "qwen3moe")
        else:
            gate, up = np.split(project(y, "ffn_up"), 2, -1) if "attn_qkv.weight" in own else (
                project(y, "ffn_gate"), project(y, "ffn_up")
            )  # fmt: skip
            y = project((gelu(gate) if is_gemma else silu(gate)) * up, "ffn_down")
        x = x + (normalised(y, own["post_ffw_norm.weight"], epsilon) if is_gemma else y)
    x = normalised(x, all_tensors["output_norm.weight"], epsilon)
    logits = x @ all_tensors.get("output.weight", all_tensors["token_embd.weight"]).T
    return cap(logits, caps[1])


def largest_difference(path: Path, tokens: int) -> float:
    ids = np.random.default_rng(1).integers(3, VOCABULARY, tokens).tolist()
    model, _ = load_model(str(path), torch.float32)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().numpy()
    expected = forward(path, ids)
    return float(np.abs(logits - expected).max() / np.abs(expected).max())
