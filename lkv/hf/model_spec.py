"""What a policy records about its model. Does not import torch."""

import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class ModelSpec:
    """What a policy records about the model it was trained for.

    `directions` are those of sampled weight rows, a fingerprint that survives quantisation (see
    `lkv.policy.model_match`). `weights` are single values from fixed places; older policies have these alone. `rope`
    is the model's RoPE settings as JSON.
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
        rope_text(self.rope)  # raises for settings that are none

    def digest(self) -> str:
        """Return 32 hexadecimal digits, equal for equal weights in one dtype on any machine."""
        exact = {name: value for name, value in asdict(self).items() if name != "directions"}  # computed, so inexact
        exact["rope"] = rope_text(self.rope)
        return hashlib.sha256(repr(sorted(exact.items())).encode()).hexdigest()[:32]


def rope_text(rope: str) -> str:
    """RoPE settings as "name value, name value", which is how they were stored before they were JSON."""
    if not rope.startswith("{"):
        return rope
    settings = json.loads(rope)
    return ", ".join(f"{name} {settings[name]}" for name in sorted(settings))
