"""Command-line arguments derived from pydantic models: each field is one option, stated once."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from lkv.errors import LkvError, describe_invalid_value

_METAVARS = {int: "N", float: "X", Path: "PATH"}


def option(
    description: str,
    default: Any = None,
    *,
    positional: bool = False,
    metavar: str | None = None,
    nargs: str | None = None,
    const: str | None = None,
    append: bool = False,
    group: str = "",
    **settings: Any,
) -> Any:
    """Declare a field of a command.

    Args:
        description: The help of the option.
        default: Its default; `...` makes it required.
        positional: Whether it is a positional argument.
        metavar: The name of its value in the help; by default, it follows from the type.
        nargs: As in argparse; sequences take one or more values by default.
        const: The value of the option without one, with `nargs="?"`.
        append: Whether it may be repeated, each with one value.
        group: Title of its group in the help, with a description after ": ".
        settings: Further settings of pydantic's `Field`, such as `ge` and `le`.
    """
    argument = {"positional": positional, "metavar": metavar, "nargs": nargs, "const": const, "append": append}
    extra: Any = argument | {"group": group}
    return Field(default=default, description=description, json_schema_extra=extra, **settings)


class Command(BaseModel):
    """Base class of the commands: the fields are the options, `run` does the work."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def run(self) -> None:
        """Execute the command; raises LkvError for what the user can fix."""
        raise NotImplementedError

    def refuse_unread(self, mode: str, *flags: str, advice: str = "leave them out") -> None:
        """Raise LkvError if any of the options `flags` is given, which the command does not read in this mode.

        Args:
            mode: The subject of the error's sentence.
            flags: Options such as "--no-strict".
            advice: The end of the sentence.
        """
        names = {flag: flag.removeprefix("--no-").removeprefix("--").replace("-", "_") for flag in flags}
        if unread := [flag for flag, name in names.items() if name in self.model_fields_set]:
            raise LkvError(f"{mode} does not read {', '.join(unread)}; {advice}.")


def add_arguments(parser: argparse.ArgumentParser, command: type[Command]) -> None:
    """Add an argument for every field of `command`; omitted arguments are not in the namespace."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    usage = [parser.prog, "[options]"]  # instead of argparse's list of all options
    parser.set_defaults(command=command, parser=parser)
    for name, field in command.model_fields.items():
        name = field.alias or name
        kind = _value_type(field.annotation)
        argument: Any = field.json_schema_extra or option("").json_schema_extra
        if argument["group"] not in groups:
            groups[argument["group"]] = parser.add_argument_group(*argument["group"].split(": ", 1))
        group = groups[argument["group"]]
        settings: dict[str, Any] = {"help": _help_text(field), "default": argparse.SUPPRESS}
        if kind is bool:
            settings["action"] = "store_false" if field.default else "store_true"
            if field.default is None:
                settings["action"] = argparse.BooleanOptionalAction
            flag = "--no-" if field.default else "--"
            group.add_argument(flag + name.replace("_", "-"), dest=name, **settings)
            continue
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        settings["metavar"] = argument["metavar"] or ("{" + ",".join(choices) + "}" if choices else _METAVARS.get(kind))
        if argument["append"]:
            settings["action"] = "append"
        elif nargs := argument["nargs"] or ("+" if _is_sequence(field) else None):
            settings["metavar"] = settings["metavar"] or name.removesuffix("s").upper()
            settings |= {"nargs": nargs} | ({"const": argument["const"]} if argument["const"] else {})
        if argument["positional"]:
            if argument["nargs"] == "*":
                settings["default"] = []  # argparse consumes such words before and after options separately
            group.add_argument(name, **settings | ({"choices": choices} if choices else {}))
            usage.append(settings["metavar"] or name.upper())
        else:
            flag = "--" + name.replace("_", "-")
            group.add_argument(flag, dest=name, required=field.is_required(), **settings)
            if field.is_required():
                usage.append(f"{flag} {settings['metavar'] or name.upper()}")
    parser.usage = " ".join(usage)


def build_command(options: argparse.Namespace) -> Command:
    """Validate parsed arguments and return the command. Raises LkvError, one sentence, for a wrong value."""
    values = {name: value for name, value in vars(options).items() if name not in ("command", "parser")}
    try:
        return options.command.model_validate(values)
    except ValidationError as error:
        raise LkvError(describe_invalid_value(error, options.command.model_fields, "--")) from None


def _is_sequence(field: FieldInfo) -> bool:
    annotations = (field.annotation, *get_args(field.annotation))
    return any(get_origin(annotation) in (list, tuple) for annotation in annotations)


def _value_type(annotation: object) -> Any:
    """Return the type of single values: `int` for `list[int] | None`."""
    if get_origin(annotation) not in (Annotated, Union, UnionType, list, tuple):
        return annotation
    return _value_type(next(argument for argument in get_args(annotation) if argument is not NoneType))


def _help_text(field: FieldInfo) -> str:
    default = field.default
    text = field.description or ""
    if isinstance(default, Sequence) and not isinstance(default, str):
        default = " ".join(map(str, default))
    if field.is_required() or default in (None, "") or isinstance(default, bool):
        return text.replace("%", "%%")
    value = f"{default:,}" if isinstance(default, int) else f"{default:g}" if isinstance(default, float) else default
    return f"{text} (default: {value})".strip().replace("%", "%%")
