"""Temporary replacements of an object's methods."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def override_method(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace the method `name` of the object `owner` by `method` for the duration of a `with` block."""
    earlier = vars(owner).get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if earlier is None:
            delattr(owner, name)
        else:
            setattr(owner, name, earlier)
