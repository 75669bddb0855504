"""One run at a time in an output folder."""

from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from hf_sigmoid.errors import BadInput


class RunLock:
    """A lock that is held while this process lives, however it ends.

    Args:
        option: what an error calls the folder.

    Raises:
        BadInput: another process writes into the folder; a launcher that was killed leaves one.
        OSError: the folder, or the file that is locked, cannot be written.
    """

    FILE = ".lock"

    def __init__(self, folder: Path, option: str = "output_dir"):
        self._path = folder / self.FILE
        self._path.open("ab").close()  # an error here is of the folder, and no missing lock
        # Not soft: the marker of a process that was killed would keep the folder taken.
        self._lock = FileLock(self._path, is_singleton=False, fallback_to_soft=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise BadInput(
                f"{option} {folder}: another process is writing into it, expected none"
            ) from None
        except (OSError, NotImplementedError):
            pass  # a file system without locks

    def release(self, *, remove: bool = False) -> None:
        """Let others in; with `remove` without leaving the file that was locked.

        Who opens the file before it goes notices: filelock takes no lock on a file without a name.
        """
        if remove:
            with suppress(PermissionError):  # of Windows, which removes no open file
                self._path.unlink(missing_ok=True)
        self._lock.release()
