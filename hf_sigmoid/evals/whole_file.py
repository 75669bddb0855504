"""Files that are there whole, or as they were before."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(file: Path, write_to: Callable[[Path], Any]) -> Path:
    """Have a file written under another name, and renamed; the file."""
    temporary = file.with_name("." + file.name)
    try:
        write_to(temporary)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return file
