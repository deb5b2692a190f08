"""Find a policy: by its folder, its hub id, its shipped name, or by the model it was trained for."""

import os
from typing import TYPE_CHECKING

from lkv.config import ModelSpec
from lkv.errors import PolicyFileError, PolicyMismatchError
from lkv.integrations.transformers.attention import patch_attention
from lkv.models.loading import DEFAULT
from lkv.policy.model_match import model_difference
from lkv.policy.policy import Policy
from lkv.policy.policy_file import is_policy
from lkv.policy.shipped import shipped_policies
from lkv.utils.files import as_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def default_policy(model: "PreTrainedModel | str" = DEFAULT, paper: bool = False) -> Policy:
    """Load the policy shipped for a model.

    Args:
        model: a model, which is recognised by its weights, or a name: the policy's as `lkv policies` lists it, or the
            model's on the hub.
        paper: whether to take the policy whose scorer is the paper's.

    Raises:
        PolicyMismatchError: If no policy is shipped for it.
    """
    if not isinstance(model, str):
        return policy_for(patch_attention(model).spec, paper)
    for entry in shipped_policies():
        names = (entry.name.removesuffix("-paper"), *entry.hub_names)
        if entry.has_paper_scorer == paper and model.lower() in map(str.lower, names):
            return Policy.from_pretrained(entry.folder)
    raise PolicyMismatchError(_not_shipped(repr(model)))


def policy_for(spec: ModelSpec, paper: bool = False) -> Policy:
    """Load the policy shipped for the model that `spec` describes.

    Args:
        spec: the model's description, `patch_attention(model).spec`.
        paper: as in `default_policy`.

    Raises:
        PolicyMismatchError: If none is shipped for it; the message says which methods need none and how to train one.
    """
    for entry in shipped_policies():
        if entry.has_paper_scorer == paper and model_difference(entry.spec, spec) is None:
            return Policy.from_pretrained(entry.folder)
    raise PolicyMismatchError(
        _not_shipped(f"this model ({spec.architecture}, {spec.layers} layers of {spec.kv_heads} KV heads)")
    )


def load_policy(name: str | os.PathLike[str], strict: bool = True, revision: str | None = None) -> Policy:
    """Load a policy from its folder, a training run's folder, the hub ("owner/name"), or by the name of a shipped one.

    `strict` and `revision` are those of `Policy.from_pretrained`. Raises PolicyFileError.
    """
    folder = as_path(name, PolicyFileError, "the policy")
    shipped_folder = next((entry.folder for entry in shipped_policies() if entry.name == str(name)), None)
    if shipped_folder is not None:
        return Policy.from_pretrained(shipped_folder, strict, revision)
    if is_policy(folder / "policy") and not is_policy(folder):
        return Policy.from_pretrained(folder / "policy", strict, revision)
    if (folder / "config.json").is_file() and not is_policy(folder):
        raise PolicyFileError(
            f"{folder} looks like a model, not like a policy; give the folder OUT/policy that `lkv train` wrote."
        )
    try:
        return Policy.from_pretrained(name, strict, revision)
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyFileError(
            f"{str(name)!r} is neither a policy folder nor a hub id such as 'owner/name' ({error}); give one of these."
        ) from error


def resolve_policy(
    spec: ModelSpec, policy: Policy | str | os.PathLike[str] | None = None, strict: bool = True
) -> Policy:
    """The given policy, loaded where it is a name (`load_policy`), or the shipped one; checked against the model."""
    if policy is None:
        return policy_for(spec)
    loaded = policy if isinstance(policy, Policy) else load_policy(policy, strict)
    loaded.check_model(spec)
    return loaded


def _not_shipped(model: str) -> str:
    return (
        f"no policy is shipped for {model}; `lkv policies` lists those that are: give your own, use a method that "
        "needs no policy such as 'snapkv' or 'expected' (`lkv methods` lists them), or train one with `lkv train "
        "--model NAME --data FOLDER --out FOLDER`, which `lkv policies --model NAME` estimates the time of."
    )
