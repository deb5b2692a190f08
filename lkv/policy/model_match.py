"""Decide whether two descriptions are of the same model, in any weight format. Does not import torch.

A segment of a weight row keeps its direction under quantisation: the cosine is 0.9999 in 8 bits and 0.98 to 0.999 in
4 bits. Rows of independently trained models are almost orthogonal.
"""

import base64
import json
import math
from array import array
from collections.abc import Sequence
from contextlib import suppress
from operator import mul

from lkv.hf.model_spec import ModelSpec

# The least mean cosine of sampled segments of the same model: 4-bit quantisation stays above it.
ONE_MODEL = 0.9
# The share of a policy's segments that must be readable in the given model: some loaders pack some matrices.
_SHARED = 1 / 4


def agreement(expected: Sequence[str], other: Sequence[str]) -> float | None:
    """Return the mean cosine in [-1, 1] of the common segments; None if `other` has too few of `expected`."""
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
    """Describe how the model `actual` differs from `expected`; None if they are the same model."""
    for name in ("architecture", "layers", "heads", "kv_heads", "head_dim"):
        expected_value, actual_value = getattr(expected, name), getattr(actual, name)
        if expected_value != actual_value:
            return f"{name} {repr(expected_value)[:80]}, but the model given has {actual_value!r}"
    if json.loads(expected.rope) != json.loads(actual.rope):
        return f"rope {expected.rope[:400]!r}, but the model given has {actual.rope!r}"
    if not actual.directions:
        return "known weights, but those of the model given are packed so that LKV cannot read and compare them"
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
    """Return whether a policy for `expected` has as many layers and heads as `actual`."""
    return all(getattr(expected, name) == getattr(actual, name) for name in ("layers", "kv_heads", "head_dim"))


def _decode(directions: Sequence[str]) -> dict[str, "array[int]"]:
    """Return the 8-bit values by their position, skipping invalid base64."""
    decoded = {}
    for direction in directions:
        position, _, codes = direction.rpartition(" ")
        with suppress(ValueError):
            decoded[position] = array("b", base64.b64decode(codes, validate=True))
    return decoded
