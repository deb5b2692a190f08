"""The learned policy: LKV-H budgets (Sec. 3.3) and LKV-T token scores (Sec. 3.4), saved as safetensors and JSON."""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import silu

from lkv.config import ModelSpec, asdict, from_dict
from lkv.errors import PolicyFileError, PolicyMismatchError, check_retention
from lkv.ops.soft_topk import soft_topk

_WEIGHTS, _CONFIG = "policy.safetensors", "config.json"
_FORMAT = 1
# Weights that went through bfloat16 differ by 2^-9 of their size; another model's differ by their whole size.
_FINGERPRINT_TOLERANCE = 2.0**-7


class HeadBudgets(nn.Module):
    """LKV-H: one embedding a KV head and a shared MLP d -> d/2 -> 1 score every head of the model (Sec. 3.3)."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.embeddings = nn.Parameter(torch.randn(layers, kv_heads, head_dim) * 0.1)
        self.hidden = nn.Linear(head_dim, head_dim // 2)
        self.output = nn.Linear(head_dim // 2, 1, bias=False)

    def forward(self) -> Tensor:
        """Scores s [L, H]."""
        return self.output(silu(self.hidden(self.embeddings))).squeeze(-1)


class TokenScores(nn.Module):
    """LKV-T: an MLP 2d -> d -> 1 of its own for every KV head scores a token from [k; v] alone (Sec. 3.4).

    `mean` and `std` [L, H, 2d] normalise the input; they are measured on training text and stored with the policy.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, layers: int, kv_heads: int, head_dim: int):
        super().__init__()
        shape = (layers, kv_heads, 2 * head_dim)
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("std", torch.ones(shape))
        bound = 1 / math.sqrt(2 * head_dim)
        self.hidden = nn.Parameter(torch.empty(layers, kv_heads, 2 * head_dim, head_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(layers, kv_heads, head_dim))
        self.output = nn.Parameter(torch.randn(layers, kv_heads, head_dim) / math.sqrt(head_dim))

    def forward(self, k: Tensor, v: Tensor, layer: int, heads: slice = slice(None)) -> Tensor:
        """Scores u [B, H, T] in float32 for `k`, `v` [B, H, T, d] of the KV heads `heads` of one layer."""
        # The normalisation is folded into the first matrix, so that k and v are read once and never copied whole.
        weight = self.hidden[layer, heads] / self.std[layer, heads][..., None]
        bias = self.bias[layer, heads] - (self.mean[layer, heads][..., None, :] @ weight).squeeze(-2)
        d = k.shape[-1]
        hidden = k.float() @ weight[:, :d] + v.float() @ weight[:, d:] + bias[:, None]
        return (silu(hidden) @ self.output[layer, heads][..., None]).squeeze(-1)


def differs(expected: ModelSpec, given: ModelSpec) -> str | None:
    """What tells the model `given` from the one `expected`, or None."""
    for name in ("architecture", "layers", "heads", "kv_heads", "head_dim", "rope"):
        mine, theirs = getattr(expected, name), getattr(given, name)
        if mine != theirs:
            return f"{name} {mine!r}, but the model given has {theirs!r}"
    a, b = (torch.tensor(spec.weights, device="cpu") for spec in (expected, given))
    allowed = 1e-6 + _FINGERPRINT_TOLERANCE * a.abs() if a.shape == b.shape else a
    if a.shape != b.shape or not len(a) or bool(((a - b).abs() > allowed).any()):
        return "other weights of the same architecture"
    return None


class Policy(nn.Module):
    """How much every head keeps (LKV-H) and which tokens (LKV-T), for one model."""

    def __init__(self, spec: ModelSpec, card: dict[str, Any] | None = None):
        """`spec` describes the model; `card` is free JSON about the training, stored with the policy."""
        super().__init__()
        self.spec = spec
        self.card = card or {}
        self.heads = HeadBudgets(spec.layers, spec.kv_heads, spec.head_dim)
        self.tokens = TokenScores(spec.layers, spec.kv_heads, spec.head_dim)

    @property
    def trained_tokens(self) -> int | None:
        """Tokens of the longest texts that it was trained on, where its card tells."""
        found = self.card.get("trained_tokens")
        return found if isinstance(found, int) else None

    def ratios(self, retention: float | Tensor) -> Tensor:
        """r [L, H] in (0, 1): each head's share of the tokens, with mean `retention` over all heads (Sec. 3.3)."""
        scores = self.heads().flatten()
        return soft_topk(scores, scores.numel() * retention).mask.view(self.spec.layers, self.spec.kv_heads)

    @torch.no_grad()
    def inference_ratios(self, retention: float) -> Tensor:
        """`ratios` for inference: exactly 1 everywhere at retention 1. Raises RetentionError outside (0, 1]."""
        retention = check_retention(retention)
        if retention == 1.0:
            return torch.ones(self.spec.layers, self.spec.kv_heads, device="cpu")
        return self.ratios(retention).float().cpu()

    def check_model(self, spec: ModelSpec) -> None:
        """Raise PolicyMismatchError unless `spec` describes the model this policy was trained for."""
        if difference := differs(self.spec, spec):
            raise PolicyMismatchError(
                f"this policy was trained for a model with {difference}; use the model it was trained for, or train a "
                "policy for yours with `lkv train`."
            )

    def digest(self) -> str:
        """SHA-256 of the parameters: equal for policies that decide alike."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode() + tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def save_pretrained(self, folder: str | os.PathLike[str], half: bool = False) -> None:
        """Write policy.safetensors and config.json into `folder`; a failed save leaves the old files as they were.

        `half` stores the parameters in float16, half the size.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        weights = target / (_WEIGHTS + ".tmp")
        learned = dict(self.named_parameters()) if half else {}
        state = {
            name: tensor.detach().cpu().contiguous().to(torch.float16 if name in learned else tensor.dtype)
            for name, tensor in self.state_dict().items()
        }
        save_file(state, weights)
        config = {"format": _FORMAT, "sha256": _sha256(weights), "model": asdict(self.spec), "card": self.card}
        text = target / (_CONFIG + ".tmp")
        text.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        os.replace(weights, target / _WEIGHTS)
        os.replace(text, target / _CONFIG)

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str]) -> "Policy":
        """Load a policy from a folder or a hub id. Raises PolicyFileError for missing or damaged files."""
        folder = _resolve(name)
        try:
            config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
            if config["format"] != _FORMAT:
                raise PolicyFileError(
                    f"{folder / _CONFIG} has format {config['format']!r}, but this version reads format {_FORMAT}; "
                    "update lkv-cache or train the policy again."
                )
            with torch.device("cpu"):
                policy, digest = cls(from_dict(ModelSpec, config["model"]), config.get("card")), config["sha256"]
        except FileNotFoundError:
            raise PolicyFileError(
                f"{folder} has no {_CONFIG}; give the folder that Policy.save_pretrained wrote."
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise PolicyFileError(f"{folder / _CONFIG} cannot be read ({error}); fetch or save it again.") from error
        weights = folder / _WEIGHTS
        if not weights.is_file():
            raise PolicyFileError(f"{folder} has no {_WEIGHTS}; fetch or save the policy again.")
        if _sha256(weights) != digest:
            raise PolicyFileError(
                f"{weights} is not the file its {_CONFIG} was written for (truncated or changed); fetch it again."
            )
        try:
            policy.load_state_dict({key: value.float() for key, value in load_file(weights).items()})
        except (SafetensorError, RuntimeError) as error:
            raise PolicyFileError(
                f"{weights} does not hold this policy's tensors ({error}); fetch it again."
            ) from error
        return policy.eval().requires_grad_(False)


def is_policy(folder: Path) -> bool:
    """Whether `folder` holds a policy that `save_pretrained` wrote."""
    return (folder / _CONFIG).is_file() and (folder / _WEIGHTS).is_file()


def _resolve(name: str | os.PathLike[str]) -> Path:
    folder = Path(name)
    if folder.is_dir():
        return folder
    text = str(name)
    if text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise PolicyFileError(f"there is no policy folder {text!r}; give a folder or a hub id such as 'owner/name'.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(text, allow_patterns=[_WEIGHTS, _CONFIG]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise PolicyFileError(f"{text!r} is neither a folder nor a policy on the hub that can be reached.") from error


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
