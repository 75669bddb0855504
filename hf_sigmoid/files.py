"""Files and folders that are there whole or not at all.

Each is written beside its place, flushed to disk and renamed. Nothing else in the project renames
into place.
"""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_sigmoid.errors import BadInput

REPLACED = "replaced_"  # before the name of a folder that another takes the place of


def write_file(file: Path, write: Callable[[Path], Any]) -> Path:
    """Have `write` fill a file beside this one, which then takes its place; the file."""
    temporary = file.with_name(f".{os.getpid()}.{file.name}")
    try:
        write(temporary)
        sync(temporary)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    sync(file.parent)
    return file


def is_unfinished(name: str, file: Path) -> bool:
    """Is it what a process left that was killed while writing the file?"""
    return name == f"{file.name}.tmp" or bool(re.fullmatch(rf"\.\d+\.{re.escape(file.name)}", name))


def write_text(file: Path, content: str) -> Path:
    """Write a text as UTF-8, line ends as they are."""
    return write_file(file, lambda place: place.write_bytes(content.encode()))


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that gets the target's name at the end: complete or not there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if target.exists():
            target.rmdir()  # an empty one; Windows replaces none
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def take_the_place(temporary: Path, folder: Path) -> None:
    """Rename a folder over another one of which, killed at any moment, one is left."""
    sync_tree(temporary)
    old = folder.with_name(REPLACED + folder.name)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(folder, old)
    os.replace(temporary, folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore_replaced(root: Path) -> None:
    """Give folders back the names that a process was killed while taking."""
    for old in root.glob(f"{REPLACED}*"):
        folder = old.with_name(old.name.removeprefix(REPLACED))
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(old, folder)


def rename(folder: Path, name: str) -> Path:
    """Give a folder another name beside it, in the place of what had that name; the new path."""
    target = folder.with_name(name)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(folder, target)
    return target


def check_folder(folder: Path, option: str) -> None:
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


def check_new_folder(target: Path) -> None:
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


def sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    try:
        # Windows syncs no file that is open for reading alone, and opens no folder.
        descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems flush files alone.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
