"""Stopping a run from outside: at a moment of its own choosing, or at once."""

import contextlib
import multiprocessing
import os
import signal
from typing import Any


class StopSignal:
    """Remembers that SIGTERM, SIGUSR1 or Ctrl-C (SIGINT) came, while it is entered.

    More of the first two change nothing: a scheduler signals the launcher and its processes, and
    the launcher signals them once more. A second SIGINT raises KeyboardInterrupt at once. SIGKILL
    ends a process, as ever.
    """

    def __init__(self) -> None:
        self.asked = self.interrupted = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        # Windows has no SIGUSR1; a shell may have started this without Ctrl-C, which stays so.
        numbers = [getattr(signal, name, None) for name in ("SIGTERM", "SIGUSR1", "SIGINT")]
        with contextlib.suppress(ValueError):  # another thread than the first cannot set handlers
            for number in filter(None, numbers):
                if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGINT:
                    self._previous[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
            say("Ctrl-C: stopping once this step is saved; again: at once")
        self.asked = True

    def __exit__(self, *error: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)


def say(words: str) -> None:
    """On stderr, by the one process of several that says what all of them do."""
    if os.environ.get("RANK", "0") == "0" and multiprocessing.parent_process() is None:
        # Not print, which may be in the middle of a line, nor sys.stderr, which torch's hook of a
        # group of processes replaces.
        with contextlib.suppress(OSError):  # a terminal that has gone
            os.write(2, f"\n{words}\n".encode())
