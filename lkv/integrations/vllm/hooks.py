"""Replace methods and functions of vLLM."""

import functools
from collections.abc import Callable
from inspect import signature
from types import ModuleType
from typing import Any

_HOOK_MARK = "_lkv_hooked"


def check_parameters(owner: type, name: str, *parameters: str) -> None:
    """Raise AttributeError unless `owner` has the method `name` with these parameters."""
    missing = set(parameters) - set(signature(getattr(owner, name)).parameters)
    if missing:
        raise AttributeError(f"{owner.__name__}.{name} has no parameter {min(missing)}")


def wrap_method(owner: type | ModuleType, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method, or a function of a module, by `wrapper`, which gets it as its first argument; once."""
    method = vars(owner)[name]
    if hasattr(method, _HOOK_MARK):
        return

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(method, *args, **kwargs)

    setattr(wrapped, _HOOK_MARK, True)
    setattr(owner, name, wrapped)
