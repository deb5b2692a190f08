"""Seconds of what `make soak` does for minutes: hostile clients beside honest ones."""

import pytest

from tests.security.hostile import attack


@pytest.mark.slow
def test_honest_clients_get_right_answers_beside_hostile_ones(tmp_path):
    counts = attack(tmp_path, 8, 1, hostile=32)
    assert counts["honest answers"] > 20 and counts["400"] > 3 and counts["bytes"] > 3
