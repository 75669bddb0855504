"""`log.jsonl`: exactly one line for every step, however often the run was stopped."""

import json
import math
import os
from pathlib import Path
from typing import Any

from hf_sigmoid.errors import BadInput
from hf_sigmoid.files import write_text
from hf_sigmoid.training.checkpointing import Failed


class RunLog:
    """Appends a line a step to `file`, whose lines beyond step `after` are dropped on opening.

    A killed run may have logged steps that its last checkpoint does not hold, and they are taken
    again.
    """

    def __init__(self, file: Path, *, after: int):
        check(file, after=after)
        write_text(file, "".join(json.dumps(line) + "\n" for line in read(file)[:after]))
        self._stream = file.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Raises Failed if the disk does not take it."""
        try:
            self._stream.write(json.dumps(finite(values), allow_nan=False) + "\n")
            self._stream.flush()
        except OSError as error:
            raise Failed(f"{self._stream.name} could not be written: {error}") from error

    def sync(self) -> None:
        """Put the lines on disk, before the checkpoint that relies on them."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()


def check(file: Path, *, after: int) -> None:
    """Raises BadInput for a log that has not got every step up to `after`."""
    steps = [line.get("step") for line in read(file)[:after]]
    if steps != list(range(1, after + 1)):
        raise BadInput(
            f"{file}: expected a line of each step from 1 to {after}, which its checkpoint has "
            f"taken, got {len(steps)} lines"
        )


def finite(value: Any) -> Any:
    """Values with null for numbers that are not finite, which JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(file: Path) -> list[dict[str, Any]]:
    """The lines up to the first that a killed process did not finish."""
    lines: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8").split("\n") if file.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines
