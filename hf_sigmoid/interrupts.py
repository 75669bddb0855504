"""Ctrl-C while a command's libraries load: one line and status 130.

A KeyboardInterrupt inside the import of an extension becomes another error there, or an abort.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

STATUS = 130  # what shells expect of a command that SIGINT has ended


@contextmanager
def while_loading(words: str) -> Iterator[None]:
    """Until what is inside has loaded, Ctrl-C says `words` and ends the process."""

    def end(number: int, frame: object) -> NoReturn:
        os.write(2, f"\n{words}\n".encode())
        os._exit(STATUS)

    previous = None
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            previous = signal.signal(signal.SIGINT, end)
    except ValueError:
        pass  # another thread than the first cannot set handlers
    try:
        yield
    finally:
        if previous is not None:
            signal.signal(signal.SIGINT, previous)
