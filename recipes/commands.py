"""A command that a script runs as one of its steps."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run(command: Sequence[str]) -> None:
    """Run a program of this environment to its end.

    Raises:
        CalledProcessError: its status is not 0.
        KeyboardInterrupt: Ctrl-C, which is handed on to it; what it saves then is waited for.
    """
    program = str(Path(sys.executable).with_name(command[0]))
    environment = dict(os.environ)
    if command[0] == "python":
        # A recipe on one thread, as accelerate launches one: sums in another order give other
        # figures than those that are published.
        environment.setdefault("OMP_NUM_THREADS", "1")
    # In a session of its own it hears of Ctrl-C from here alone, and once each time.
    process = subprocess.Popen([program, *command[1:]], env=environment, start_new_session=True)
    interrupted = False
    while True:
        try:
            status = process.wait()
            break
        except KeyboardInterrupt:
            interrupted = True
            if os.name != "nt":  # a Windows console tells all of its programs
                process.send_signal(signal.SIGINT)
    if interrupted:
        raise KeyboardInterrupt
    if status:
        raise subprocess.CalledProcessError(status, [*command])
