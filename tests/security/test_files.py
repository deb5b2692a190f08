"""Files that were changed after they were written, or hold numbers that no model has."""

import json
import math
import os

import pytest

from lkv.integrations.transformers.fingerprint import encode_direction
from lkv.models.conversion import file_digest, is_complete


def test_a_converted_model_that_was_changed_is_converted_again(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights of a model")
    record = {"size": 18, "mtime_ns": weights.stat().st_mtime_ns, "sha256": file_digest(weights)}
    (tmp_path / "conversion.json").write_text(json.dumps({"source": "a.gguf", "files": {weights.name: record}}))
    assert is_complete(tmp_path)
    os.utime(weights, (1, 1))
    assert is_complete(tmp_path)  # copied, with another time
    weights.write_bytes(b"weights of another")
    assert weights.stat().st_size == 18 and not is_complete(tmp_path)


@pytest.mark.parametrize("values", [[math.inf, 1.0], [1.0, -math.inf], [math.nan, 1.0], [0.0, 0.0], []])
def test_rows_without_a_direction_have_no_fingerprint(values):
    assert encode_direction("a", values) is None
    assert encode_direction("a", [1e300, 5e-324]) is not None
