"""Methods that are replaced for a block: blocks that end in any order leave what was there."""

import copy
import itertools
import pickle
from contextlib import ExitStack

import pytest

from lkv.utils.overrides import current_method, override_method


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


class Child(Owner):
    pass


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda owner: pickle.loads(pickle.dumps(owner))])
def test_copies_that_are_made_in_a_block_have_the_method_of_their_own(copied):
    owner, other = Child(), Child()
    with override_method(owner, "method", lambda: "outer"):
        outer = current_method(owner, "method")
        with override_method(owner, "method", lambda: f"inner of {outer()}"):
            twin = copied(owner)
            assert owner.method() == "inner of outer" and twin.method() == other.method() == "own"
            assert vars(twin) == vars(owner) == {} and current_method(other, "method")() == "own"
    assert owner.method() == twin.method() == "own" and "method" not in vars(Child) and vars(Owner)["method"]
