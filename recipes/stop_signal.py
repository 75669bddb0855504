"""Stopping a run from outside, at a moment of its own choosing."""

import signal
from typing import Any


class StopSignal:
    """Remembers that SIGTERM or SIGUSR1 came.

    More of them change nothing: a scheduler signals the launcher and its processes, and the
    launcher signals them once more. SIGINT and SIGKILL end a process at once, as ever.
    """

    def __init__(self) -> None:
        self.asked = False
        self._previous: dict[int, Any] = {}
        try:
            for number in (signal.SIGTERM, signal.SIGUSR1):
                self._previous[number] = signal.signal(number, self._ask)
        except ValueError:
            pass  # called as a function from another thread, which cannot set handlers

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = True

    def restore(self) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
