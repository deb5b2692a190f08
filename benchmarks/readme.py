"""The README's section of results, docs/results.md and docs/more-results.md, written from the result files alone.

python -m benchmarks.readme [--check]
"""

import sys

from benchmarks.common import RESULTS
from benchmarks.pages.more import more_results
from benchmarks.pages.results import results_page
from benchmarks.pages.summary import section

README = RESULTS.parents[1] / "README.md"
MORE = README.parent / "docs" / "more-results.md"
RESULTS_PAGE = README.parent / "docs" / "results.md"
TITLE = "## What it keeps of the model\n\n"


def main() -> None:
    text = README.read_text(encoding="utf-8")
    start = text.index(TITLE) + len(TITLE)
    end = text.index("\n## ", start)
    pages = {
        README: text[:start] + section() + "\n" + text[end:],
        MORE: more_results(),
        RESULTS_PAGE: results_page(),
    }
    if "--check" in sys.argv:
        if stale := [path.name for path, page in pages.items() if path.read_text(encoding="utf-8") != page]:
            sys.exit(f"{', '.join(stale)} tell other figures than the files: run python -m benchmarks.readme")
        return
    for path, page in pages.items():
        path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
