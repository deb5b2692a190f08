"""Policies on the hub: upload a policy with a model card, which is written from its own card."""

import json
import tempfile
from pathlib import Path

import huggingface_hub
from huggingface_hub import ModelCard, ModelCardData

from lkv.errors import PolicyFileError
from lkv.policy.policy import Policy
from lkv.policy.shipped import describe_overlap, text_lengths


def push_to_hub(policy: Policy, repo_id: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload a policy with its model card; `Policy.from_pretrained(repo_id)` loads it again.

    Args:
        policy: the policy; its parameters are stored in float16.
        repo_id: the repository ("owner/name"), created if missing.
        private: whether a new repository is private.
        revision: the branch to upload to; the main one by default.

    Returns:
        The address of the commit.

    Raises:
        PolicyFileError: If the upload fails; log in with `hf auth login`.
    """
    api = huggingface_hub.HfApi()
    with tempfile.TemporaryDirectory() as folder:
        policy.save_pretrained(folder, half=True)
        model_card(policy, repo_id).save(Path(folder) / "README.md")
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id, folder_path=folder, revision=revision, commit_message="Upload an LKV policy"
            )
        except Exception as error:  # the HTTP client's errors have no common type
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise PolicyFileError(
                f"the policy cannot be pushed to {repo_id!r} ({reason}); log in with `hf auth login`, and give an id "
                "such as 'owner/name' that you may write to."
            ) from error
    return str(getattr(commit, "commit_url", commit))


def model_card(policy: Policy, name: str) -> ModelCard:
    """Write the model card of a policy for the repository `name`: its model, its use, its training and its fidelity."""
    spec, card = policy.spec, policy.card
    models = card.get("hub") or [str(card.get("model", ""))]
    data = ModelCardData(
        library_name="lkv",
        tags=["kv-cache", "eviction", "lkv"],
        base_model=models if all("/" in model for model in models) else None,
    )
    reads = "k with its rotation undone" if policy.inputs.key == "unrotated" else "k as cached (the paper's form)"
    trained = f"Texts of up to {card['trained_tokens']:,} tokens." if "trained_tokens" in card else "Unknown lengths."
    fidelity = "Not measured yet."
    if rows := card.get("fidelity"):
        lines = ["| tokens | R | KL, nats per token | top-1 agreement |", "|---|---|---|---|"]
        lines += [
            f"| {text_lengths(row)} | {row['retention']:g} | {row['kl']:.3f} | {row['agreement']:.3f} |" for row in rows
        ]
        fidelity = "\n".join(lines)
    sources = "".join(f"\n* {source}: {origin}" for source, origin in card.get("data", {}).items())
    return ModelCard(f"""---
{data.to_yaml()}
---

# {name}

An LKV policy for {", ".join(models)}: which keys and values of a long text the model may forget
({spec.architecture}, {spec.layers} layers of {spec.kv_heads} KV heads). Its scorer reads {reads}.

```python
from transformers import AutoModelForCausalLM
import lkv

model = AutoModelForCausalLM.from_pretrained("{models[0]}")
cache = lkv.RaggedCache(model, retention=0.15, policy="{name}")  # for model.generate(past_key_values=cache)
```

## Training

{trained}{sources}

Overlap with evaluated texts: {describe_overlap(card)}.

## Fidelity to the full cache

{fidelity}

## Settings

```json
{json.dumps(card.get("training", {}), indent=1)}
```
""")
