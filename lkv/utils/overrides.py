"""Temporary replacements of an object's methods."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

_REPLACED = "_lkv_replaced"
# By class and name of the method: for each object its own attribute or None, then each override.
_stacks: dict[tuple[type, str], WeakKeyDictionary[Any, list[Any]]] = {}
_lock = threading.Lock()


@contextmanager
def override_method(owner: object, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace the method `name` of the object `owner` by `method` for the duration of a `with` block.

    Blocks may end in any order: the newest of those that have not ended is in force. The object's class looks up the
    override, so that copies of the object, and what pickle saves of it, do not contain it.
    """
    key = type(owner), name
    with _lock:
        if key not in _stacks:
            _stacks[key] = WeakKeyDictionary()
            setattr(type(owner), name, _dispatcher(getattr(type(owner), name), _stacks[key]))
        stack = _stacks[key].setdefault(owner, [vars(owner).get(name)])
        if name in vars(owner):
            delattr(owner, name)
        stack.append(method)
    try:
        yield
    finally:
        with _lock:
            stack.remove(method)
            if len(stack) == 1:
                del _stacks[key][owner]
                if stack[0] is not None:
                    setattr(owner, name, stack[0])
            if not _stacks[key]:
                _restore(type(owner), name)
                del _stacks[key]


def current_method(owner: Any, name: str) -> Callable[..., Any]:
    """Return the method of `owner` that is in force, which later overrides do not change."""
    if stack := _stacks.get((type(owner), name), {}).get(owner):
        return stack[-1]
    method = getattr(owner, name)
    original = getattr(method, _REPLACED, None)
    return method if original is None else MethodType(original, owner)


def _dispatcher(original: Callable[..., Any], stacks: WeakKeyDictionary[Any, list[Any]]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dispatch(self: Any, *args: object, **kwargs: object) -> Any:
        method = stacks.get(self, [None])[-1]  # None, too, while another thread ends the last block
        return original(self, *args, **kwargs) if method is None else method(*args, **kwargs)

    setattr(dispatch, _REPLACED, original)
    return dispatch


def _restore(owner: type, name: str) -> None:
    original = getattr(vars(owner)[name], _REPLACED)
    delattr(owner, name)
    if getattr(owner, name, None) is not original:
        setattr(owner, name, original)
