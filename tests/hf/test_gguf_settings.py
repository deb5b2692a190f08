"""Every tensor and setting of a GGUF file is in the converted model, or refused by name.

The reference is a forward pass written here over gguf's own reader, as llama.cpp computes one.
"""

import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from lkv.errors import ModelLoadError
from lkv.hf.conversion import _DONE, is_complete
from lkv.hf.loading import load_model

HIDDEN, HEADS, KV_HEADS, DIM, LAYERS, VOCABULARY, WIDE = 64, 4, 2, 16, 2, 64, 48
CONTEXT = 256
Settings = dict[str, object]


def write(path: Path, architecture: str, settings: Settings, tensors: Callable, **more: np.ndarray) -> Path:
    """A tiny random model of the names and shapes of `tensors`, and `more` tensors by names with `__` for dots."""
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
    for name, shape in tensors():
        values = generator.normal(size=shape) * 0.3 + ("norm.weight" in name)
        writer.add_tensor(name, np.ascontiguousarray(values.astype(np.float32)))
    for name, values in more.items():
        writer.add_tensor(name.replace("__", "."), values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def decoder(biases: str = "", norms: str = "", head_norms: bool = False, output: bool = True, fused: bool = False):
    """Names and shapes of a decoder's tensors; `biases` and `norms` are the names of further ones."""
    shapes = {
        "attn_q": (HEADS * DIM, HIDDEN), "attn_k": (KV_HEADS * DIM, HIDDEN), "attn_v": (KV_HEADS * DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * DIM), "ffn_gate": (WIDE, HIDDEN), "ffn_up": (WIDE, HIDDEN),
        "ffn_down": (HIDDEN, WIDE),
    }  # fmt: skip
    if fused:
        shapes |= {"attn_qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), "ffn_up": (2 * WIDE, HIDDEN)}
        for name in ("attn_q", "attn_k", "attn_v", "ffn_gate"):
            del shapes[name]

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


def forward(path: Path, ids: list[int]) -> np.ndarray:
    """Logits [T, vocabulary] of a file, computed from its own tensors and settings."""
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    start = f"{architecture}."
    settings = {name.removeprefix(start): f.contents() for name, f in reader.fields.items() if name.startswith(start)}
    all_tensors = {tensor.name: np.array(tensor.data, np.float64) for tensor in reader.tensors}
    is_gemma, epsilon = architecture.startswith("gemma"), settings["attention.layer_norm_rms_epsilon"]
    cap = lambda x, limit: limit * np.tanh(x / limit) if limit else x  # noqa: E731
    x = all_tensors["token_embd.weight"][ids] * (math.sqrt(HIDDEN) if is_gemma else 1)
    positions = np.arange(len(ids))
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
        base = settings.get("rope.freq_base", 10000.0)
        if architecture == "gemma3" and is_sliding:
            base = settings.get("rope.freq_base_swa", 10000.0)
        turn = (settings, all_tensors, base, architecture == "llama", not (architecture == "gemma3" and is_sliding))
        q, k = rope(q, *turn), rope(k, *turn)
        scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, HEADS // KV_HEADS, 1))
        scores = cap(scores * (settings.get("attention.scale") or DIM**-0.5), settings.get("attn_logit_softcapping"))
        distance = positions[:, None] - positions
        window = settings.get("attention.sliding_window", CONTEXT) if is_sliding else CONTEXT
        scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
        y = np.einsum("hqk,khd->qhd", softmax(scores), np.repeat(v, HEADS // KV_HEADS, 1)).reshape(len(ids), -1)
        y = project(y, "attn_output")
        if is_gemma:
            y = normalised(y, own["post_attention_norm.weight"], epsilon)
        x = x + y
        y = normalised(x, own["ffn_norm.weight"], epsilon)
        gate, up = np.split(project(y, "ffn_up"), 2, -1) if "attn_qkv.weight" in own else (
            project(y, "ffn_gate"), project(y, "ffn_up")
        )  # fmt: skip
        y = project((gelu(gate) if is_gemma else gate / (1 + np.exp(-gate))) * up, "ffn_down")
        x = x + (normalised(y, own["post_ffw_norm.weight"], epsilon) if is_gemma else y)
    x = normalised(x, all_tensors["output_norm.weight"], epsilon)
    logits = x @ all_tensors.get("output.weight", all_tensors["token_embd.weight"]).T
    return cap(logits, settings.get("final_logit_softcapping"))


def llama3_factors(base: float, factor: float = 8.0, original: int = 8192) -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3.1."""
    factors = []
    for frequency in base ** (-np.arange(0, DIM, 2) / DIM):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / 4:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors)


EPSILON: Settings = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0}
LINEAR: Settings = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN: Settings = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32}
LONG = {
    "rope_factors_short__weight": np.linspace(1, 1.5, DIM // 2),
    "rope_factors_long__weight": np.linspace(1, 20, DIM // 2),
}
LONG_SETTINGS: Settings = {"rope.scaling.attn_factor": 1.19, "rope.scaling.original_context_length": 32}
GEMMA_NORMS = "post_attention_norm post_ffw_norm"
GEMMA2: Settings = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "attention.sliding_window": 8}
QKV = "attn_q attn_k attn_v"
FILES: dict[str, tuple[str, Settings, Callable, dict]] = {
    "plain": ("llama", {}, decoder(), {}),
    "tied": ("llama", {}, decoder(output=False), {}),
    "eps": ("llama", {"attention.layer_norm_rms_epsilon": 0.1, "rope.freq_base": 500.0}, decoder(), {}),
    "llama3": ("llama", {"rope.freq_base": 5e5}, decoder(), {"rope_freqs__weight": llama3_factors(5e5)}),
    "frequencies": ("llama", {}, decoder(), {"rope_freqs__weight": np.array([1, 1, 2, 4, 8, 8, 9, 9.0])}),
    "linear": ("llama", LINEAR, decoder(), {}),
    "linear_old": ("llama", {"rope.scale_linear": 4.0}, decoder(), {}),
    "linear_and_frequencies": ("llama", LINEAR, decoder(), {"rope_freqs__weight": np.linspace(1, 3, DIM // 2)}),
    "yarn": ("llama", YARN, decoder(), {}),
    "yarn_betas": (
        "llama", YARN | {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0,
                         "rope.scaling.attn_factor": 1.3}, decoder(), {},
    ),
    "longrope": ("llama", LONG_SETTINGS, decoder(), LONG),
    "magnitude": ("llama", {"rope.scaling.attn_factor": 1.3}, decoder(), {}),
    "no_scaling": ("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, decoder(), {}),
    "attention_biases": ("llama", {}, decoder(QKV + " attn_output"), {}),
    "some_biases": ("llama", {}, decoder("attn_q attn_v ffn_down"), {}),
    "qwen2": ("qwen2", {}, decoder(QKV), {}),
    "qwen2_yarn": ("qwen2", YARN, decoder(QKV, output=False), {}),
    "qwen3": ("qwen3", LINEAR, decoder(head_norms=True), {}),
    "phi3": ("phi3", {"attention.sliding_window": 8}, decoder(fused=True), {}),
    "phi3_longrope": ("phi3", LONG_SETTINGS, decoder(fused=True), LONG),
    "phi3_linear": ("phi3", LINEAR, decoder(fused=True), {}),
    "gemma2": ("gemma2", GEMMA2, decoder(norms=GEMMA_NORMS, output=False), {}),
    "gemma3": (
        "gemma3", LINEAR | {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False],
                            "rope.freq_base": 1e6, "rope.freq_base_swa": 20000.0},
        decoder(norms=GEMMA_NORMS, output=False, head_norms=True), {},
    ),
    "gemma3_scale": (
        "gemma3", {"attention.scale": 0.1, "attention.sliding_window": 8},
        decoder(norms=GEMMA_NORMS, output=False, head_norms=True), {},
    ),
}  # fmt: skip


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def largest_difference(path: Path, tokens: int) -> float:
    ids = np.random.default_rng(1).integers(3, VOCABULARY, tokens).tolist()
    model, _ = load_model(str(path), torch.float32)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().numpy()
    expected = forward(path, ids)
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", FILES)
def test_a_converted_file_computes_what_llama_cpp_reads_in_it(tmp_path, cache, capsys, name):
    architecture, settings, tensors, more = FILES[name]
    path = write(tmp_path / "tiny.gguf", architecture, EPSILON | settings, tensors, **more)
    assert largest_difference(path, 24) < 1e-4
    assert largest_difference(path, 60) < 1e-4  # beyond the length at which LongRoPE changes


def test_the_scaling_of_llama_3_is_named_so(tmp_path, cache, capsys):
    """Its policies are found by it."""
    architecture, settings, tensors, more = FILES["llama3"]
    model, _ = load_model(str(write(tmp_path / "a.gguf", architecture, EPSILON | settings, tensors, **more)))
    rope_parameters = model.config.rope_parameters
    assert rope_parameters["rope_type"] == "llama3" and rope_parameters["factor"] == 8


@pytest.mark.parametrize(
    ("settings", "tensors", "more", "part"),
    [
        ({"attention.causal": False}, decoder(), {}, "llama.attention.causal"),
        ({"attention.scale": 0.3}, decoder(), {}, "llama.attention.scale"),
        ({"attention.clamp_kqv": 8.0}, decoder(), {}, "llama.attention.clamp_kqv"),
        ({"attn_logit_softcapping": 50.0}, decoder(), {}, "llama.attn_logit_softcapping"),
        ({"attention.sliding_window": 8}, decoder(), {}, "llama.attention.sliding_window"),
        ({"residual_scale": 0.5}, decoder(), {}, "llama.residual_scale"),
        ({"a_setting_of_tomorrow": 2}, decoder(), {}, "llama.a_setting_of_tomorrow"),
        (YARN | {"rope.scaling.yarn_log_multiplier": 0.7}, decoder(), {}, "llama.rope.scaling.yarn_log_multiplier"),
        (YARN, decoder(), {"rope_freqs__weight": np.full(8, 2.0)}, "rope_freqs.weight"),
        ({"rope.dimension_count": 8}, decoder(), {}, "llama.rope.dimension_count"),
        ({}, decoder(head_norms=True), {}, "blk.0.attn_q_norm.weight"),
        ({}, decoder(), {"blk__1__attn_sinks__weight": np.ones(HEADS)}, "blk.1.attn_sinks.weight"),
        ({}, decoder(), {"rope_factors_long__weight": np.ones(8)}, "rope_factors_long.weight"),
    ],
)  # fmt: skip
def test_what_a_model_has_no_place_for_is_refused_by_name(tmp_path, cache, capsys, settings, tensors, more, part):
    path = write(tmp_path / "tiny.gguf", "llama", EPSILON | settings, tensors, **more)
    with pytest.raises(ModelLoadError, match=f"tiny.gguf holds {part}, which transformers does not read"):
        load_model(str(path))
    assert not [folder for folder in cache.iterdir() if folder.is_dir()]


def test_conversions_of_earlier_versions_are_made_again(tmp_path, cache, capsys):
    path = write(tmp_path / "tiny.gguf", "llama", EPSILON, decoder())
    load_model(str(path))
    (folder,) = [folder for folder in cache.iterdir() if folder.is_dir()]
    record = folder / _DONE
    record.write_text(record.read_text().replace('"version": 2, ', ""))
    assert not is_complete(folder)
    capsys.readouterr()
    load_model(str(path))
    assert "converting tiny.gguf" in capsys.readouterr().err and is_complete(folder)
