"""samples.jsonl: a line for each scored sample, appended and synced: no stop loses or repeats one.

Each process of several appends to a file of its own, `.samples-RANK.jsonl`. When all have ended,
or when the next run begins, those are merged: samples.jsonl is written anew in the order of the
grid, under another name first. One process appends to it directly, in that order already.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from hf_sigmoid.errors import BadInput
from hf_sigmoid.files import write_file

FILE = "samples.jsonl"
PARTS = ".samples-*.jsonl"
# What a line must hold to be one of ours.
FIELDS = {
    **dict.fromkeys(("name", "task", "key", "prompt_sha256", "config"), str),
    "weights": str | None,
    "length": int,
    "index": int,
    "depth": float | int | None,
}
START = b'{"name": "'  # of every line

Key = tuple[str, str]  # a model's name, a sample's key


class Store:
    """The samples of one folder, by (model, sample).

    Args:
        folder: need not exist; it is made for the first sample.
        config: of everything that a sample's score depends on but the model and the grid.
        weights: by model's name, of the models that are asked for.

    Raises:
        BadInput: lines that are not ours, of another configuration, or of weights as they were.
    """

    def __init__(self, folder: Path, config: str, weights: dict[str, str | None]):
        self.folder, self.config = folder, config
        self.done: dict[Key, dict[str, Any]] = {}
        self._stream: BinaryIO | None = None
        self._whole = self._load(folder / FILE, weights)
        self.has_parts = False
        for part in sorted(folder.glob(PARTS)):
            self._load(part, weights)
            self.has_parts = True

    def _load(self, file: Path, weights: dict[str, str | None]) -> int:
        """Read a file's lines; the bytes that are whole lines."""
        if file.exists() and not file.is_file():
            raise BadInput(f"--out: expected a file or nothing at {file}, got a folder")
        content = file.read_bytes() if file.exists() else b""
        # A line is whole once its newline is there. A killed run leaves at most one that is not.
        *lines, rest = content.split(b"\n")
        for number, line in enumerate([*lines, rest], 1):
            whole = number <= len(lines)
            if not whole and line[: len(START)] == START[: len(line)]:
                break
            sample = _parsed(line)
            if sample is None or not whole:
                raise BadInput(
                    f"--out: line {number} of {file} is not a sample of an evaluation, expected a "
                    f"JSON object with {', '.join(FIELDS)}, got {line[:60]!r}: mend the file or "
                    "choose another folder"
                )
            self._check(sample, weights)
            self.done.setdefault(_key(sample), sample)
        return len(content) - len(rest)

    def _check(self, sample: dict[str, Any], weights: dict[str, str | None]) -> None:
        if sample["config"] != self.config:
            raise BadInput(
                f"--out {self.folder} holds samples of another seed, haystack, prompt, score or "
                "dtype: choose another folder"
            )
        if sample["weights"] != weights.get(sample["name"], sample["weights"]):
            raise BadInput(
                f"--out {self.folder} holds samples of {sample['name']} as it was before its "
                "files changed: choose another folder"
            )

    def append(self, samples: Iterable[dict[str, Any]], *, part: int | None = None) -> int:
        """Write those that are not there yet, and have them on disk before returning.

        Args:
            part: the rank of this process, if there are several.

        Returns:
            How many those are.
        """
        new = [sample for sample in samples if _key(sample) not in self.done]
        if not new:
            return 0
        if self._stream is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            name = FILE if part is None else PARTS.replace("*", str(part))
            self._stream = (self.folder / name).open("ab")
            if part is None:
                self._stream.truncate(self._whole)  # without what a killed run did not finish
        for sample in new:
            self.done[_key(sample)] = sample
            self._stream.write(_line(sample))
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return len(new)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def merge(self, order: Sequence[Key]) -> None:
        """One file of what all processes did: others' samples first, then the grid in its order."""
        last = {key: number for number, key in enumerate(order)}
        keys = sorted(self.done, key=lambda key: last.get(key, -1))  # stable: others as they were

        def write_to(file: Path) -> None:
            with file.open("wb") as stream:
                stream.writelines(_line(self.done[key]) for key in keys)
                stream.flush()
                os.fsync(stream.fileno())

        file = write_file(self.folder / FILE, write_to)
        for part in self.folder.glob(PARTS):
            part.unlink()
        self._whole, self.has_parts = file.stat().st_size, False


def _line(sample: dict[str, Any]) -> bytes:
    return json.dumps(sample).encode() + b"\n"


def _key(sample: dict[str, Any]) -> Key:
    return sample["name"], sample["key"]


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The sample of a line, None if it holds anything else."""
    try:
        sample = json.loads(line)
    except ValueError:
        return None
    is_ours = isinstance(sample, dict) and all(
        name in sample and isinstance(sample[name], kind) for name, kind in FIELDS.items()
    )
    return sample if is_ours else None
