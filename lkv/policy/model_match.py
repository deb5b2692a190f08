"""Whether two descriptions are of one model, however its weights are stored; no torch here.

A stretch of a weight matrix's row keeps its direction in any faithful storage: 8 bits leave a cosine of 0.9999, 4 bits
of 0.98 to 0.999. Rows of two models that were trained apart are as good as orthogonal.
"""

import base64
import math
from array import array
from collections.abc import Sequence

from lkv.config import ModelSpec, rope_text

# Mean cosine of the sampled stretches from which two models are one: what moved further has lost more than 4 bits take.
ONE_MODEL = 0.9
# The share of a policy's stretches that must be readable in the model given; some loaders pack some matrices, and
# policies saved before have no norms in their stretches: they share those of o_proj and down_proj.
_SHARED = 1 / 4
# Single values of policies saved before: what went through bfloat16 differs by 2^-9 of its size.
_VALUE_TOLERANCE = 2.0**-7


def agreement(expected: Sequence[str], given: Sequence[str]) -> float | None:
    """Mean cosine in [-1, 1] of the stretches that both have, None where too few of `expected` are in `given`."""
    mine, theirs = _decoded(expected), _decoded(given)
    shared = [position for position in mine if position in theirs and len(mine[position]) == len(theirs[position])]
    if not shared or len(shared) < _SHARED * len(expected):
        return None
    return sum(_cosine(mine[position], theirs[position]) for position in shared) / len(shared)


def model_difference(expected: ModelSpec, given: ModelSpec) -> str | None:
    """What tells the model `given` from the one `expected`, or None where they are one model."""
    for name in ("architecture", "layers", "heads", "kv_heads", "head_dim"):
        mine, theirs = getattr(expected, name), getattr(given, name)
        if mine != theirs:
            return f"{name} {mine!r}, but the model given has {theirs!r}"
    if _settings(expected.rope) != _settings(given.rope):
        return f"rope {expected.rope!r}, but the model given has {given.rope!r}"
    return _weights_differ(expected, given)


def has_same_heads(expected: ModelSpec, given: ModelSpec) -> bool:
    """Whether a policy for `expected` has a budget and scores for every head of `given`, right ones or not."""
    return all(getattr(expected, name) == getattr(given, name) for name in ("layers", "kv_heads", "head_dim"))


def _weights_differ(expected: ModelSpec, given: ModelSpec) -> str | None:
    if not (expected.directions and given.directions):
        return _values_differ(expected, given)
    cosine = agreement(expected.directions, given.directions)
    if cosine is None:
        return "weight matrices of other names or sizes"
    if cosine < ONE_MODEL:
        return (
            f"other weights of the same architecture (rows agree to a cosine of {cosine:.3f}, those of one model "
            f"stored in other ways to at least {ONE_MODEL})"
        )
    return None


def _values_differ(expected: ModelSpec, given: ModelSpec) -> str | None:
    """`_weights_differ` for descriptions saved before directions were, and for models that none can be read from."""
    if not given.directions and not given.weights:
        return "known weights, but those of the model given are packed so that LKV cannot read and compare them"
    return None if _values_agree(expected.weights, given.weights) else "other weights of the same architecture"


def _values_agree(mine: Sequence[float], theirs: Sequence[float]) -> bool:
    if not mine or len(mine) != len(theirs):
        return False
    return all(abs(a - b) <= 1e-6 + _VALUE_TOLERANCE * abs(a) for a, b in zip(mine, theirs, strict=True))


def _settings(rope: str) -> dict[str, float | str]:
    """RoPE's settings by name; a number is the same number however a config spells it (100000 and 100000.0)."""
    pairs = (setting.partition(" ") for setting in rope_text(rope).split(", ") if setting)
    return {name: _number(value) for name, _, value in pairs}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _decoded(directions: Sequence[str]) -> dict[str, "array[int]"]:
    """The 8-bit values by their place; what is not base64 is left out, and so compares with nothing."""
    decoded = {}
    for direction in directions:
        position, _, codes = direction.rpartition(" ")
        try:
            decoded[position] = array("b", base64.b64decode(codes, validate=True))
        except ValueError:
            continue
    return decoded


def _cosine(a: "array[int]", b: "array[int]") -> float:
    product = sum(x * y for x, y in zip(a, b, strict=True))
    lengths = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    return product / lengths if lengths else 0.0
