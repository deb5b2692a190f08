"""Every tensor and setting of a GGUF file is in the converted model, or refused by name.

The reference is `tests.hf.gguf_files.forward`.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, pre_tokenizers
from transformers import AutoConfig, GPT2Tokenizer, LlamaTokenizer
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from lkv.errors import ModelLoadError
from lkv.hf.conversion import _DONE, _VERSION, is_complete
from lkv.hf.gguf_settings import UnreadPartError, apply_settings, apply_tokenizer_settings
from lkv.hf.loading import load_model
from lkv.hf.spec import max_positions
from tests.hf.gguf_files import (
    CONTEXT,
    DIM,
    EPSILON,
    HEADS,
    HIDDEN,
    LAYERS,
    VOCABULARY,
    WIDE,
    Settings,
    decoder,
    largest_difference,
    write_gguf,
)


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


LINEAR: Settings = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN: Settings = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32}
LONG = {
    "rope_factors_short__weight": np.linspace(1, 1.5, DIM // 2),
    "rope_factors_long__weight": np.linspace(1, 20, DIM // 2),
}
LONG_SETTINGS: Settings = {"rope.scaling.attn_factor": 1.19, "rope.scaling.original_context_length": 32}
GEMMA_NORMS = "post_attention_norm post_ffw_norm"
GEMMA2: Settings = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "attention.sliding_window": 8}
EXPERTS: Settings = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": WIDE}
SHARED: Settings = {"expert_shared_feed_forward_length": WIDE}
# Without these heads are as wide as hidden size / heads.
LENGTHS: Settings = dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"))
QKV = "attn_q attn_k attn_v"
FILES: dict[str, tuple[str, Settings, Callable, dict]] = {
    "plain": ("llama", {}, decoder(), {}),
    "tied": ("llama", {}, decoder(output=False), {}),
    "eps": ("llama", {"attention.layer_norm_rms_epsilon": 0.1, "rope.freq_base": 500.0}, decoder(), {}),
    "epsilons": ("llama", {"attention.layer_norm_epsilon": 0.1}, decoder(), {}),
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
    "qwen3moe": ("qwen3moe", EXPERTS, decoder(head_norms=True, experts="exps"), {}),
    "qwen3moe_yarn": ("qwen3moe", EXPERTS | YARN, decoder(head_norms=True, experts="exps"), {}),
    "qwen2moe": ("qwen2moe", EXPERTS | SHARED, decoder(QKV, experts="exps shexp"), {}),
    "gemma2": ("gemma2", GEMMA2, decoder(norms=GEMMA_NORMS, output=False), {}),
    "gemma3": (
        "gemma3", LINEAR | {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False],
                            "rope.freq_base": 1e6, "rope.freq_base_swa": 20000.0},
        decoder(norms=GEMMA_NORMS, output=False, head_norms=True), {},
    ),
    "gemma3_without_base": (
        "gemma3", {"rope.freq_base": None, "attention.sliding_window": 8,
                   "attention.sliding_window_pattern": [True, False]},
        decoder(norms=GEMMA_NORMS, output=False, head_norms=True), {},
    ),
    "gemma3_without_window": (
        "gemma3", {"rope.freq_base": 500.0}, decoder(norms=GEMMA_NORMS, output=False, head_norms=True), {},
    ),
    "gemma2_without_caps": ("gemma2", {}, decoder(norms=GEMMA_NORMS, output=False), {}),
    "qwen3_without_lengths": ("qwen3", LENGTHS, decoder(head_norms=True), {}),
    "gemma2_without_lengths": ("gemma2", GEMMA2 | LENGTHS, decoder(norms=GEMMA_NORMS, output=False), {}),
    "qwen3moe_without_lengths": (
        "qwen3moe", EXPERTS | LENGTHS | {"expert_feed_forward_length": None, "feed_forward_length": 2 * WIDE},
        decoder(head_norms=True, experts="exps"), {},
    ),
    "qwen2moe_without_lengths": ("qwen2moe", EXPERTS | LENGTHS, decoder(QKV, experts="exps shexp"), {}),
    "gemma3_scale": (
        "gemma3", {"attention.scale": 0.1, "attention.sliding_window": 8},
        decoder(norms=GEMMA_NORMS, output=False, head_norms=True), {},
    ),
}  # fmt: skip


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", FILES)
def test_a_converted_file_computes_what_llama_cpp_reads_in_it(tmp_path, cache, capsys, name):
    architecture, settings, tensors, more = FILES[name]
    path = write_gguf(tmp_path / "tiny.gguf", architecture, EPSILON | settings, tensors, **more)
    assert largest_difference(path, 24) < 1e-4
    assert largest_difference(path, 60) < 1e-4  # beyond the length at which LongRoPE changes


def test_the_scaling_of_llama_3_is_named_so(tmp_path, cache, capsys):
    """Its policies are found by it."""
    architecture, settings, tensors, more = FILES["llama3"]
    model, _ = load_model(str(write_gguf(tmp_path / "a.gguf", architecture, EPSILON | settings, tensors, **more)))
    rope_parameters = model.config.rope_parameters
    assert rope_parameters["rope_type"] == "llama3" and rope_parameters["factor"] == 8


def test_a_gpt2_has_as_many_positions_as_its_file(tmp_path, cache):
    def tensors():
        matrices = {"attn_qkv": 3 * HIDDEN, "attn_output": HIDDEN, "ffn_up": 4 * HIDDEN}
        parts = [f"blk.{layer}.{part}" for layer in range(LAYERS) for part in ("attn_norm", "ffn_norm")]
        yield from ((f"{part}.{kind}", (HIDDEN,)) for part in [*parts, "output_norm"] for kind in ("weight", "bias"))
        yield from (("token_embd.weight", (VOCABULARY, HIDDEN)), ("position_embd.weight", (CONTEXT, HIDDEN)))
        for layer in range(LAYERS):
            for part, rows in matrices.items():
                yield from ((f"blk.{layer}.{part}.weight", (rows, HIDDEN)), (f"blk.{layer}.{part}.bias", (rows,)))
            yield from (
                (f"blk.{layer}.ffn_down.weight", (HIDDEN, 4 * HIDDEN)),
                (f"blk.{layer}.ffn_down.bias", (HIDDEN,)),
            )

    others = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count")
    settings = dict.fromkeys(others) | {"attention.layer_norm_epsilon": 1e-5, "feed_forward_length": 4 * HIDDEN}
    path = write_gguf(tmp_path / "tiny.gguf", "gpt2", settings, tensors)
    model, _ = load_model(str(path))
    stored = {tensor.name: torch.tensor(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    assert torch.equal(model.transformer.wpe.weight, stored["position_embd.weight"]) and len(stored) == 28
    assert torch.equal(model.transformer.h[1].attn.c_attn.weight, stored["blk.1.attn_qkv.weight"].T)
    assert max_positions(model) == CONTEXT


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
        ({"rope.scaling.type": "dynamic", "rope.scaling.factor": 4.0}, decoder(), {}, "rope.scaling.type 'dynamic'"),
        (YARN | {"rope.scaling.type": "YaRN"}, decoder(), {}, "rope.scaling.type 'YaRN'"),
        (YARN | {"rope.scaling.yarn_log_multiplier": 0.7}, decoder(), {}, "llama.rope.scaling.yarn_log_multiplier"),
        (YARN, decoder(), {"rope_freqs__weight": np.full(8, 2.0)}, "rope_freqs.weight"),
        ({"rope.dimension_count": 8}, decoder(), {}, "llama.rope.dimension_count"),
        ({}, decoder(), {"rope_freqs__weight": np.ones(4)}, "4 factors in rope_freqs.weight for 8 pairs"),
        ({}, decoder(output=False), {"foo__weight": np.ones(3)}, "foo.weight"),
        ({}, decoder(), {"blk__0__attn_norm__bias": np.ones(HIDDEN)}, "blk.0.attn_norm.bias"),
        ({}, decoder("attn_q"), {"blk__1__ffn_norm__bias": np.ones(HIDDEN)}, "blk.1.ffn_norm.bias"),
        ({}, decoder(head_norms=True), {}, "blk.0.attn_q_norm.weight"),
        ({}, decoder(), {"blk__1__attn_sinks__weight": np.ones(HEADS)}, "blk.1.attn_sinks.weight"),
        ({}, decoder(), {"rope_factors_long__weight": np.ones(8)}, "rope_factors_long.weight"),
    ],
)  # fmt: skip
def test_what_a_model_has_no_place_for_is_refused_by_name(tmp_path, cache, capsys, settings, tensors, more, part):
    path = write_gguf(tmp_path / "tiny.gguf", "llama", EPSILON | settings, tensors, **more)
    with pytest.raises(ModelLoadError, match=f"tiny.gguf holds {part}, which transformers does not read"):
        load_model(str(path))
    assert not [folder for folder in cache.iterdir() if folder.is_dir()]


@pytest.mark.parametrize("architecture", ["llama", "minimax-m2", "gemma3", "stablelm", "nemotron"])
@pytest.mark.parametrize(("given", "base"), [(None, 10000.0), (500.0, 500.0)])
def test_the_base_of_rope_is_llama_cpp_s_where_a_file_has_none(tmp_path, architecture, given, base):
    """The classes of transformers have others: 1e6 for Gemma 3, 5e6 for MiniMax."""
    if architecture.replace("-", "_") not in GGUF_CONFIG_MAPPING:
        pytest.skip(f"this version of transformers does not read {architecture}")
    path = write_gguf(tmp_path / "tiny.gguf", architecture, EPSILON | {"rope.freq_base": given})
    config = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    apply_settings(config, gguf.GGUFReader(path))
    rope = config.rope_parameters
    assert rope.get("full_attention", rope)["rope_theta"] == base


def wide(tensors):
    """The tensors with heads of twice the width."""
    for name, (rows, *columns) in tensors:
        if name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight")) or "attn_q_norm" in name:
            rows *= 2
        yield name, (rows, *(2 * size if "attn_output" in name else size for size in columns))


@pytest.mark.parametrize(
    ("architecture", "settings", "tensors", "absent"),
    [
        ("llama", {"attention.layer_norm_rms_epsilon": None}, decoder(), "attention.layer_norm_rms_epsilon"),
        ("llama", {"context_length": None}, decoder(), "context_length"),
        ("llama", {"attention.head_count": None}, decoder(), "attention.head_count"),
        ("llama", {"attention.head_count_kv": None}, decoder(), "attention.head_count_kv"),
        ("qwen2", {"block_count": None}, decoder(QKV), "block_count"),
        ("qwen3moe", EXPERTS | {"expert_used_count": None}, decoder(experts="exps"), "expert_used_count"),
        ("qwen3", LENGTHS, lambda: wide(decoder(head_norms=True)()), "attention.key_length"),
        ("qwen3", LENGTHS | {"rope.dimension_count": 2 * DIM}, lambda: wide(decoder()()), "attention.key_length"),
        ("gemma2", GEMMA2 | LENGTHS, lambda: wide(decoder(norms=GEMMA_NORMS)()), "attention.key_length"),
        ("lfm2", {"attention.head_count_kv": None}, decoder(), "attention.head_count_kv"),
        ("gemma4", {}, decoder(), "attention.key_length_swa"),
    ],
)  # fmt: skip
def test_a_setting_that_a_conversion_needs_and_a_file_lacks_is_named(
    tmp_path, cache, capsys, architecture, settings, tensors, absent
):
    path = write_gguf(tmp_path / "tiny.gguf", architecture, EPSILON | settings, tensors)
    with pytest.raises(ModelLoadError, match=rf"tiny.gguf lacks the setting {architecture}.{absent}, without which"):
        load_model(str(path))


def test_conversions_of_earlier_versions_are_made_again(tmp_path, cache, capsys):
    path = write_gguf(tmp_path / "tiny.gguf", "llama", EPSILON, decoder())
    load_model(str(path))
    (folder,) = [folder for folder in cache.iterdir() if folder.is_dir()]
    record = folder / _DONE
    record.write_text(record.read_text().replace(f'"version": {_VERSION}', f'"version": {_VERSION - 1}'))
    assert not is_complete(folder)
    capsys.readouterr()
    load_model(str(path))
    assert "converting tiny.gguf" in capsys.readouterr().err and is_complete(folder)


class _Fields:
    """The settings of a file, as gguf's reader has them."""

    def __init__(self, **settings):
        self.settings = settings

    def get_field(self, name):
        value = self.settings.get(name.removeprefix("tokenizer.ggml."))
        return None if value is None else SimpleNamespace(contents=lambda: value)


