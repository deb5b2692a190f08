"""Methods and a policy for the tests on a fake GPU."""

import torch

from lkv.methods.budgets import PerHead
from lkv.methods.method import Method
from lkv.methods.selectors import Knorm
from lkv.policy.policy import Policy
from lkv.policy.scorer_inputs import ScorerInputs
from tests.cache.test_tiered_store import TIERS
from tests.conftest import uneven_policy
from tests.kernels.pools import in_tiers

KNORM = Method("knorm", PerHead([[0.5, 0.2], [0.1, 0.6], [0.0, 1.0]]), Knorm())


SHALLOW_KNORM = Method("knorm", PerHead([[0.5, 0.2], [0.0, 1.0]]), Knorm())


def tiered(method):
    """Options of caches whose entries are quantised in one tier, and in some of several."""
    return {
        "8 bits": {"method": method, "bits": 8},
        "3 bits": {"method": method, "bits": 3},
        "three tiers": {"method": in_tiers(method, *TIERS)},
    }


TIERED, SHALLOW_TIERED = tiered(KNORM), tiered(SHALLOW_KNORM)


def policy_of(model) -> Policy:
    policy = uneven_policy(model, inputs=ScorerInputs("unrotated", "learned", 8))
    for part in (policy.tokens.query_mean, policy.tokens.query_spread, policy.tokens.start, policy.tokens.end):
        torch.nn.init.normal_(part)
    return policy


def ids(tokens=60, batch=1, seed=0):
    return torch.randint(3, 67, (batch, tokens), generator=torch.Generator().manual_seed(seed))
