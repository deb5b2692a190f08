"""The examples, on the demo model."""

import re

import pytest
import torch

from examples import batch, quantised, saved_context, streaming
from examples.document import document
from lkv import load_default


@pytest.mark.slow
@pytest.mark.parametrize(("example", "tokens"), [(streaming, 4200), (saved_context, 1000)])
def test_an_example_answers_from_15_percent_of_the_cache(example, tokens, capsys):
    example.main()
    check(capsys.readouterr().out, tokens, torch.bfloat16)


@pytest.mark.slow
def test_the_example_of_a_batch_answers_from_15_percent_of_shorter_texts(monkeypatch, capsys):
    """A quarter of the texts, in float32, which processors without bfloat16 compute several times as fast."""
    monkeypatch.setattr(batch, "document", lambda tokenizer, tokens: document(tokenizer, tokens // 4))
    monkeypatch.setattr(batch, "load_default", lambda dtype: load_default(torch.float32))
    batch.main()
    check(capsys.readouterr().out, 1164, torch.float32)


def test_the_example_of_images_runs_without_a_download(monkeypatch, capsys):
    pytest.importorskip("transformers", "5.24", reason="its processors need torchvision in older versions")
    from examples import images

    monkeypatch.setattr("sys.argv", ["images"])
    images.main()
    tokens, held, full = map(int, re.findall(r"(\d+)", capsys.readouterr().out.split("Answer")[0].replace(",", "")))
    assert tokens == 690 and full == tokens * 2 * 2 * 16 * 4 and held < 0.5 * full


def check(printed: str, tokens: int, dtype: torch.dtype) -> None:
    """The answer is right, and the sizes are those of 15% and of all of `tokens` tokens."""
    assert "Marta Lindgren? The telephone extension of Marta Lindgren is 5308" in printed
    sizes = [int(number.replace(",", "")) for number in re.findall(r"([\d,]{6,})(?= bytes|$)", printed, re.MULTILINE)]
    full = tokens * 30 * 3 * 2 * 64 * dtype.itemsize  # tokens, layers, KV heads, k and v, head size, bytes of a value
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
