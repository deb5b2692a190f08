"""The learned policy: LKV-H budgets (Sec. 3.3) and LKV-T token scores (Sec. 3.4), and its files.

A policy's folder has one safetensors file with everything, and a config.json with its description for readers.
"""

import copy
import hashlib
import json
import os
import warnings
from dataclasses import asdict
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from lkv.errors import LkvError, PolicyFileError, PolicyMismatchError, check_retention
from lkv.hf.model_spec import ModelSpec
from lkv.kernels.soft_topk import soft_topk
from lkv.policy.model_match import has_same_heads, model_difference
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.policy.token_scores import TokenScores, tensor_versions
from lkv.utils import tensor_file
from lkv.utils.dataclass_json import from_dict
from lkv.utils.files import as_path, is_path, write_text
from lkv.utils.tensor_file import FileKind

WEIGHTS, _CONFIG = "policy.safetensors", "config.json"
_MAX_KNOWN_RATIOS = 64  # retentions
POLICY_FILE = FileKind(
    "lkv-policy", 2, "policy", PolicyFileError, "give a folder that Policy.save_pretrained wrote, or download it again"
)


class HeadScores(nn.Module):
    """LKV-H: one embedding per KV head and a shared MLP d -> d/2 -> 1 score every head of the model (Sec. 3.3)."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.embeddings = nn.Parameter(torch.randn(layers, kv_heads, head_dim) * 0.1)
        self.hidden = nn.Linear(head_dim, head_dim // 2)
        self.output = nn.Linear(head_dim // 2, 1, bias=False)

    def forward(self) -> Tensor:
        """Return the scores s [L, H]."""
        return self.output(silu(self.hidden(self.embeddings))).squeeze(-1)


class Policy(nn.Module):
    """A learned policy for one model: head budgets (LKV-H) and token scores (LKV-T).

    Attributes:
        spec: describes the model.
        card: free JSON about the training, stored with the policy.
        heads: LKV-H.
        tokens: LKV-T.
        strict: whether other models are rejected; otherwise they only cause a warning.
        commit: the commit on the hub that it was loaded from, or None.
    """

    def __init__(self, spec: ModelSpec, card: dict[str, Any] | None = None, inputs: ScorerInputs | None = None):
        """Create an untrained policy.

        Args:
            spec: describes the model.
            card: free JSON about the training.
            inputs: the inputs of LKV-T; the paper's by default.
        """
        super().__init__()
        self.spec = spec
        self.card = card or {}
        self.strict = True
        self.commit: str | None = None
        self._ratios: tuple[dict[float, Tensor], Any] = {}, None  # for inference, and the versions of their weights
        self.heads = HeadScores(spec.layers, spec.kv_heads, spec.head_dim)
        self.tokens = TokenScores(spec.layers, spec.heads, spec.kv_heads, spec.head_dim, inputs)

    @property
    def inputs(self) -> ScorerInputs:
        """The inputs of LKV-T."""
        return self.tokens.inputs

    @property
    def trained_tokens(self) -> int | None:
        """The length in tokens of the longest training texts, if the card records it."""
        tokens = self.card.get("trained_tokens")
        return tokens if type(tokens) is int and 0 < tokens < 2**60 else None

    def ratios(self, retention: float | Tensor) -> Tensor:
        """Return each head's share of the tokens, r [L, H] in (0, 1) with mean `retention` over all heads (Sec. 3.3).

        A tensor of n retentions gives [n, L, H]. Differentiable.
        """
        scores = self.heads().flatten()
        shape = (self.spec.layers, self.spec.kv_heads)
        return soft_topk(scores, scores.numel() * retention).mask.unflatten(-1, shape)

    @torch.no_grad()
    def inference_ratios(self, retention: float) -> Tensor:
        """Return `ratios` for inference on the CPU: exactly 1 at retention 1. Raises RetentionError outside (0, 1].

        They are kept until the weights change, so that later prompts do not wait for the device.
        """
        retention = check_retention(retention)
        if retention == 1.0:
            return torch.ones(self.spec.layers, self.spec.kv_heads, device="cpu")
        (known, known_from), versions = self._ratios, tensor_versions(self.heads)
        if known_from != versions or len(known) > _MAX_KNOWN_RATIOS:
            known = {}
            self._ratios = known, versions  # in one assignment, because other threads may read them
        if retention not in known:
            known[retention] = self.ratios(retention).float().cpu()
        return known[retention]

    def check_model(self, spec: ModelSpec) -> None:
        """Check that `spec` describes the model this policy was trained for.

        A policy loaded with strict=False only warns, as long as the model has the same heads.

        Raises:
            PolicyMismatchError: If it is another model.
        """
        difference = model_difference(self.spec, spec)
        if difference is None:
            return
        problem = f"this policy was trained for a model with {difference}"
        if not self.strict and has_same_heads(self.spec, spec):
            warnings.warn(f"{problem}; what it keeps may not be what this model needs.", stacklevel=3)
            return
        remedy = "use the model it was trained for, or make a policy for yours with `lkv fit`"
        if has_same_heads(self.spec, spec):
            remedy += ", or load it with strict=False to be warned instead"
        raise PolicyMismatchError(f"{problem}; {remedy}.")

    def on(self, device: torch.device) -> "Policy":
        """Return this policy if it is on `device`, else a copy there."""
        if all(parameter.device == device for parameter in self.parameters()):
            return self
        return copy.deepcopy(self).to(device)

    def digest(self) -> str:
        """Return the SHA-256 of the parameters, in hexadecimal."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode() + tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def save_pretrained(self, folder: str | os.PathLike[str], half: bool = False) -> None:
        """Write the policy to a folder atomically: an interrupted or failed save leaves the old files unchanged.

        Args:
            folder: created if missing.
            half: whether to store the parameters in float16, which halves the size.

        Raises:
            PolicyFileError: If the folder cannot be written, or holds the config.json of something else.
        """
        learned = dict(self.named_parameters()) if half else {}
        state = {
            name: tensor.detach().to(torch.float16 if name in learned else tensor.dtype)
            for name, tensor in self.state_dict().items()
        }
        about = {"inputs": asdict(self.inputs), "model": asdict(self.spec), "card": self.card}
        path = as_path(folder, PolicyFileError, "the policy's place")
        check_policy_folder(path, PolicyFileError, "give another folder")
        tensor_file.write(path / WEIGHTS, POLICY_FILE, state, about)
        description = json.dumps({"format": POLICY_FILE.version, **about}, indent=1) + "\n"
        write_text(path / _CONFIG, description, PolicyFileError, "the policy")

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], strict: bool = True, revision: str | None = None
    ) -> "Policy":
        """Load a policy from a folder or the hub.

        Args:
            name: the folder, or the hub id ("owner/name").
            strict: whether to reject models that the policy was not trained for, instead of warning.
            revision: a commit, tag or branch on the hub.

        Raises:
            PolicyFileError: If its files are missing, damaged or of a newer format.
        """
        folder, commit = _find_folder(name, revision)
        tensors, about = tensor_file.read(folder / WEIGHTS, POLICY_FILE)
        try:
            inputs = from_dict(ScorerInputs, about.get("inputs", {}))
            if not isinstance(about.get("card"), dict | None):
                raise TypeError("its card is not a JSON object")
            # On "meta", without memory: `load_state_dict` checks the file's tensors and assigns them.
            with torch.device("meta"):
                policy = cls(from_dict(ModelSpec, about["model"]), about.get("card"), inputs)
            state = {key: value.float() for key, value in tensors.items()}
            policy.load_state_dict(state, assign=True)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise PolicyFileError(
                f"{name} does not hold a policy that this version knows ({reason}); download it again, or update "
                "lkv-cache."
            ) from error
        for key, tensor in state.items():
            if not bool(tensor.isfinite().all()) or (key == "tokens.std" and not bool((tensor > 0).all())):
                raise PolicyFileError(
                    f"{key} of {name} contains NaN, infinite or impossible values; download or train the policy again."
                )
        policy.strict, policy.commit = strict, commit
        return policy.eval().requires_grad_(False)


