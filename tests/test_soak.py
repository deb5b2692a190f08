"""The parts of `make soak` that fit into seconds, for as long as that: damaged files and leaks."""

import time

import pytest

from tests.soak import fuzz, leaks


@pytest.mark.parametrize("part", [fuzz, leaks])
def test_a_few_seconds_of_soaking(part):
    assert min(part(time.monotonic() + 5, 1).values()) > 0
