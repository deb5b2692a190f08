"""Find a policy: by its folder, its hub id, its shipped name, or by the model it was trained for."""

import math
import os
import sys
from typing import TYPE_CHECKING

from lkv.errors import PolicyFileError, PolicyMismatchError, UnsupportedModelError
from lkv.hf.attention import patch_attention
from lkv.hf.loading import DEFAULT
from lkv.hf.model_spec import ModelSpec
from lkv.hf.progress import estimate_reading_seconds
from lkv.hf.prompt_kv import query_rotations
from lkv.policy.model_match import model_difference
from lkv.policy.policy import Policy, is_policy
from lkv.policy.shipped import fitted_policies, named_policy, shipped_policies
from lkv.utils.files import as_path, is_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FIT_MINUTES, _FIT_TOKENS = 10, 200_000  # the least time of `lkv fit`, and the tokens it reads for a good policy


def default_policy(
    model: "PreTrainedModel | ModelSpec | str" = DEFAULT, paper: bool = False, name: str | None = None
) -> Policy:
    """Load the policy for a model: a shipped one, or one that `lkv fit` made here.

    If both exist, the better one on the held-out texts of `lkv fit` is used. A policy that was worse than SnapKV there
    is not used.

    Args:
        model: a model, recognised by its weights; its description, `patch_attention(model).spec`; or a name: a policy's
            name in `lkv policies`, or a model's hub id.
        paper: whether to use the policy with the paper's scorer.
        name: the name that the model was loaded by. If there is no local policy for a hub id, a policy published under
            its name in `$LKV_POLICY_HUB` (default: lkv-policies) is downloaded and a message is printed.

    Raises:
        PolicyMismatchError: If there is none; the message lists methods without a policy and how to make a policy.
    """
    loaded = None if isinstance(model, str | ModelSpec) else model
    known = model if isinstance(model, str | ModelSpec) else patch_attention(model).spec
    if policy := stored_policy(known, paper):
        return policy
    if isinstance(known, str):
        name, about = known, repr(known)
    else:
        about = f"this model ({known.architecture}, {known.layers} layers of {known.kv_heads} KV heads)"
    if name and not paper and (policy := _published_policy(name, None if isinstance(known, str) else known)):
        return policy
    raise PolicyMismatchError(_no_policy(about, _worse_policy(known), name, loaded))


def stored_policy(model: ModelSpec | str, paper: bool = False) -> Policy | None:
    """Return the default policy on this machine for a model, given its description or name; None without one."""
    for entry in [*(entry for entry in fitted_policies() if entry.is_preferred), *shipped_policies()]:
        if entry.has_paper_scorer == paper and entry.is_for(model):
            return Policy.from_pretrained(entry.folder)
    return None


def _worse_policy(model: ModelSpec | str) -> str:
    """Return the folder of a policy that `lkv fit` made for the model but found worse than SnapKV, else ""."""
    for entry in fitted_policies():
        is_worse = "preferred" in entry.card.get("fit", {}) and not entry.is_preferred
        if is_worse and entry.is_for(model):
            return (
                f"; the one in {entry.folder} was worse than SnapKV on the held-out texts of `lkv fit` (give it by its "
                "folder to use it all the same)"
            )
    return ""


def _published_policy(model: str, spec: ModelSpec | None = None) -> Policy | None:
    """Download the policy published for the model `model` on the hub; None if there is none.

    A policy whose model does not match `spec` is ignored.
    """
    publisher = os.environ.get("LKV_POLICY_HUB", "lkv-policies")
    if not publisher or "/" not in model or is_path(model) or os.path.exists(model):
        return None
    name = f"{publisher}/{model.partition('/')[2]}"
    try:
        policy = Policy.from_pretrained(name)
    except PolicyFileError:
        return None
    if spec is not None and model_difference(policy.spec, spec) is not None:
        return None
    print(f"using the policy {name} from the hub (commit {policy.commit})", file=sys.stderr)
    return policy


def load_policy(name: str | os.PathLike[str], strict: bool = True, revision: str | None = None) -> Policy:
    """Load a policy from its folder, a training run's folder, the hub ("owner/name"), or by its name in `lkv policies`.

    `strict` and `revision` are those of `Policy.from_pretrained`. Raises PolicyFileError.
    """
    folder = as_path(name, PolicyFileError, "the policy")
    for path in (folder, folder / "policy"):
        if is_policy(path):
            return Policy.from_pretrained(path, strict, revision)
    if entry := named_policy(str(name)):
        return Policy.from_pretrained(entry.folder, strict, revision)
    if (folder / "config.json").is_file():
        raise PolicyFileError(
            f"{folder} looks like a model, not like a policy; give the folder that `lkv fit` or `lkv train` wrote."
        )
    try:
        return Policy.from_pretrained(name, strict, revision)
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyFileError(
            f"{str(name)!r} is neither a policy folder nor a hub id such as 'owner/name' ({error}); give one of these."
        ) from error


def resolve_policy(
    model: "PreTrainedModel | ModelSpec",
    policy: Policy | str | os.PathLike[str] | None = None,
    strict: bool = True,
    name: str | None = None,
) -> Policy:
    """Load the policy of a request, and check it against the model.

    Args:
        model: The model, or its description.
        policy: A policy, or an argument of `load_policy`; by default `default_policy` finds one.
        strict: As in `load_policy`.
        name: As in `default_policy`.
    """
    if policy is None:
        return default_policy(model, name=name)
    loaded = policy if isinstance(policy, Policy) else load_policy(policy, strict)
    loaded.check_model(model if isinstance(model, ModelSpec) else patch_attention(model).spec)
    return loaded


def estimate_fit_minutes(model: "PreTrainedModel") -> int:
    """Estimate the minutes that `lkv fit` needs on this machine for a good policy."""
    return max(_FIT_MINUTES, math.ceil(estimate_reading_seconds(model, _FIT_TOKENS) / 60))


def fit_unsupported_reason(model: "PreTrainedModel") -> str | None:
    """Return why `lkv fit` does not support the model, in one sentence; None if it does."""
    try:
        query_rotations(model, "`lkv fit`")
    except UnsupportedModelError as error:
        return str(error)
    return None


def _no_policy(about: str, worse: str, name: str | None = None, model: "PreTrainedModel | None" = None) -> str:
    if model is not None and (reason := fit_unsupported_reason(model)):
        return f"there is no policy for {about}, and `lkv fit` makes none: {reason}"
    minutes = f"--minutes {estimate_fit_minutes(model)}" if model is not None else f"about {_FIT_MINUTES} minutes"
    return (
        f"there is no policy for {about} yet{worse}; make one with `lkv fit {name or 'MODEL'}` ({minutes}), give your "
        "own, or use a method that needs no policy such as 'kvzip' or 'snapkv' (`lkv methods` lists them)."
    )
