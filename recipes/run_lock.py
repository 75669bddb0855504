"""One run at a time in an output folder."""

import fcntl
from pathlib import Path

from errors import BadInput


class RunLock:
    """Held while a process lives, however it ends.

    Raises:
        BadInput: another process writes into the folder; a launcher that was killed leaves one.
    """

    def __init__(self, folder: Path):
        self._file = (folder / ".lock").open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise BadInput(
                f"output_dir {folder}: another process is training in it, expected none"
            ) from None
        except OSError:
            pass  # a file system without locks

    def release(self) -> None:
        self._file.close()
