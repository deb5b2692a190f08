"""The examples, on the embedded model."""

import re

import pytest

from examples import batch, quantised, saved_context, streaming


@pytest.mark.parametrize("example", [batch, streaming, saved_context], ids=lambda module: module.__name__)
def test_an_example_runs_and_answers(example, capsys):
    example.main()
    said = capsys.readouterr().out
    assert "Marta Lindgren? The telephone extension of Marta Lindgren is 5308" in said
    sizes = [int(number.replace(",", "")) for number in re.findall(r"([\d,]{6,}) bytes", said)]
    assert sizes


def test_quantised_runs_hold_what_the_readme_says(capsys):
    pytest.importorskip("torchao")
    quantised.main()
    said = capsys.readouterr().out
    shares = [float(share) for share in re.findall(r"([\d.]+) of the full cache", said)]
    assert len(shares) == 3
    assert shares[0] < 0.19 and shares[1] < 0.62 * shares[0] and shares[2] < 0.4 * shares[0]
    assert said.count("5308") == 3
