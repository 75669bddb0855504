"""Whether a recipe can write where it was told to, before it does any work."""

from pathlib import Path

from errors import BadInput


def check(folder: Path, option: str) -> None:
    """Refuse a folder that is a file, or that a file on the way to it keeps from being made."""
    for place in (folder, *folder.parents):
        if place.is_dir():
            return
        if place.exists() or place.is_symlink():
            raise BadInput(f"{option} {folder}: {place} is a file, expected a folder")
