"""One run at a time in an output folder."""

import fcntl
import os
from pathlib import Path

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
            self._file = self._path.open("w")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                raise BadInput(
                    f"{option} {folder}: another process is writing into it, expected none"
                ) from None
            except OSError:
                return  # a file system without locks
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
        if remove:
            self._path.unlink(missing_ok=True)
        self._file.close()
