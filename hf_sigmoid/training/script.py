"""The one line that a script ends with when its input cannot be used, or it cannot go on."""

import contextlib
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from hf_sigmoid.errors import BadInput
from hf_sigmoid.interrupts import STATUS, while_loading
from hf_sigmoid.terminal import show_anything
from hf_sigmoid.training.stop_signal import say

GO_ON = "interrupted: the same command goes on from what is kept"


def loading() -> contextlib.AbstractContextManager[None]:
    """Around imports that take long: Ctrl-C is one line there too."""
    if multiprocessing.parent_process() is None:
        return while_loading(GO_ON)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the process that made this one
    return contextlib.nullcontext()


def run(main: Callable[[], object]) -> None:
    """Run a script's `main`; what it can explain ends it with one line, not with a traceback.

    Status 2 for bad input, 1 for a run that diverged or a command of it that failed, 130 for
    Ctrl-C.
    """
    show_anything()
    previous = sys.unraisablehook

    def unraisable(found: Any) -> None:
        """In a finaliser, where Python would print it and go on."""
        if isinstance(found.exc_value, KeyboardInterrupt):
            _interrupted(found.exc_value)
        previous(found)

    sys.unraisablehook = unraisable
    try:
        main()
    except BadInput as error:
        _end(error, 2)
    except FloatingPointError as error:
        _end(error, 1)
    except subprocess.CalledProcessError as error:
        _end(f"{shlex.join(error.cmd)} ended with status {error.returncode}", 1)
    except KeyboardInterrupt as error:
        _interrupted(error)
    finally:
        sys.unraisablehook = previous


def _end(error: object, status: int) -> NoReturn:
    if os.environ.get("RANK", "0") != "0":
        time.sleep(30)  # the first process mostly says the same, and its launcher ends the others
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(status) from None


def _interrupted(error: BaseException) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):  # another thread; a reader that has gone
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout.flush()
    say(str(error) or GO_ON)
    # Now: threads and other processes of a group may never come to their ends.
    os._exit(STATUS)
