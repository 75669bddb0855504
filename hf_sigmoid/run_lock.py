"""One run at a time in an output folder."""

import os
from pathlib import Path
from typing import IO

from hf_sigmoid.errors import BadInput


class RunLock:
    """Held while a process lives, however it ends.

    Args:
        option: what an error calls the folder.

    Raises:
        BadInput: another process writes into the folder; a launcher that was killed leaves one.
    """

    FILE = ".lock"

    def __init__(self, folder: Path, option: str = "output_dir"):
        self._path = folder / self.FILE
        while True:
            self._file = self._path.open("wb")
            try:
                _take(self._file)
            except BlockingIOError:
                self._file.close()
                raise BadInput(
                    f"{option} {folder}: another process is writing into it, expected none"
                ) from None
            except OSError:
                return  # a file system or a platform without locks
            if self._is_there():
                return
            self._file.close()  # its owner removed it meanwhile

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def release(self, *, remove: bool = False) -> None:
        """Let others in; with `remove` without leaving the file that was locked."""
        if os.name == "nt":
            self._file.close()  # Windows removes no open file
        if remove:
            self._path.unlink(missing_ok=True)
        self._file.close()


def _take(file: IO) -> None:
    """Not by the package filelock, which takes a file system without locks for a taken file.

    Raises:
        BlockingIOError: another process has it.
        OSError: there are no locks.
    """
    try:
        import fcntl
    except ImportError:
        _take_on_windows(file)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _take_on_windows(file: IO) -> None:
    try:
        import msvcrt
    except ImportError as error:
        raise OSError("no locks") from error
    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except PermissionError as error:
        raise BlockingIOError from error
