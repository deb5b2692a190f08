"""A revision of a model or a policy on the hub: asked for, and written into what was made with it."""

import json
import socket
import time

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from lkv.errors import LkvError, ModelLoadError, PolicyFileError
from lkv.hf import loading as models
from lkv.hf.loading import DEFAULT, load_config, load_model, load_tokenizer
from lkv.hf.spec import inspect_model
from lkv.policy.lookup import load_policy
from lkv.policy.policy import Policy
from lkv.utils.hub import is_offline
from tests.commands import main, parse_arguments
from tests.conftest import save_model
from tests.ports import free_port

MODEL_COMMIT, POLICY_COMMIT = "0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub of one model and one policy; what was asked of it, in order."""
    folder = save_model(tmp_path / "model", max_position_embeddings=2048)
    model, _ = load_model(str(folder), torch.float32)
    snapshot = tmp_path / "snapshots" / POLICY_COMMIT
    Policy(inspect_model(model)).save_pretrained(snapshot)
    asked: list[tuple] = []

    def snapshot_download(name, revision=None, **_):
        asked.append((name, revision))
        return str(snapshot)

    def served(loader):
        class Served:
            @staticmethod
            def from_pretrained(name, revision="main", trust_remote_code=None, **options):
                asked.append((name, revision))
                assert trust_remote_code is False
                found = loader.from_pretrained(folder if name == "own/model" else name, **options)
                if isinstance(found, tuple):  # a model and what was found of it
                    found[0].config._commit_hash = MODEL_COMMIT
                return found

        return Served

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr(models, "is_offline", lambda: False)
    for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(models, name, served(getattr(models, name)))
    return asked


def test_revisions_reach_the_hub(hub):
    load_model("own/model", revision="v1")
    assert hub == [("own/model", "v1")] * 3
    hub.clear()
    load_model("own/model")
    assert hub == [("own/model", "main")] * 3
    hub.clear()
    policy = load_policy("own/policy", revision="v2")
    assert hub == [("own/policy", "v2")] and policy.commit == POLICY_COMMIT
    assert Policy.from_pretrained("own/policy").commit == POLICY_COMMIT and hub[1:] == [("own/policy", None)]


def cached(folder, repository):
    """A folder of the Hub's cache for a repository."""
    cache = folder / f"models--{repository.replace('/', '--')}"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(MODEL_COMMIT)
    return cache / "snapshots" / MODEL_COMMIT


def test_without_a_connection_cached_files_are_used_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits to try again"))
    folder = save_model(cached(tmp_path, "own/model"))
    model, tokenizer = load_model("own/model")
    assert load_config("own/model").hidden_size == model.config.hidden_size == 32
    assert model.config._commit_hash == MODEL_COMMIT  # as with a connection: results name it
    assert len(tokenizer) == len(load_tokenizer("own/model")) == 259
    Policy(inspect_model(model)).save_pretrained(cached(tmp_path, "own/policy"))
    assert load_policy("own/policy").commit == MODEL_COMMIT
    for name, load, reason in (
        ("no/model", load_model, "no model could be loaded from 'no/model'.*cannot be reached"),
        ("no/model", load_tokenizer, "no tokenizer could be loaded from 'no/model'.*cannot be reached"),
        ("no/policy", load_policy, "a policy on the hub that can be reached"),
    ):
        with pytest.raises(LkvError, match=reason):
            load(name)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LkvError, match=r"tensor 'model.norm.weight' is stored as I8"):
        load_model("own/model")


def test_with_a_connection_the_hub_is_asked(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        assert not is_offline()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert is_offline()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert is_offline()
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    assert not is_offline()


def test_what_is_not_on_the_hub_has_no_revision(tmp_path, policy):
    policy.save_pretrained(tmp_path / "policy")
    assert Policy.from_pretrained(tmp_path / "policy").commit is None
    for name in (tmp_path / "policy", DEFAULT):
        with pytest.raises(PolicyFileError, match=r"has no revision 'v1'; leave the revision out"):
            load_policy(name, revision="v1")
    for name in (DEFAULT, str(tmp_path), "tiny.gguf"):
        with pytest.raises(ModelLoadError, match=r"is not a model on the hub and has no revision 'v1'"):
            load_model(name, revision="v1")


def test_results_name_the_commits(hub, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    command = ["eval", "ruler", "--data", str(tmp_path), "--tasks", "niah_single_1", "--lengths", "1400", "--samples"]
    command += ["1", "--methods", "lkv", "--model", "own/model", "--policy", "own/policy", "--out", str(out)]
    assert main([*command, "--revision", "v1", "--policy-revision", "v2"]) == 0
    assert ("own/model", "v1") in hub and ("own/policy", "v2") in hub
    header = json.loads(out.read_text().splitlines()[0])
    assert (header["revision"], header["policy_revision"]) == (MODEL_COMMIT, POLICY_COMMIT)
    # Another commit under the same name is other results.
    other = tmp_path / "other.jsonl"
    other.write_text(out.read_text().replace(MODEL_COMMIT, "f" * 40))
    assert main(["report", str(out), str(other)]) == 2
    assert "they differ in revision (" in capsys.readouterr().err


def test_every_command_with_a_model_takes_its_revision(hub, tmp_path, capsys):
    text, profile = tmp_path / "text.txt", tmp_path / "profile.json"
    text.write_text("words " * 50)
    own = ["--model", "own/model", "--revision", "v1", "--policy", "own/policy", "--policy-revision", "v2"]
    assert main(["ask", str(text), "why?", "--max-new-tokens", "2", *own]) == 0
    measure = ["--tokens", "32", "--new-tokens", "1", "--repeats", "1", "--methods", "lkv", "--out", str(profile)]
    assert main(["profile", *measure, *own]) == 0
    assert "--revision v1" in json.loads(profile.read_text())["command"]
    assert hub.count(("own/model", "v1")) == 6 and hub.count(("own/policy", "v2")) == 2
    assert main(["inspect", "own/policy", "--policy-revision", "v2"]) == 0
    assert hub[-1] == ("own/policy", "v2")


def test_a_server_takes_the_policy_of_that_revision(hub, tmp_path):
    words = ["serve", "--model", "own/model", "--revision", "v1", "--policy", "own/policy", "--policy-revision", "v2"]
    service = parse_arguments([*words, "--dtype", "bfloat16", "--store", str(tmp_path)]).make_service()
    service.stop()
    assert ("own/model", "v1") in hub and hub[-1] == ("own/policy", "v2")
    assert service.model.dtype == torch.bfloat16
    with pytest.raises(LkvError, match="cannot be put on the device 'abacus'"):
        parse_arguments([*words, "--device", "abacus", "--store", str(tmp_path)]).make_service()
