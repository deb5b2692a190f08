"""Progress of long work on stderr: tqdm's bar on a terminal, a line a minute in a log."""

import io
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Self

from tqdm import tqdm
from typing_extensions import override

LOG_SECONDS = 60.0
_TERMINAL_SECONDS = 1.0


class _Nowhere(io.TextIOBase):
    """A text file that keeps nothing."""

    @override
    def write(self, text: str, /) -> int:
        return len(text)


class ProgressBar(tqdm):
    """tqdm's bar, which shows that long work lives: its times go on between two updates.

    Where stderr is not a terminal, a line appears every minute instead; work of less than a minute has none.
    """

    def __init__(
        self,
        iterable: Iterable[Any] | None = None,
        *,
        position_now: Callable[[], float] | None = None,
        **options: object,
    ):
        """Start the bar.

        Args:
            iterable: As for tqdm.
            position_now: Returns how much of `total` is done, where nobody calls `update`.
            **options: As for tqdm.
        """
        self._is_terminal = sys.stderr.isatty()
        self._position_now, self._ended = position_now, threading.Event()
        file = sys.stderr if self._is_terminal else _Nowhere()
        # Every update counts: the next item may take long.
        settings: dict[str, Any] = {"iterable": iterable, "mininterval": 0, "miniters": 1, "file": file}
        super().__init__(**settings | options)
        if not self.disable:
            threading.Thread(target=self._show_regularly, daemon=True).start()

    @classmethod
    def without_total(cls, what: str) -> Self:
        """Return a bar of work of unknown length, which shows its time so far."""
        return cls(desc=what, bar_format="{desc}: {elapsed}", leave=False)

    @override
    def close(self) -> None:
        """End the bar."""
        self._ended.set()
        super().close()

    def _show_regularly(self) -> None:
        while not self._ended.wait(_TERMINAL_SECONDS if self._is_terminal else LOG_SECONDS):
            if self._position_now is not None:
                self.n = min(int(self._position_now()), int(self.total or 0))
            if self._is_terminal:
                self.refresh()
            else:
                print(str(self).strip(), file=sys.stderr, flush=True)
