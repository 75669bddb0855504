"""`log.jsonl`: exactly one line for every step, however often the run was stopped."""

import json
import os
from pathlib import Path
from typing import Any

from checkpointing import write_text


class RunLog:
    """Appends a line a step to `file`, whose lines beyond step `after` are dropped on opening.

    A killed run may have logged steps that its last checkpoint does not hold, and they are taken
    again.
    """

    def __init__(self, file: Path, *, after: int):
        self.kept = kept = _read(file)[:after]
        if [line["step"] for line in kept] != list(range(1, after + 1)):
            raise RuntimeError(f"{file} does not hold the steps 1 to {after} of its checkpoint")
        write_text(file, "".join(json.dumps(line) + "\n" for line in kept))
        self._stream = file.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        self._stream.write(json.dumps(values) + "\n")
        self._stream.flush()

    def sync(self) -> None:
        """Put the lines on disk, before the checkpoint that relies on them."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()


def _read(file: Path) -> list[dict[str, Any]]:
    """The lines up to the first that a killed process did not finish."""
    lines: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8").split("\n") if file.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines
