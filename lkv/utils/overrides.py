"""Other methods for single objects, for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def override_method(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Let the object `owner` have `method` in place of its method `name` for the duration of a `with` block."""
    earlier = vars(owner).get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if earlier is None:
            delattr(owner, name)
        else:
            setattr(owner, name, earlier)
