"""For mkdocs: pages link to files of the repository as a forge shows them; the site gets those files too.

Links that leave docs/ ("../examples/batch.py" from a page of docs/) lose the one step that leads out, and the files are
added where the links then lead. Pages from the root (CONTRIBUTING.md) lose "docs/" from theirs.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from dev.reference import for_site

ROOT = Path(__file__).parents[1]
PATTERNS = (
    "*.md", "LICENSE", "CITATION.cff", "Makefile", "examples/*.py", "examples/*.ipynb", "examples/*/README.md",
    "experiments/README.md", "experiments/*/README.md", "experiments/results/small/README.md", "dev/*.md",
    "experiments/results/small/*.png",
)  # fmt: skip
_LINK = re.compile(r"(\]\()([^)\s#]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add the repository's files that pages may link to."""
    for pattern in PATTERNS:
        for path in sorted(ROOT.glob(pattern)):
            place = path.relative_to(ROOT).as_posix()
            if place != "README.md":
                files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Write links as they are in the site, and the reference's entries as those of mkdocstrings."""
    inside = (ROOT / "docs" / page.file.src_uri).is_file()
    up = "../" * (page.file.src_uri.count("/") + 1)

    def link(found: re.Match[str]) -> str:
        target = found[2]
        if inside and target.startswith(up):
            target = target.removeprefix("../")
        elif not inside:
            target = re.sub(r"^((?:\.\./)*)docs/", r"\1", target)
        return found[1] + target

    return for_site(_LINK.sub(link, markdown))
