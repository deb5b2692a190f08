"""The README tells what the result files hold."""

from benchmarks.readme import README, section


def test_results_in_the_readme_come_from_the_files():
    assert section() in README.read_text(encoding="utf-8")
