"""Where the weights of a model are put."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lkv.cli.main import main
from lkv.context.compression import compress
from lkv.errors import LkvError, ModelLoadError
from lkv.hf import loading
from lkv.hf.loading import load_model, load_tokenizer
from tests.conftest import present, save_model
from tests.vision import VISION, tokenizer


@pytest.mark.parametrize("content", ["", '{"eos_token_id": [2,', "[1]", "\ufeff{}", "{" + '"a":[' * 100_000])
@pytest.mark.parametrize(
    "name", ["generation_config.json", "chat_template.json", "special_tokens_map.json", "vocab.json"]
)
def test_a_broken_file_beside_the_weights_is_named(tmp_path, name, content):
    """transformers leaves some of them out without a word; an answer would then go on behind its end."""
    folder = save_model(tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    load_model(str(folder))  # a missing one is fine
    (folder / name).write_text(content, encoding="utf-8")
    for load in (load_model, load_tokenizer):
        with pytest.raises(ModelLoadError, match=rf"its file {name} is not a JSON object; copy or download it again"):
            load(str(folder))


def test_an_empty_chat_template_is_named(tmp_path):
    folder = save_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("\n")
    with pytest.raises(ModelLoadError, match=r"its file chat_template.jinja is empty; copy or download it again"):
        load_model(str(folder))


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "ruler", "--tasks", "niah_single_1", "--methods", "knorm", "--data", ".", "--out", "samples.jsonl"),
        ("ask", "text.txt", "why?", "--method", "knorm"),
        ("fit",),
    ],
    ids=lambda words: words[0],
)
def test_commands_put_weights_straight_on_the_gpu(tmp_path, monkeypatch, words):
    """Eight processes of a machine would else hold eight copies of the weights on the CPU first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("A text to compress.")
    save_model(tmp_path / "model")
    placements = []

    def watched(path, device_map=None, **options):
        placements.append(device_map)
        raise OSError("far enough")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    monkeypatch.setattr("lkv.utils.devices.find_device", torch.device)  # no GPU is needed to be named one
    command = [words[0], "model"] if words[0] == "fit" else [*words, "--model", "model"]
    assert main([*command, "--device", "cuda:3"]) == 2
    assert placements == [{"": torch.device("cuda", 3)}]


@pytest.mark.parametrize(
    ("device", "placement"),
    [
        ("cpu", None),
        ("meta", {"": torch.device("meta")}),
        (torch.device("meta"), {"": torch.device("meta")}),
        ("auto", "auto"),
    ],
)
def test_only_auto_and_other_devices_than_the_cpu_need_accelerate(tmp_path, monkeypatch, device, placement):
    saved, original, placements = str(save_model(tmp_path / "model")), AutoModelForCausalLM.from_pretrained, []

    def watched(path, device_map=None, **options):
        placements.append(device_map)
        return original(path, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    load_model(saved, device=device)
    assert placements == [placement]
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    if device != "auto":
        assert load_model(saved, device=device)[0].device == torch.device(device)
        assert placements == [placement, None]
    with pytest.raises(LkvError, match="cannot be put on the device 'gpu'"):
        load_model(saved, device="gpu")


CODES = "model.layers.2.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"), "lack 'model.layers.1.mlp.up_proj.weight'"),
        (
            lambda weights: weights.update({"a.place.elsewhere": torch.ones(2)}),
            "1 tensors, such as 'a.place.elsewhere'",
        ),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(3)}),
            r"tensor 'model.norm.weight' has the shape \[3\], but the model's is \[32\]",
        ),
        (
            lambda weights: weights.update({CODES: weights[CODES].mul(40).to(torch.int8)}),
            f"tensor '{CODES}' is stored as I8, but its config.json has no quantization_config",
        ),
        (
            lambda weights: weights.update({CODES: weights[CODES].to(torch.float8_e4m3fn)}),
            f"tensor '{CODES}' is stored as F8_E4M3, but its config.json has no quantization_config",
        ),
        (lambda weights: weights[CODES][3, 5:6].fill_(torch.nan), f"tensor '{CODES}' contains NaN or infinite values"),
        (lambda weights: weights[CODES][0, :1].fill_(-torch.inf), f"tensor '{CODES}' contains NaN or infinite values"),
    ],
)
def test_tensors_that_a_folder_lacks_or_has_beside_the_model_are_named(tmp_path, capsys, change, message):
    folder = save_model(tmp_path / "model")
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    if "such as" not in message:
        with pytest.raises(LkvError, match=message):
            load_model(str(folder))
    else:
        load_model(str(folder))
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("end", "is_added"), [("<|turn|>", True), ("", False)])
def test_generation_also_ends_at_the_chat_template_s_turn_end(end, is_added):
    backend = Tokenizer(models.WordLevel({"a": 0, "<|user|>": 1, "<|turn|>": 2, "?": 3}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    tokenizer.add_tokens([AddedToken("<|turn|>", special=True)])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}" + end + "\n{% endfor %}"
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=7))
    loading.add_turn_end(model, tokenizer)
    assert model.generation_config.eos_token_id == ([7, 2] if is_added else 7)


def test_a_model_with_images_is_loaded_for_text(tmp_path):
    """transformers has no causal language model of its configuration."""
    family = VISION[0]
    present(family)
    family.build(torch.float32).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    model, own = load_model(str(tmp_path))
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    answers = [
        compress(each, own, "A text of some words.", method="knorm").ask("Who?", 4, eos_token_id=None)
        for each in (model, family.build(torch.float32))
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("stored", "faster", "memory", "asked", "expected"),
    [
        ("bfloat16", "float32", 1e12, None, "float32"),
        ("bfloat16", "float32", 1e12, "bfloat16", "bfloat16"),
        ("bfloat16", "float32", 1e4, None, "bfloat16"),
        ("bfloat16", "bfloat16", 1e12, None, "bfloat16"),
        ("float16", "float32", 1e12, None, "float16"),
    ],
)
def test_emulated_bfloat16_is_computed_in_float32(
    tmp_path, monkeypatch, capsys, stored, faster, memory, asked, expected
):
    """A processor without instructions for bfloat16 takes seven times as long to read a text in it as in float32."""
    folder = str(save_model(tmp_path, dtype=getattr(torch, stored)))
    monkeypatch.setattr(loading, "faster_dtype", lambda device: getattr(torch, faster))
    monkeypatch.setattr(loading, "available_memory", lambda: memory)
    model, _ = load_model(folder, asked and getattr(torch, asked))
    assert {weight.dtype for weight in model.parameters()} == {getattr(torch, expected)}
    assert ("computing in float32" in capsys.readouterr().err) == (expected == "float32")
    exact = load_model(folder, getattr(torch, stored))[0].state_dict()
    assert all(torch.equal(weight, exact[name].to(weight.dtype)) for name, weight in model.state_dict().items())
