"""The model description that a policy records. Does not import torch."""

import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class ModelSpec:
    """The description of the model that a policy was trained for.

    `directions` are the directions of sampled weight rows, a fingerprint that survives quantisation (see
    `lkv.policy.model_match`). `weights` are sampled weight values, for the digest. `rope`: RoPE settings as JSON.
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: str
    max_positions: int
    weights: tuple[float, ...]
    directions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        json.loads(self.rope)  # raises ValueError if it is not JSON

    def digest(self) -> str:
        """Return a digest of 32 hexadecimal digits; equal weights in one dtype give the same digest on any machine."""
        exact = {name: value for name, value in asdict(self).items() if name != "directions"}  # computed, so inexact
        return hashlib.sha256(repr(sorted(exact.items())).encode()).hexdigest()[:32]
