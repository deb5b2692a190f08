"""Forms of the type multipart/form-data, by which files are sent."""

import re
from typing import Any
from urllib.parse import unquote

from pydantic_core import from_json

from lkv.errors import PromptError

_MAX_PARTS, _MAX_PART_HEADERS = 8, 2048  # of a form: number, bytes


def parameter(header: str, name: str) -> str | None:
    """Return a parameter of a header such as `form-data; name="file"`, or None."""
    found = re.search(rf';\s*{name}=(?:"((?:[^"\\]|\\.)*)"|([^;\s]*))', header, re.IGNORECASE)
    return None if found is None else re.sub(r"\\([\\\"])", r"\1", found[1] or "") or found[2] or ""


def _file_name(header: str) -> str | None:
    """Return the name of a part's file as clients encode it: by RFC 5987, or as browsers do, which escape no `%`."""
    if extended := re.fullmatch(
        r"(utf-8|iso-8859-1)'[^']*'(.*)", parameter(header, r"filename\*") or "", re.IGNORECASE
    ):
        return unquote(extended[2], extended[1])
    name = parameter(header, "filename")
    return name and re.sub("%(?:22|0D|0A)", lambda code: unquote(code[0]), name)


def form_parts(body: bytes, boundary: str) -> list[tuple[str, str | None, bytes]]:
    """Return name, file name and content of each part of a form. Raises PromptError for no form and too many parts."""
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("utf-8", "replace"), _MAX_PARTS + 2)
    if not boundary or len(parts) < 3 or not parts[-1].startswith(b"--"):
        raise PromptError(f"the form is incomplete, or has more than {_MAX_PARTS} fields; send it again.")
    fields = []
    for part in parts[1:-1]:
        head, end, data = part.partition(b"\r\n\r\n")
        if not end or len(head) > _MAX_PART_HEADERS:
            raise PromptError("a part of the form has no headers, or too long ones; send it again.")
        header = head.decode("utf-8", "replace")
        fields.append((parameter(header, "name") or "", _file_name(header), data))
    return fields


def decode_field(name: str, data: bytes) -> Any:
    """Return the text of a field, or its JSON. Raises PromptError for anything else."""
    try:
        text = data.decode("utf-8-sig")
        return from_json(text, allow_inf_nan=False) if name in ("messages", "tools") else text
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text ({error.reason} at byte {error.start}); save or send it as UTF-8."
        raise PromptError(f"the form's field {name[:80]!r} {problem}") from None
    except ValueError as error:
        raise PromptError(f"the form's field {name!r} is not JSON ({error}); send it as in a JSON body.") from None
