"""A terminal that cannot show every character: what it cannot show is escaped."""

import sys


def show_anything() -> None:
    """Let no name or sign end a command, under whatever locale."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