def _byte_level():
    letters = [*"Ġ0123456789abcdefghijklmnopqrstuvwxyz", "12", "34", "1234", "Ġa"]
    merges = [("1", "2"), ("3", "4"), ("12", "34"), ("Ġ", "a")]
    return GPT2Tokenizer(vocab={token: number for number, token in enumerate(letters)}, merges=merges)


@pytest.mark.parametrize(
    ("split", "tokens"),
    [(None, ["1234", "Ġa"]), ("gpt-2", ["1234", "Ġa"]), ("refact", [*"1234", "Ġa"]), ("starcoder", [*"1234", "Ġa"])],
)
def test_texts_are_split_as_llama_cpp_splits_them(split, tokens):
    tokenizer = _byte_level()
    apply_tokenizer_settings(tokenizer, _Fields(pre=split))
    assert tokenizer.tokenize("1234 a") == tokens and tokenizer.decode(tokenizer("1234 a").input_ids) == "1234 a"


@pytest.mark.parametrize(("split", "has_bos", "begins"), [("llama-bpe", None, True), ("tekken", False, False)])
def test_words_of_the_vocabulary_are_whole_where_llama_cpp_ignores_merges(tmp_path, split, has_bos, begins):
    """No merge gives "abcd"; llama.cpp looks for the whole word first, and begins texts with BOS unless told not to."""
    letters = [*"Ġabcd", "ab", "cd", "abcd", "<s>"]
    tokenizer = GPT2Tokenizer(
        vocab={token: number for number, token in enumerate(letters)}, merges=[("a", "b"), ("c", "d")], bos_token="<s>"
    )
    words = pre_tokenizers.Split(Regex(r" ?\p{L}+"), "isolated")
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pieces])
    assert tokenizer.tokenize("abcd abcd") == ["ab", "cd", "Ġ", "ab", "cd"]
    apply_tokenizer_settings(tokenizer, _Fields(pre=split, add_bos_token=has_bos))
    assert tokenizer.tokenize("abcd abcd") == ["abcd", "Ġ", "ab", "cd"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("abcd").input_ids) == ["<s>"] * begins + ["abcd"]


def test_an_unknown_split_is_refused_by_name():
    with pytest.raises(UnreadPartError, match=r"tokenizer.ggml.pre 'deepseek-llm'"):
        apply_tokenizer_settings(_byte_level(), _Fields(pre="deepseek-llm"))


@pytest.mark.parametrize(("has_space", "first"), [(None, ["▁a"]), (True, ["▁a"]), (False, ["a"])])
def test_texts_begin_with_a_space_only_where_the_file_has_one(has_space, first):
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "▁a": 5, "b": 6}
    tokenizer = LlamaTokenizer(vocab=vocab, merges=[("▁", "a")])
    apply_tokenizer_settings(tokenizer, _Fields(add_space_prefix=has_space, pre="default"))
    assert tokenizer.tokenize("ab a") == [*first, "b", "▁a"]
    assert tokenizer.decode(tokenizer("ab a", add_special_tokens=False).input_ids) == "ab a"
