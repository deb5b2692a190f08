"""Old ways to call a function, still accepted under a DeprecationWarning."""

import warnings
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def positional_keywords(*names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a decorator that accepts the keyword-only arguments `names` by position, too, in this order.

    They follow the function's own positional parameters; such a call warns and names the keywords.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        kinds = [parameter.kind for parameter in signature(function).parameters.values()]
        count = kinds.count(Parameter.POSITIONAL_OR_KEYWORD)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> _R:
            old = dict(zip(names, args[count:], strict=False))
            # Python's own error for too many arguments, or for one that is given twice.
            if not old or len(args) > count + len(names) or old.keys() & kwargs.keys():
                return function(*args, **kwargs)
            keywords = ", ".join(f"{name}=..." for name in old)
            warnings.warn(
                f"{function.__qualname__.removesuffix('.__init__')} takes {' and '.join(old)} by keyword from now on; "
                f"write {keywords}.",
                DeprecationWarning,
                stacklevel=2,
            )
            return function(*args[:count], **kwargs, **old)

        return call

    return decorate


def renamed_keywords(**names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a decorator that accepts keywords by their old names, too (`old="new"`); such a call warns."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> _R:
            for old in names.keys() & kwargs.keys():
                if names[old] not in kwargs:  # else Python's own error for an argument that it does not know
                    new, kwargs[names[old]] = names[old], kwargs.pop(old)
                    message = f"the keyword {old} of {function.__qualname__} is now {new}; write {new}=..."
                    warnings.warn(message, DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        return call

    return decorate
