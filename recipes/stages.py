"""Commands that a script runs as its steps; what is there from an earlier run is kept."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_sigmoid.files import write_text

LAUNCHED = (
    "accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no "
)


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


class Steps:
    """Commands that write a folder each under `out`, how long each took, and what is measured.

    Args:
        measured: the names that `kept` is called with; a command that runs makes these anew.
    """

    def __init__(self, out: Path, measured: Sequence[str] = ()):
        self.out, self.file = out, out / "stages.json"
        self.measured = measured
        known = json.loads(self.file.read_text("utf-8")) if self.file.exists() else {}
        self.seconds: dict[str, float] = known.get("seconds", {})
        self.commands: dict[str, str] = known.get("commands", {})

    def run(self, name: str, *command: str) -> None:
        """Run a command that writes the folder OUT; an interrupted one adds its time."""
        folder = self.out / name
        of_run, of_evaluation = "output_dir=OUT" in command, "eval" in command
        done = folder / ("final" if of_run else "summary.json" if of_evaluation else "config.json")
        asked = shlex.join(command)
        # Folders of earlier releases were made by the same recipe under a launcher.
        known = self.commands.setdefault(name, asked).replace(LAUNCHED, "python ")
        if known != asked:
            raise SystemExit(
                f"error: {folder} was made by {known!r}, not {asked!r}: use another --out"
            )
        if done.exists():
            return
        for measured in self.measured:  # of the stages, so measured after them
            (self.out / f"{measured}.json").unlink(missing_ok=True)
        command = tuple(part.replace("OUT", str(folder)) for part in command)
        print(f"[{name}] {shlex.join(command)}", flush=True)
        start = time.perf_counter()
        try:
            run(command)
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = round(self.seconds.get(name, 0.0) + spent, 1)
            self.out.mkdir(parents=True, exist_ok=True)
            state = {"seconds": self.seconds, "commands": self.commands}
            write_text(self.file, json.dumps(state, indent=1))

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """The result of `make`, from `name.json` if it was made before."""
        file = self.out / f"{name}.json"
        if not file.exists():
            write_text(file, json.dumps(make(), indent=1))
        return json.loads(file.read_text("utf-8"))
