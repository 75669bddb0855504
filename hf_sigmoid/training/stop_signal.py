"""Stopping a run from outside: at a moment of its own choosing, or at once.

From the import of this module on (`errors` does it, before what takes long), Ctrl-C that nobody
handles ends a script with one line and status 130, instead of a traceback.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

from hf_sigmoid.interrupts import STATUS, while_loading

GO_ON = "interrupted: the same command goes on from what is kept"


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
            _say("Ctrl-C: stopping once this step is saved; again: at once")
        self.asked = True

    def __exit__(self, *error: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)


def _say(words: str) -> None:
    """On stderr, by the one process of several that says what all of them do."""
    if os.environ.get("RANK", "0") == "0" and multiprocessing.parent_process() is None:
        # Not print, which may be in the middle of a line, nor sys.stderr, which torch's hook of a
        # group of processes replaces.
        with contextlib.suppress(OSError):  # a terminal that has gone
            os.write(2, f"\n{words}\n".encode())


def _end(error: BaseException) -> None:
    with contextlib.suppress(OSError, ValueError):  # another thread; a reader that has gone
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout.flush()
    _say(str(error) or GO_ON)
    # Now: threads and other processes of a group may never come to their ends.
    os._exit(STATUS)


def _uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if isinstance(error, KeyboardInterrupt):
        _end(error)
    _previous_hook(kind, error, trace)


def _unraisable(found: Any) -> None:
    """In a finaliser, where Python would print it and go on."""
    if isinstance(found.exc_value, KeyboardInterrupt):
        _end(found.exc_value)
    _previous_unraisable(found)


def loaded() -> None:
    """A script has imported what it needs: from here on Ctrl-C is a KeyboardInterrupt again."""
    _loading.close()


_loading = contextlib.ExitStack()
if Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parent:  # a script, no import
    _loading.enter_context(while_loading(GO_ON))
_previous_hook, _previous_unraisable = sys.excepthook, sys.unraisablehook
sys.excepthook, sys.unraisablehook = _uncaught, _unraisable
