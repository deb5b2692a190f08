"""What README and docs print is what the embedded model prints: blocks followed by a `text` block are run and compared.

python -m tests.project.test_shown_output PAGE    shows what every block of a page prints
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lkv.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"(?P<mark><!-- not run: [^>]* -->\n)?```(?P<kind>python|sh)\n(?P<code>.*?)```(?:\n\n```text\n(?P<shown>.*?)```)?",
    re.DOTALL,
)
_TIMES = re.compile(r"in [\d.]+ s \([\d,]+ tokens/s\)")


def shown_and_printed(page: Path) -> Iterator[tuple[str, str, str]]:
    """Code, shown output and printed output of each block up to the last one whose output is shown."""
    blocks = [found for found in _BLOCK.finditer(page.read_text(encoding="utf-8")) if not found["mark"]]
    last = max((number for number, found in enumerate(blocks) if found["shown"]), default=-1)
    names: dict = {}
    for found in blocks[: last + 1]:
        if found["kind"] == "python":
            yield found["code"], found["shown"] or "", printed(found["code"], names)
        elif found["shown"]:
            yield found["code"], found["shown"], printed_by_commands(found["code"])


def printed(code: str, names: dict) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "page", "exec"), names)
    return out.getvalue()


def printed_by_commands(code: str) -> str:
    """What the `lkv` commands of a block write, to stderr too."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        for line in code.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["lkv"]:
                assert main(words[1:]) == 0, out.getvalue()
    return out.getvalue()


def without_times(text: str) -> str:
    """The lines without times, progress (on a terminal a bar, which goes) and empty lines."""
    lines = [
        line for line in text.splitlines() if line.strip() and not line.startswith(("Loading weights", "[reading"))
    ]
    return "\n".join(_TIMES.sub("in ...", line) for line in lines)


def prepare(folder: Path) -> None:
    """A checkout as far as the pages read it."""
    (folder / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "lighthouse.txt", folder / "examples")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if any(found["shown"] and not found["mark"] for found in _BLOCK.finditer(page.read_text(encoding="utf-8")))
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_pages_show_what_is_printed(page, tmp_path, monkeypatch, own_registry):
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    compared = 0
    for code, shown, output in shown_and_printed(page):
        if shown:
            assert without_times(output) == without_times(shown), code
            compared += 1
    assert compared


def show(page: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        os.chdir(folder)
        for code, _, output in shown_and_printed(page):
            print(f"----- {code}----->\n{output}", flush=True)


if __name__ == "__main__":
    show(Path(sys.argv[1]).resolve())
