"""The one line that a recipe ends with when its input cannot be used, or a run cannot go on."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable

from hf_sigmoid.errors import BadInput
from hf_sigmoid.terminal import show_anything
from hf_sigmoid.training import stop_signal


def run(main: Callable[[], object]) -> None:
    """Run a script's `main`; what it can explain ends it with one line, not with a traceback.

    Status 2 for bad input, 1 for a run that diverged or a command of it that failed. Ctrl-C:
    stop_signal.py.
    """
    show_anything()
    stop_signal.loaded()
    try:
        main()
    except BadInput as error:
        _end(error, 2)
    except FloatingPointError as error:
        _end(error, 1)
    except subprocess.CalledProcessError as error:
        _end(f"{shlex.join(error.cmd)} ended with status {error.returncode}", 1)


def _end(error: object, status: int) -> None:
    if os.environ.get("RANK", "0") != "0":
        time.sleep(30)  # the first process mostly says the same, and its launcher ends the others
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(status) from None
