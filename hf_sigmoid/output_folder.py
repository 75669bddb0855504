"""Whether a recipe can write where it was told to, before it does any work."""

import tempfile
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
