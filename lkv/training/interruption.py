"""Ctrl-C during a training."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def first_interrupt() -> Iterator[threading.Event]:
    """An event in place of the first KeyboardInterrupt in the block; the next one is raised as ever."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def note(*_: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)
        print("\nstopping after this step; interrupt again to stop at once", file=sys.stderr)

    signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
