"""Random operations on a cache against the dense reference, as many as fit into seconds; `make soak` runs for hours."""

from hypothesis import HealthCheck, Phase, settings

from tests.cache_machine import CacheMachine

TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=5,
    stateful_step_count=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    # To make a failure smaller takes minutes; `make soak` does it.
    phases=[Phase.explicit, Phase.generate],
)
