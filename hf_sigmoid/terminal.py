"""A terminal that cannot show every character, or a reader that goes away."""

import os
import sys


def show_anything() -> None:
    """Let no name or sign end a command, under whatever locale: what cannot be shown is escaped."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def show(text: str) -> None:
    """Print a long text; who reads no more of it, as `head`, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor at the exit
