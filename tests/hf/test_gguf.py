"""--model FILE.gguf: converted once, by one process of several, and each mistake one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lkv.cli.main import main
from lkv.errors import MissingPackageError, ModelLoadError
from lkv.hf.loading import load_model
from tests.hf.gguf_files import EPSILON, decoder, largest_difference, write_gguf

FALCON = {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": None, "attention.key_length": None}
YARN = EPSILON | {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0}


def folders(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.is_dir()]


def test_a_gguf_file_is_converted_once_and_is_the_model_it_was_made_of(tmp_path, cache, capsys, monkeypatch):
    monkeypatch.setattr("lkv.hf.loading.faster_dtype", lambda device: torch.bfloat16)
    path = write_gguf(tmp_path / "tiny.gguf", matrices="Q8_0")
    assert largest_difference(path, 20) < 0.05  # the quantised weights are kept in bfloat16
    said = capsys.readouterr().err
    assert "converting tiny.gguf to safetensors" in said and "takes 0 MB of disk" in said
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


@pytest.mark.parametrize(
    ("matrices", "dtype", "most"),
    [("F32", torch.float32, 1e-4), ("F16", torch.float16, 5e-3)],  # norms are float32 in the file
)
def test_weights_that_are_not_quantised_keep_their_dtype(tmp_path, cache, matrices, dtype, most):
    path = write_gguf(tmp_path / "tiny.gguf", matrices=matrices)
    assert load_model(str(path))[0].dtype == dtype
    assert largest_difference(path, 20) < most


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
        (lambda path: path.write_bytes(path.read_bytes()[:-20_000]), "it is damaged or not whole: download it again."),
        (lambda path: path.write_bytes(path.read_bytes()[:40]), "it is damaged or not whole: download it again."),
        (lambda path: write_gguf(path, "whisper"), "architecture whisper is not supported"),
        (
            lambda path: write_gguf(path, "falcon", FALCON, decoder(fused=True)),
            "of the architecture 'falcon' from GGUF (",
        ),
        (lambda path: write_gguf(path, "gpt-oss", YARN), "of the architecture 'gpt-oss' from GGUF ("),
        (
            lambda path: write_gguf(path, settings=EPSILON | {"block_count": 10**6}),
            "it declares 1,000,000 layers, but has",
        ),
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


@pytest.mark.parametrize(("tokens", "ends"), [(None, 2), ((7, 9), [2, 7, 9])])
def test_generation_also_ends_at_the_turn_s_end_that_a_file_names(tmp_path, cache, capsys, tokens, ends):
    model, _ = load_model(str(write_gguf(tmp_path / "tiny.gguf", end_tokens=tokens)))
    assert model.generation_config.eos_token_id == ends
