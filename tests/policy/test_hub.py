"""Policies and examples for the hub: what is uploaded loads again, and its page tells what the card does."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch

import lkv
from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import PolicyFileError
from lkv.policy.hub import model_card
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
    assert policy.push_to_hub("owner/mine", private=True) == "https://example.org/owner/mine"
    assert hub.made == [("owner/mine", True, True)]
    again = Policy.from_pretrained(tmp_path / "owner" / "mine")
    for name, tensor in policy.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, atol=1e-3, rtol=1e-3)
    page = (tmp_path / "owner" / "mine" / "README.md").read_text(encoding="utf-8")
    assert "Texts of up to 4,096 tokens." in page and "* prose: WikiText-2 (CC BY-SA 3.0)" in page
    assert "Not measured yet." in page and 'lkv.RaggedCache(model, retention=0.15, policy="owner/mine"' in page


def test_the_page_of_the_shipped_policy_has_its_figures():
    card = model_card(lkv.default_policy(), "owner/mine")
    assert card.data.base_model == ["HuggingFaceTB/SmolLM2-135M-Instruct"] and "lkv" in card.data.tags
    page = card.text
    assert "evaluation files: " in page and "13-grams" in page
    for row in lkv.default_policy().card["fidelity"]:
        assert f"| {row['retention']:g} | {row['kl']:.3f} | {row['agreement']:.3f} |" in page


def test_a_hub_that_refuses_is_one_sentence(policy, monkeypatch):
    class Closed(Hub):
        def create_repo(self, *args, **kwargs):
            raise huggingface_hub.errors.LocalTokenNotFoundError("Token is required\nand more")

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: Closed(None))
    with pytest.raises(PolicyFileError, match=r"^the policy cannot be pushed to 'owner/mine' \(Token is required\)"):
        lkv.push_to_hub(policy, "owner/mine")


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
