"""Bars: tqdm's on a terminal, a line a minute elsewhere."""

import io
import re
import sys
import time

import pytest

from lkv.utils import progress
from lkv.utils.progress import ProgressBar
from tests.serving.server import until


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(params=[io.StringIO, Terminal])
def stderr(request, monkeypatch):
    """Standard error, a log or a terminal, with shorter times. It is replaced in the test: pytest resets it before."""
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.3)
    monkeypatch.setattr(progress, "_TERMINAL_SECONDS", 0.3)

    def replace():
        monkeypatch.setattr(sys, "stderr", request.param())
        return sys.stderr

    return replace


def test_an_item_that_takes_long_is_shown_to_live(stderr):
    stderr = stderr()
    for item in ProgressBar(range(4), desc="reading", unit="text"):
        if item == 2:
            until(lambda: stderr.getvalue().count("2/4") > 2)
    text = stderr.getvalue()
    if stderr.isatty():
        assert "\r" in text and re.search(r"reading: +50%.* 2/4 \[\d\d:\d\d<\d\d:\d\d", text)
    else:
        lines = text.splitlines()
        assert "\r" not in text and all(line.startswith("reading:  50%|") for line in lines) and len(lines) > 2
    before = len(stderr.getvalue())
    time.sleep(0.7)
    assert len(stderr.getvalue()) == before  # it has ended


def test_work_that_follows_a_clock_or_has_no_end_needs_no_updates(stderr):
    stderr = stderr()
    start = time.monotonic()
    with ProgressBar(total=20, desc="fitting", position_now=lambda: 10 * (time.monotonic() - start)):
        until(lambda: re.search(r"fitting: +\d\d%.* 1\d/20", stderr.getvalue()))
        until(lambda: "20/20" in stderr.getvalue())  # and no further
        time.sleep(0.7)
        assert "fitting: 100%" in stderr.getvalue() and "21/20" not in stderr.getvalue()
    with ProgressBar.without_total("loading tiny"):
        until(lambda: "loading tiny: 00:00" in stderr.getvalue())


def test_short_and_silent_work_leaves_nothing_in_a_log(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.2)
    assert list(ProgressBar(range(9), desc="reading")) == list(range(9))
    with ProgressBar(total=9, disable=True) as bar:
        time.sleep(0.5)
        bar.update(9)
    assert sys.stderr.getvalue() == ""
