"""Policies on the hub: pushed with a model card written from the policy's own card."""

import json
import tempfile
from pathlib import Path
from typing import Any

from lkv.errors import PolicyFileError
from lkv.policy.policy import Policy
from lkv.policy.shipped import checked_line

_CARD = "README.md"


def push_to_hub(policy: Policy, repo_id: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload `policy` with its model card to the hub's repository `repo_id` ("owner/name"), made where it is not there.

    Logged in as huggingface_hub is. Returns the address of the commit; `Policy.from_pretrained(repo_id)` loads it.
    Raises PolicyFileError where the hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    api = HfApi()
    with tempfile.TemporaryDirectory() as folder:
        policy.save_pretrained(folder, half=True)
        (Path(folder) / _CARD).write_text(model_card(policy, repo_id), encoding="utf-8")
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            done = api.upload_folder(
                repo_id=repo_id, folder_path=folder, revision=revision, commit_message="An LKV policy"
            )
        except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
            first = str(error).strip().splitlines()[0]
            raise PolicyFileError(
                f"the policy cannot be pushed to {repo_id!r} ({first}); log in with `hf auth login`, and give an id "
                "such as 'owner/name' that you may write to."
            ) from error
    return str(getattr(done, "commit_url", done))


def model_card(policy: Policy, name: str) -> str:
    """The page of a policy on the hub, in Markdown: for which model, how used, how trained, how faithful."""
    spec, card = policy.spec, policy.card
    models = card.get("hub") or [str(card.get("model", ""))]
    front = ["library_name: lkv", "tags: [kv-cache, eviction, lkv]"]
    front += [f"base_model: [{', '.join(models)}]"] if all("/" in model for model in models) else []
    scores = "k with its rotation undone" if policy.inputs.key == "unrotated" else "k as cached (the paper's form)"
    lines = [
        f"An LKV policy for {', '.join(models)}: which keys and values of a long text the model may forget "
        f"({spec.architecture}, {spec.layers} layers of {spec.kv_heads} KV heads). Its scorer reads {scores}.",
        "```python\nfrom transformers import AutoModelForCausalLM\nimport lkv\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{models[0]}")\n'
        f'cache = lkv.RaggedCache(model, "{name}", retention=0.15)  # for model.generate(past_key_values=cache)\n```',
        "## Training",
        f"Texts of up to {card['trained_tokens']:,} tokens." if "trained_tokens" in card else "Lengths are not told.",
        *(f"* {source}: {origin}" for source, origin in card.get("data", {}).items()),
        f"Overlap with evaluated texts: {checked_line(card)}.",
        "## Fidelity to the full cache",
        *(_fidelity(card["fidelity"]) if card.get("fidelity") else ["Not measured yet."]),
        "## Settings",
        f"```json\n{json.dumps(card.get('training', {}), indent=1)}\n```",
    ]
    body = "\n\n".join(lines).replace("\n\n* ", "\n* ")
    return "---\n" + "\n".join(front) + f"\n---\n\n# {name}\n\n{body}\n"


def _fidelity(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| tokens | R | KL, nats a token | top-1 agreement |", "|---|---|---|---|"]
    for row in rows:
        shortest, longest = row["tokens"]
        tokens = f"{longest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
        lines.append(f"| {tokens} | {row['retention']:g} | {row['kl']:.3f} | {row['agreement']:.3f} |")
    return ["\n".join(lines)]
