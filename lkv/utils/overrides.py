"""Temporary replacements of an object's methods."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_REPLACED = "_lkv_replaced"  # stack of replaced methods by name: the instance attribute or None, then each override
_lock = threading.Lock()


@contextmanager
def override_method(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace the method `name` of the object `owner` by `method` for the duration of a `with` block.

    Blocks may end in any order: the newest of those that have not ended is in force.
    """
    with _lock:
        replaced = vars(owner).setdefault(_REPLACED, {})
        replaced.setdefault(name, [vars(owner).get(name)]).append(method)
        setattr(owner, name, method)
    try:
        yield
    finally:
        with _lock:
            methods = replaced[name]
            methods.remove(method)
            if methods[-1] is None:
                delattr(owner, name)
            else:
                setattr(owner, name, methods[-1])
            if len(methods) == 1:
                del replaced[name]
            if not replaced:
                vars(owner).pop(_REPLACED, None)
