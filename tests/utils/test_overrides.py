"""Methods that are replaced for a block: blocks that end in any order leave what was there."""

import itertools
from contextlib import ExitStack

import pytest

from lkv.utils.overrides import override_method


class Owner:
    def method(self):
        return "own"


@pytest.mark.parametrize("has_attribute", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_newest_block_that_has_not_ended_is_in_force(order, has_attribute):
    owner = Owner()
    if has_attribute:
        owner.method = lambda: "attribute"
    before, blocks = dict(vars(owner)), [ExitStack() for _ in range(3)]
    for number, block in enumerate(blocks):
        block.enter_context(override_method(owner, "method", lambda number=number: number))
    running = [0, 1, 2]
    for number in order:
        assert owner.method() == max(running)
        blocks[number].close()
        running.remove(number)
    assert vars(owner) == before and owner.method() == ("attribute" if has_attribute else "own")
