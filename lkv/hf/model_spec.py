"""What a policy records about its model. Does not import torch."""

import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class ModelSpec:
    """What a policy records about the model it was trained for.

    `directions` are those of sampled weight rows, a fingerprint that survives quantisation (see
    `lkv.policy.model_match`). `weights` are single values from fixed places, for the digest. `rope` is the model's RoPE
    settings as JSON.
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
        json.loads(self.rope)  # raises ValueError for anything else

    def digest(self) -> str:
        """Return 32 hexadecimal digits, equal for equal weights in one dtype on any machine."""
        exact = {name: value for name, value in asdict(self).items() if name != "directions"}  # computed, so inexact
        return hashlib.sha256(repr(sorted(exact.items())).encode()).hexdigest()[:32]
