"""Build dataclasses from JSON values."""

import functools
from dataclasses import fields
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError


def from_dict(cls: type, values: dict[str, Any]) -> Any:
    """Build the dataclass `cls` from JSON values, lists becoming tuples.

    Raises TypeError for unknown or missing fields, and for values of another type.
    """
    types: dict[str, Any] = {field.name: field.type for field in fields(cls)}
    if unknown := sorted(set(values) - set(types)):
        raise TypeError(f"unknown fields {unknown} for {cls.__name__}")
    built = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    for name, value in built.items():
        try:
            _type_adapter(types[name]).validate_python(value)
        except ValidationError:
            raise TypeError(f"{name} is {str(value)[:80]!r}, not {types[name]}") from None
    return cls(**built)


@functools.cache
def _type_adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True))
