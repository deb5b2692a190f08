"""`lkv ask` with a tiny model, and a terminal."""

import io
import sys

import pytest

from lkv.cli.main import main
from tests.cli.asking import TEXT
from tests.conftest import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model and a text."""
    path = tmp_path_factory.mktemp("ask")
    save_model(path / "model", max_position_embeddings=2048)
    (path / "text.md").write_text(TEXT)
    return path


@pytest.fixture
def asked(folder, capsys):
    """What `lkv ask` prints and says, and its exit status."""

    def ask(*words: object, method: str = "knorm"):
        given = ["--method", method] if method else []
        status = main(["ask", *map(str, words), "--model", str(folder / "model"), "--max-new-tokens", "4", *given])
        said = capsys.readouterr()
        return status, said.out, said.err

    return ask


@pytest.fixture
def typed(monkeypatch):
    """Lines that are typed into a terminal, of which "^C" is Ctrl-C, then its end."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    lines: list[str] = []

    def input_(prompt: str) -> str:
        if not lines:
            raise EOFError
        if (line := lines.pop(0)) == "^C":
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", input_)
    monkeypatch.setattr(sys, "stdin", Terminal())
    return lines
