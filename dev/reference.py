"""Write the entries of docs/reference.md, which are read in the repository; the site has whole docstrings there.

python -m dev.reference            (rewrites the entries)
python -m dev.reference --check    (fails where an entry differs from the code)

A page marks an entry with `<!-- api: NAME -->` before it and `<!-- end of the entry -->` after it. Members may follow
the name; without them a class is shown with all of its public methods.
"""

import argparse
import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
_ENTRY = re.compile(r"<!-- api: (\S+)((?: \w+)*) -->\n(.*?)<!-- end of the entry -->", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page differs")
    is_check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    page = with_entries(text)
    if page != text and is_check:
        sys.exit("docs/reference.md differs from the code; run python -m dev.reference")
    PAGE.write_text(page, encoding="utf-8")


def with_entries(text: str) -> str:
    """Return a page with each marked entry written anew."""

    def rewrite(match: re.Match[str]) -> str:
        name, members, _ = match.groups()
        return f"<!-- api: {name}{members} -->\n{entry(name, members.split())}\n<!-- end of the entry -->"

    return _ENTRY.sub(rewrite, text)


def for_site(text: str) -> str:
    """Return a page whose marked entries are those of mkdocstrings."""

    def rewrite(match: re.Match[str]) -> str:
        name, members, _ = match.groups()
        options = f"\n    options:\n      members: [{', '.join(members.split())}]" if members else ""
        return f"::: {name}{options}\n"

    return _ENTRY.sub(rewrite, text)


def entry(name: str, members: list[str]) -> str:
    """Return the signature and the first sentence of an object, and of its members."""
    place, _, attribute = name.rpartition(".")
    try:
        target = getattr(import_module(place), attribute)
    except AttributeError:
        target = import_module(name)
    lines = [f"**`{attribute}{_parameters(target)}`**: {_first_sentence(target)}"]
    names = members or [key for key in vars(target) if _is_public_member(target, key)]
    members_of = ((key, inspect.getattr_static(target, key)) for key in names)
    lines += [f"* `{key}{_parameters(member)}`: {_first_sentence(member)}" for key, member in members_of]
    return "\n\n".join((lines[0], "\n".join(lines[1:]))) if len(lines) > 1 else lines[0]


def _is_public_member(target: Any, name: str) -> bool:
    member = vars(target)[name]
    is_own_class = inspect.isclass(member) and member.__module__ == getattr(target, "__name__", None)
    is_method = inspect.isclass(target) and isinstance(_unwrapped(member), property | type(entry))
    return not name.startswith("_") and (is_own_class or is_method) and bool(inspect.getdoc(_unwrapped(member)))


def _unwrapped(member: Any) -> Any:
    return member.__func__ if isinstance(member, classmethod | staticmethod) else member


def _parameters(target: Any) -> str:
    """Return a signature without annotations; nothing for modules, properties and errors."""
    target = _unwrapped(target)
    if not callable(target) or (inspect.isclass(target) and issubclass(target, Exception)):
        return ""
    signature = inspect.signature(target)
    kept = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    return str(signature.replace(parameters=kept, return_annotation=inspect.Signature.empty))


def _first_sentence(target: Any) -> str:
    text = " ".join((inspect.getdoc(_unwrapped(target)) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z`])", text)[0].removesuffix(":").removesuffix(".") + "."


if __name__ == "__main__":
    main()
