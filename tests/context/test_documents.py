"""Small hostile documents (`tests/fixtures/documents`) with the text that a browser or reader shows of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lkv.context.document_reader import Document, parse_document
from lkv.errors import DocumentError
from tests.context.pdf_documents import PDFS

FOLDER = Path(__file__).parents[1] / "fixtures" / "documents"
TEXTS = [json.loads(line) for line in (FOLDER / "text.ndjson").read_text().splitlines()]


def pages() -> dict[str, tuple[str, str, list[str]]]:
    """The source of each page, its text (⇥ stands for a tab) and what is left out of it."""
    documents = {}
    for part in re.split(r"^#### ", (FOLDER / "html.txt").read_text(), flags=re.MULTILINE)[1:]:
        name, rest = part.split("\n", 1)
        source, text, *skipped = re.split(r"^----.*\n", rest, flags=re.MULTILINE)
        documents[name] = source[:-1], text[:-1].replace("⇥", "\t"), "".join(skipped).splitlines()
    return documents


PAGES = pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_gives_what_a_browser_displays(name):
    source, text, skipped = PAGES[name]
    if text:
        assert parse_document(source.encode(), "page.html") == (text, skipped)
    else:
        with pytest.raises(DocumentError, match=f"page.html has no text but {', '.join(skipped)}"):
            parse_document(source.encode(), "page.html")


@pytest.mark.parametrize("name", PDFS)
def test_a_pdf_gives_what_a_reader_displays(name):
    data, text, skipped = PDFS[name]
    if text:
        assert parse_document(data, "file.pdf") == Document(text, list(skipped))
    else:
        with pytest.raises(DocumentError, match=f"file.pdf has no text but {', '.join(skipped)}; a scanned document"):
            parse_document(data, "file.pdf")


@pytest.mark.parametrize("case", TEXTS, ids=[case["name"] for case in TEXTS])
def test_a_text_is_read_whole_in_its_encoding_or_refused(case: dict[str, Any]):
    is_hex = case["encoding"] == "hex"
    data = bytes.fromhex(case["text"]) if is_hex else case["text"].encode(case["encoding"])
    if "error" in case:
        with pytest.raises(DocumentError, match=re.escape(case["error"])) as refusal:
            parse_document(data, case["file"])
        assert str(refusal.value).startswith(case["file"])
    else:
        assert parse_document(data, case["file"]) == (case.get("reads", case["text"]), case.get("skipped", []))
