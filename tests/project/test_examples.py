"""The examples, on the embedded model."""

import re

import pytest

from examples import batch, quantised, saved_context, streaming


@pytest.mark.parametrize(
    ("example", "tokens"),
    [
        (batch, 3264),
        pytest.param(streaming, 4200, marks=pytest.mark.slow),
        pytest.param(saved_context, 1000, marks=pytest.mark.slow),
    ],
)
def test_an_example_answers_from_15_percent_of_the_cache(example, tokens, capsys):
    example.main()
    printed = capsys.readouterr().out
    assert "Marta Lindgren? The telephone extension of Marta Lindgren is 5308" in printed
    sizes = [int(number.replace(",", "")) for number in re.findall(r"([\d,]{6,})(?= bytes|$)", printed, re.MULTILINE)]
    full = tokens * 30 * 3 * 2 * 64 * 2  # tokens, layers, KV heads, k and v, head size, bytes of bfloat16
    assert 0.1 * full < sizes[0] < 0.25 * full
    assert all(0.9 * full < size < 1.2 * full for size in sizes[1:])


@pytest.mark.slow
def test_quantised_runs_hold_what_the_readme_says(capsys):
    quantised.main()
    printed = capsys.readouterr().out
    shares = [float(share) for share in re.findall(r"([\d.]+) of the full cache", printed)]
    assert len(shares) == 3
    assert shares[0] < 0.19 and shares[1] < 0.62 * shares[0] and shares[2] < 0.4 * shares[0]
    assert printed.count("5308") == 3
