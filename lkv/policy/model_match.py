"""Whether two descriptions are of one model, however its weights are stored; no torch here.

A stretch of a weight matrix's row keeps its direction in any faithful storage: 8 bits leave a cosine of 0.9999, 4 bits
of 0.98 to 0.999. Rows of two models that were trained apart are as good as orthogonal.
"""

import base64
import math
from array import array
from collections.abc import Sequence
from contextlib import suppress
from operator import mul

from lkv.hf.model_spec import ModelSpec, rope_text

# Mean cosine of the sampled stretches from which two models are one: what moved further has lost more than 4 bits take.
ONE_MODEL = 0.9
# The share of a policy's stretches that must be readable in the model given; some loaders pack some matrices, and
# policies saved before have no norms in their stretches: they share those of o_proj and down_proj.
_SHARED = 1 / 4
# Single values of policies saved before: what went through bfloat16 differs by 2^-9 of its size.
_VALUE_TOLERANCE = 2.0**-7


def agreement(expected: Sequence[str], other: Sequence[str]) -> float | None:
    """Mean cosine in [-1, 1] of the stretches that both have, None where too few of `expected` are in `other`."""
    columns, other_columns = _decode(expected), _decode(other)
    shared = [position for position in columns if len(columns[position]) == len(other_columns.get(position, ())) > 0]
    if not shared or len(shared) < _SHARED * len(expected):
        return None
    cosines = []
    for a, b in ((columns[position], other_columns[position]) for position in shared):
        norms = math.hypot(*a) * math.hypot(*b)
        cosines.append(sum(map(mul, a, b)) / norms if norms else 0.0)
    return sum(cosines) / len(cosines)


def model_difference(expected: ModelSpec, actual: ModelSpec) -> str | None:
    """How the model `actual` differs from `expected`; None if they are the same model."""
    for name in ("architecture", "layers", "heads", "kv_heads", "head_dim"):
        expected_value, actual_value = getattr(expected, name), getattr(actual, name)
        if expected_value != actual_value:
            return f"{name} {repr(expected_value)[:80]}, but the model given has {actual_value!r}"
    if _rope_settings(expected.rope) != _rope_settings(actual.rope):
        return f"rope {expected.rope[:400]!r}, but the model given has {actual.rope!r}"
    if not (expected.directions and actual.directions):
        # Descriptions saved before directions were, and models that none can be read from.
        if not actual.directions and not actual.weights:
            return "known weights, but those of the model given are packed so that LKV cannot read and compare them"
        pairs = list(zip(expected.weights, actual.weights, strict=False))
        equal = all(abs(a - b) <= 1e-6 + _VALUE_TOLERANCE * abs(a) for a, b in pairs)
        one = pairs and len(expected.weights) == len(actual.weights) and equal
        return None if one else "other weights of the same architecture"
    cosine = agreement(expected.directions, actual.directions)
    if cosine is None:
        return "weight matrices of other names or sizes"
    if cosine < ONE_MODEL:
        return (
            f"other weights of the same architecture (rows agree to a cosine of {cosine:.3f}, those of one model "
            f"stored in other ways to at least {ONE_MODEL})"
        )
    return None


def has_same_heads(expected: ModelSpec, actual: ModelSpec) -> bool:
    """Whether a policy for `expected` has a budget and scores for every head of `actual`, right ones or not."""
    return all(getattr(expected, name) == getattr(actual, name) for name in ("layers", "kv_heads", "head_dim"))


def _rope_settings(rope: str) -> dict[str, float | str]:
    """RoPE's settings by name; a number is the same number however a config spells it (100000 and 100000.0)."""
    settings: dict[str, float | str] = {}
    for setting in filter(None, rope_text(rope).split(", ")):
        name, _, value = setting.partition(" ")
        try:
            settings[name] = float(value)
        except ValueError:
            settings[name] = value
    return settings


def _decode(directions: Sequence[str]) -> dict[str, "array[int]"]:
    """The 8-bit values by their position; what is not base64 is left out, and so compares with nothing."""
    decoded = {}
    for direction in directions:
        position, _, codes = direction.rpartition(" ")
        with suppress(ValueError):
            decoded[position] = array("b", base64.b64decode(codes, validate=True))
    return decoded
