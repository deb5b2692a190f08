"""Policies and examples for the hub: what is uploaded loads again, and its page tells what the card does."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch

import lkv
from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import PolicyFileError, PolicyMismatchError
from lkv.policy.hub import model_card
from lkv.policy.lookup import load_policy
from lkv.policy.policy import Policy
from tests.conftest import tiny_llama

ROOT = Path(__file__).parents[2]


class Hub:
    """Stands in for HfApi: keeps what was uploaded in a folder."""

    def __init__(self, folder):
        self.folder, self.made = folder, []

    def create_repo(self, repo_id, private, exist_ok):
        self.made.append((repo_id, private, exist_ok))

    def upload_folder(self, repo_id, folder_path, revision, commit_message):
        shutil.copytree(folder_path, self.folder / repo_id)
        return f"https://example.org/{repo_id}"


def test_what_is_pushed_loads_again_with_its_page(policy, tmp_path, monkeypatch):
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    policy.card.update({"trained_tokens": 4096, "data": {"prose": "WikiText-2 (CC BY-SA 3.0)"}})
    assert lkv.push_to_hub(policy, "owner/mine", private=True) == "https://example.org/owner/mine"
    assert hub.made == [("owner/mine", True, True)]
    again = Policy.from_pretrained(tmp_path / "owner" / "mine")
    for name, tensor in policy.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, atol=1e-3, rtol=1e-3)
    page = (tmp_path / "owner" / "mine" / "README.md").read_text(encoding="utf-8")
    assert "Texts of up to 4,096 tokens." in page and "* prose: WikiText-2 (CC BY-SA 3.0)" in page
    assert "Not measured yet." in page and 'lkv.RaggedCache(model, retention=0.15, policy="owner/mine"' in page


def test_the_page_of_the_shipped_policy_has_its_figures():
    policy = lkv.default_policy()
    card = model_card(policy, "owner/mine")
    assert card.data.base_model == ["HuggingFaceTB/SmolLM2-135M-Instruct"] and "lkv" in card.data.tags
    page = card.text
    assert "evaluation files: " in page and "13-grams" in page
    for row in policy.card["fidelity"]:
        assert f"| {row['retention']:g} | {row['kl']:.3f} | {row['agreement']:.3f} |" in page


class ProxyError(Exception):
    """Stands in for the errors of the HTTP client, which are not OSError."""


def raise_error(error):
    """A function that raises `error`."""

    def function(*args, **options):
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (huggingface_hub.errors.LocalTokenNotFoundError("Token is required\nand more"), "Token is required"),
        (ProxyError("no route\nand more"), "no route"),
        (ProxyError(), "ProxyError"),
    ],
)
def test_a_hub_that_refuses_is_one_sentence(policy, monkeypatch, error, reason):
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(create_repo=raise_error(error)))
    with pytest.raises(PolicyFileError, match=rf"^the policy cannot be pushed to 'owner/mine' \({reason}\)"):
        lkv.push_to_hub(policy, "owner/mine")


@pytest.mark.parametrize("error", [ProxyError("no route"), huggingface_hub.errors.HFValidationError("not an id")])
def test_a_hub_that_cannot_be_reached_has_no_policy(monkeypatch, error):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raise_error(error))
    for load in (Policy.from_pretrained, load_policy):
        with pytest.raises(PolicyFileError, match=r"^'owner/mine' is neither a folder nor a policy on the hub that"):
            load("owner/mine")
    with pytest.raises(PolicyMismatchError, match=r"^there is no policy for 'owner/mine' yet; make one with"):
        lkv.default_policy("owner/mine")


@pytest.mark.parametrize("budget", [{"retention": 0.3}, {"memory": 0.3}], ids=["retention", "memory"])
def test_the_custom_generate_folder_is_the_cache_in_one_argument(budget):
    model, ids = tiny_llama(), torch.arange(3, 63)[None]
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    folder = {"custom_generate": str(ROOT / "examples" / "custom_generate"), "trust_remote_code": True}
    out = model.generate(ids, **folder, **budget, method="knorm", **given)
    cache = RaggedCache(model, **budget, method="knorm")
    assert torch.equal(out, model.generate(ids, past_key_values=cache, **given))
    assert cache.config.is_tiered == ("memory" in budget) and (
        cache.config.is_tiered or 0 < cache.realised_retention() <= 0.3
    )