def check_policy_folder(folder: Path, error: type[LkvError], remedy: str) -> None:
    """Raise `error`, ending in `remedy`, if a policy in `folder` would replace the config.json of something else."""
    if (folder / _CONFIG).exists() and not is_policy(folder):
        raise error(f"{folder} holds the {_CONFIG} of something else, which the policy's would replace; {remedy}.")


def is_policy(folder: Path) -> bool:
    """Return whether `folder` holds the file of a policy."""
    return isfile(folder / WEIGHTS)


def _find_folder(name: str | os.PathLike[str], revision: str | None = None) -> tuple[Path, str | None]:
    """Return the folder of a policy and its commit; a hub id is downloaded, a local folder has the commit None.

    `revision` is a commit, tag or branch on the hub. Raises PolicyFileError.
    """
    folder, text = as_path(name, PolicyFileError, "the policy"), str(name)
    if isdir(folder):
        if revision is not None:
            raise PolicyFileError(f"{text!r} is a folder and has no revision {revision!r}; leave the revision out.")
        return folder, None
    if "/" not in text or is_path(text):
        raise PolicyFileError(
            f"there is no policy folder {text!r}; give a folder or a hub id such as 'owner/name' (a shipped policy "
            "comes by its name from lkv.default_policy)."
        )
    from huggingface_hub import snapshot_download

    from lkv.utils.hub import is_offline

    try:
        snapshot = Path(
            snapshot_download(text, revision=revision, allow_patterns=[WEIGHTS, _CONFIG], local_files_only=is_offline())
        )
    except Exception as error:  # the HTTP client's errors have no common type
        place = "" if revision is None else f" at revision {revision!r}"
        raise PolicyFileError(
            f"{text!r}{place} is neither a folder nor a policy on the hub that can be reached."
        ) from error
    return snapshot, snapshot.name
