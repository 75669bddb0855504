"""The folder that a command writes: checked before any work, and whole or not there at the end."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_sigmoid.errors import BadInput


def check(folder: Path, option: str) -> None:
    """Refuse a folder that is a file, that a file is in the way of, or that cannot be written."""
    for place in (folder, *folder.parents):
        if place.is_dir():
            try:
                tempfile.TemporaryFile(dir=place).close()
            except OSError as error:
                raise BadInput(f"{option} {folder}: {place} cannot be written: {error}") from error
            return
        if place.exists() or place.is_symlink():
            raise BadInput(f"{option} {folder}: {place} is a file, expected a folder")


def check_new(target: Path) -> None:
    """Raise BadInput but for a new or empty folder, in one that can be written."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(
            f"the output must be a new or empty folder, got {target}, which exists and is not empty"
        )
    parent = existing_parent(target)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise BadInput(f"the output must be in a folder that can be written, got {target}")


def existing_parent(target: Path) -> Path:
    return next(folder for folder in target.parents if folder.exists())


@contextmanager
def written(target: Path) -> Iterator[Path]:
    """A temporary folder that gets the target's name at the end: complete or not there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if target.exists():
            target.rmdir()  # an empty one; Windows replaces none
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
