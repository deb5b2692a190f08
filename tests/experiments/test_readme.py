"""The tables and figures of README and docs are those of the result files, and a change of either is found."""

import re

import pytest

from experiments import readme
from experiments.common import RESULTS
from lkv.policy.policy import Policy
from lkv.policy.shipped import shipped_policies

_OTHER = str.maketrans("0123456789", "1234567890")


def test_the_pages_are_those_of_the_result_files(capsys):
    readme.main(["--check"])


@pytest.mark.parametrize(
    ("name", "figure", "message"),
    [
        ("README.md", r"0\.26 ", "tables differ from the result files"),
        ("README.md", r"takes 6% longer", "README.md: 'takes 6% longer' is what the result files say"),
        ("docs/results.md", r"0\.250 \[0\.212", "tables differ from the result files"),
        ("docs/claims.md", r"46\.7 \[37\.6", r"claims\.md: 57\.8 \[48\.7, 56\.2\] is not in ruler"),
    ],
)
def test_another_figure_is_found(tmp_path, monkeypatch, name, figure, message):
    pages = [path.relative_to(readme.ROOT).as_posix() for path in readme.PAGES]
    for page in (*pages, "docs/claims.md", "docs/methods.md", "docs/quickstart.md"):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        text = (readme.ROOT / page).read_text(encoding="utf-8")
        if page == name:
            assert re.search(figure, text)
            text = re.sub(figure, lambda match: match[0].translate(_OTHER), text, count=1)
        (tmp_path / page).write_text(text, encoding="utf-8")
    copies = tuple(tmp_path / page for page in pages)
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "PAGES", copies)
    monkeypatch.setattr(readme, "CHECKED_PAGES", (*copies, tmp_path / "docs" / "claims.md"))
    with pytest.raises(SystemExit, match=message):
        readme.main(["--check"])


def test_a_file_s_policy_and_earlier_runs_are_named(monkeypatch):
    known = Policy.from_pretrained(shipped_policies()[0].folder).digest()
    for about, expected in (
        ({"policy": known}, "`some.json`"),
        ({"policy": known[::-1]}, "`some.json`, with a policy that is not shipped"),
        ({}, "`some.json`, with a policy that is not recorded"),
        ({"policy": known, "kept": {}}, "`some.json`, some methods in an earlier run on the same samples"),
    ):
        monkeypatch.setattr(readme, "document", lambda name, about=about: about)
        assert readme.source("some") == expected


def test_a_table_has_its_cells_by_line_and_column():
    cells = {("a || 1", "x"): "A", ("b || 2", "y"): "B"}
    assert readme.table(cells, " || n", "-", columns=["y", "x"]) == (
        "|  | n | y | x |\n| --- | --- | --- | --- |\n| a | 1 | - | A |\n| b | 2 | B | - |"
    )


def test_the_readme_is_one_screen_and_a_dozen_numbers():
    page = (readme.ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|<!--.*?-->|`[^`]*`|!\[[^\]]*\]|\]\([^)]*\)", " ", page, flags=re.DOTALL)
    words = [word for word in re.split(r"[\s|/:;()]+", text) if re.fullmatch(r"\d[\d.,]*%?,?", word)]
    assert len(page.splitlines()) <= 100 and len(words) <= 12, words


def test_the_list_of_experiments_names_programs():
    page = (RESULTS.parent / "README.md").read_text(encoding="utf-8").partition("Which command makes which file")[2]
    lines = re.findall(r"^\| (`[^|]*)\|", page, re.MULTILINE)[1:]
    names = [name for line in lines for name in re.findall(r"(?:^|, )`(\w+)", line)]
    assert len(names) > 25
    for name in names:
        folder = RESULTS.parent / name
        script = folder / "__main__.py" if folder.is_dir() else folder.with_suffix(".py")
        assert '__name__ == "__main__"' in script.read_text(encoding="utf-8"), name
