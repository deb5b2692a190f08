"""--model FILE.gguf: converted once, by one process of several, and each mistake one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from lkv.cli.main import main
from lkv.errors import MissingPackageError, ModelLoadError
from lkv.hf.loading import load_model
from tests.conftest import tiny_llama

SHAPE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "vocab_size": 260}
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k in the order that llama.cpp rotates them in."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(
    path: Path,
    architecture: str = "llama",
    leave_out: str = "",
    layers: int | None = None,
    matrices: str = "Q8_0",
    more=lambda writer: None,
) -> Path:
    """A tiny random Llama with a byte-level tokenizer, as llama.cpp writes one; `matrices` is the type of these."""
    model, writer = tiny_llama(dtype=torch.float32, **SHAPE), gguf.GGUFWriter(path, architecture)
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(layers or config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    letters = [chr(0x100 + number) for number in range(config.vocab_size - 5)]
    pairs = [letters[:2], letters[2:4]]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<pad>", "<s>", "</s>", *letters, *(a + b for a, b in pairs)])
    writer.add_token_types([3, 3, 3, *[1] * (len(letters) + 2)])
    writer.add_token_merges([f"{a} {b}" for a, b in pairs])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in model.state_dict().items():
        parts = name.removesuffix(".weight").split(".")
        values = weight.numpy()
        if "layers" in parts:
            own = NAMES[".".join(parts[3:])]
            if own in ("attn_q", "attn_k"):
                values = interleaved(values, values.shape[0] // config.head_dim)
            name = f"blk.{parts[2]}.{own}.weight"
        else:
            name = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[parts[-1]] + ".weight"
        if name == leave_out:
            continue
        kind = gguf.GGMLQuantizationType[matrices if values.ndim == 2 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folders(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.is_dir()]


def test_a_gguf_file_is_converted_once_and_is_the_model_it_was_made_of(tmp_path, cache, capsys):
    path = write_gguf(tmp_path / "tiny.gguf")
    model, _ = load_model(str(path), torch.float32)
    said = capsys.readouterr().err
    assert "converting tiny.gguf to safetensors" in said and "takes 0 MB of disk" in said
    text = torch.randint(3, 67, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mine, original = model(text).logits, tiny_llama(dtype=torch.float32, **SHAPE)(text).logits
    assert torch.nn.functional.cosine_similarity(mine.flatten(), original.flatten(), dim=0) > 0.995
    (name,) = folders(cache)
    assert name.startswith("tiny-")
    # A file that was moved stays converted; quantised weights are kept in bfloat16.
    assert load_model(str(path.rename(tmp_path / "tiny.GGUF")))[0].dtype == torch.bfloat16
    assert "converting" not in capsys.readouterr().err and folders(cache) == [name]
    # One that was changed after it was written is converted again, even if its size is the same.
    weights = cache / name / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    load_model(str(tmp_path / "tiny.GGUF"))
    assert "converting" in capsys.readouterr().err and weights.read_bytes() == whole
    os.utime(weights)  # touched, with the same content
    load_model(str(tmp_path / "tiny.GGUF"))
    assert "converting" not in capsys.readouterr().err


@pytest.mark.parametrize(("matrices", "dtype"), [("F32", torch.float32), ("F16", torch.float16)])
def test_weights_that_are_not_quantised_are_not_rounded(tmp_path, cache, matrices, dtype):
    path = str(write_gguf(tmp_path / "tiny.gguf", matrices=matrices))
    assert load_model(path)[0].dtype == dtype
    model, _ = load_model(path, torch.float32)
    expected = tiny_llama(dtype=torch.float32, **SHAPE).to(dtype).float()
    for (name, mine), original in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, original), name


@pytest.mark.slow
def test_two_processes_at_once_convert_once(tmp_path, cache):
    path = write_gguf(tmp_path / "tiny.gguf")
    (cache / ".tiny.tmp-of-a-killed-process").mkdir(parents=True)
    program = "import sys; from lkv.hf.loading import load_model; load_model(sys.argv[1])"
    command = [sys.executable, "-c", program, str(path)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert sum("converting tiny.gguf" in text for text in said) == 1
    assert len([name for name in folders(cache) if name.startswith("tiny-")]) == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "cannot be read (No such file or directory)"),
        (lambda path: path.write_bytes(b"PK\x03\x04 not a model"), "is not a GGUF file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-20_000]), "cannot be converted ("),
        (lambda path: path.write_bytes(path.read_bytes()[:40]), "cannot be converted ("),
        (lambda path: write_gguf(path, "whisper"), "architecture whisper is not supported"),
        (lambda path: write_gguf(path, layers=10**6), "it declares 1,000,000 layers, but has"),
        (lambda path: write_gguf(path, leave_out="blk.1.ffn_up.weight"), "lacks 1 of the model's tensors"),
    ],
)
def test_a_damaged_or_unknown_file_is_one_sentence(tmp_path, cache, capsys, damage, message):
    path, text = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "text.txt"
    text.write_text("words " * 20)
    damage(path)
    assert main(["ask", str(text), "why?", "--model", str(path)]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lkv: ")]
    assert len(errors) == 1 and message in errors[0]
    assert not cache.exists() or not folders(cache)


def test_all_that_is_missing_is_named_at_once(tmp_path, cache, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(
        MissingPackageError, match=r"needs gguf and accelerate, which are not installed; run `pip install "
    ):
        load_model(str(path))


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LKV_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelLoadError, match=r"cannot be kept in .* or name another folder in LKV_CACHE"):
        load_model(str(path))


def test_a_cache_folder_of_another_user_is_named(tmp_path, cache, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied", str(cache / ".tiny.lock"))

    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("lkv.hf.conversion._locked", refuse)
    with pytest.raises(ModelLoadError, match=r"belongs to another user or is read-only; name .* LKV_CACHE"):
        load_model(str(path))


def test_settings_that_change_nothing_are_no_reason_to_refuse(tmp_path, cache, capsys):
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1.0)

    model, _ = load_model(str(write_gguf(tmp_path / "tiny.gguf", more=more)))
    assert model.generation_config.eos_token_id == 2


def test_generation_also_ends_at_the_turn_s_end_that_a_file_names(tmp_path, cache, capsys):
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_eom_token_id(9)

    model, _ = load_model(str(write_gguf(tmp_path / "tiny.gguf", more=more)))
    assert model.generation_config.eos_token_id == [2, 7, 9]
