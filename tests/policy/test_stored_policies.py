"""Policies in the cache folder whose cards `lkv fit` did not write: listed as far as they can be, or left out."""

import json
import os

import pytest

from lkv.cli.main import main
from lkv.errors import PolicyMismatchError
from lkv.policy.lookup import default_policy, load_policy
from lkv.policy.shipped import describe_card, fitted_policies, shipped_policies


@pytest.fixture
def stored(policy, tmp_path, monkeypatch):
    """The folder of a policy that was fitted here; LKV_CACHE names the folder around it."""
    monkeypatch.setenv("LKV_CACHE", str(tmp_path))
    policy.card.update(hub=["owner/tiny"], fit={"minutes": 1, "contexts": 2, "preferred": True})
    policy.save_pretrained(tmp_path / "policies" / "mine")
    return tmp_path / "policies" / "mine"


def write_card(folder, card):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"card": card}), encoding="utf-8")


@pytest.mark.parametrize(
    "card",
    [
        {"trained_tokens": "many"}, {"training": 3}, {"fidelity": [{"kl": "low"}]}, {"fidelity": 7},
        {"decontamination": [1]}, {"hub": []}, {"model": {"a": 1}}, {"fit": {"minutes": None}}, {"fit": {}},
        {"training": {"retention_low": "x"}}, {"name": "\ud800"},
    ],
)  # fmt: skip
def test_cards_of_other_values_are_listed(stored, card, capsys):
    write_card(stored, card)
    (entry,) = fitted_policies()
    assert describe_card(entry.spec, entry.card)[0].startswith("model     ")
    assert main(["policies"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{each.name}\n" in listed for each in (*shipped_policies(), entry))


@pytest.mark.parametrize(
    "card",
    [
        None, [], "card", 3, {"hub": "owner/tiny"}, {"hub": [1]}, {"hub": None}, {"hub": {"owner/tiny": 1}}, {"fit": 3},
        {"fit": None}, {"fit": [True]},
    ],
)  # fmt: skip
def test_cards_that_name_no_models_are_left_out(stored, card, model, capsys):
    write_card(stored, card)
    assert fitted_policies() == []
    assert main(["policies"]) == 0 and "mine\n" not in capsys.readouterr().out
    with pytest.raises(PolicyMismatchError, match="there is no policy for this model"):
        default_policy(model, paper=True)


@pytest.mark.parametrize("place", [".", "policy"])
def test_a_folder_comes_before_a_stored_policy_of_its_name(policy, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    name = shipped_policies()[0].name
    assert load_policy(name).digest() == load_policy(shipped_policies()[0].folder).digest() != policy.digest()
    policy.save_pretrained(tmp_path / name / place)
    assert load_policy(name).digest() == policy.digest()


def test_files_that_are_no_descriptions_are_left_out(stored, model, capsys):
    for number, text in enumerate((b"[" * 100_000, b"\xff", b"", b"{}", b'{"card": {}, "model": {}}')):
        other = stored.parent / str(number)
        other.mkdir()
        (other / "config.json").write_bytes(text)
    (stored.parent / "folder" / "config.json").mkdir(parents=True)
    (stored.parent / "loop").mkdir()
    (stored.parent / "loop" / "config.json").symlink_to("config.json")
    os.mkfifo(stored.parent / "loop" / "pipe")
    assert [entry.name for entry in fitted_policies()] == ["mine"] and main(["policies"]) == 0
    for found in (default_policy(model, paper=True), default_policy("owner/tiny", paper=True)):
        assert found.card["hub"] == ["owner/tiny"]
