"""The folder of an evaluation: samples.jsonl, a line for each scored sample, and run.json.

Lines are appended and synced: no stop loses or repeats one. Each process of several appends to a
file of its own, `.samples-RANK.jsonl`. When all have ended, or when the next run begins, those are
merged: samples.jsonl is written anew in the order of the grid, under another name first. One
process appends to it directly, in that order already.

run.json says what the samples were asked of, and what the models' checks found.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from hf_sigmoid import files
from hf_sigmoid.errors import BadInput
from hf_sigmoid.run_lock import RunLock

SAMPLES, RUN, SUMMARY = "samples.jsonl", "run.json", "summary.json"
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


def check_folder(folder: Path) -> None:
    """Refuse an --out that cannot be written, or that holds others' files.

    Raises:
        BadInput: there is something in it, and no evaluation or report of ours.
    """
    files.check_folder(folder, "--out")
    held = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    if read(folder) is None:
        read(folder, SUMMARY)  # of `eval report`
    # What a run may leave that was killed before it had written anything else.
    begun = {
        RunLock.FILE,
        *(file.name for kind in (PARTS, f".*{RUN}") for file in folder.glob(kind)),
    }
    if held - begun and not held & {RUN, SUMMARY, SAMPLES}:
        raise BadInput(
            f"--out {folder} is not empty and holds no evaluation: expected a new or empty folder, "
            "or one that an evaluation has written"
        )


def read(folder: Path, name: str = RUN) -> dict[str, Any] | None:
    """The content of run.json; None of a folder without one.

    Raises:
        BadInput: a file that is not ours.
    """
    file = folder / name
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(held["config"], str) and all(each["name"] for each in held["models"]):
            return held
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise BadInput(f"{file}: expected what an evaluation writes there: choose another folder")


class Store:
    """The samples of one folder, by (model, sample).

    Args:
        folder: need not exist; it is made for the first sample.
        about: the evaluation: its `config`, of everything that a sample's score depends on but the
            model and the grid, and whatever else run.json is to say.
        weights: by model's name, of the models that are asked for.

    Raises:
        BadInput: lines that are not ours, of another configuration, or of weights as they were.
    """

    def __init__(self, folder: Path, about: dict[str, Any], weights: dict[str, str | None]):
        self.folder, self.about, self.config = folder, about, about["config"]
        self.done: dict[Key, dict[str, Any]] = {}
        self._stream: BinaryIO | None = None
        self._whole = self._load(folder / SAMPLES, weights)
        parts = sorted(folder.glob(PARTS))
        for part in parts:
            self._load(part, weights)
        self.has_parts = bool(parts)

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
            if sample["config"] != self.config:
                raise BadInput(
                    f"--out {self.folder} holds samples of another seed, haystack, prompt, score "
                    "or dtype: choose another folder"
                )
            if sample["weights"] != weights.get(sample["name"], sample["weights"]):
                raise BadInput(
                    f"--out {self.folder} holds samples of {sample['name']} as it was before its "
                    "files changed: choose another folder"
                )
            self.done.setdefault(_key(sample), sample)
        return len(content) - len(rest)

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
            name = SAMPLES if part is None else PARTS.replace("*", str(part))
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
        content = b"".join(_line(self.done[key]) for key in keys)
        files.write_file(self.folder / SAMPLES, lambda file: file.write_bytes(content))
        for part in self.folder.glob(PARTS):
            part.unlink()
        self._whole, self.has_parts = len(content), False

    def note(self, model: dict[str, Any]) -> None:
        """Write a model into run.json, beside those of earlier runs that asked the same."""
        known = {each["name"]: each for each in [*self._models(), model]}
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**self.about, "models": list(known.values())}, indent=1) + "\n"
        files.write_text(self.folder / RUN, text)

    def noted(self, model: Any) -> dict[str, Any] | None:
        """The record in run.json of a model, by `name` and `weights`, that was asked the same."""
        for each in self._models():
            if (each["name"], each["weights"]) == (model.name, model.weights):
                return each
        return None

    def _models(self) -> list[dict[str, Any]]:
        held = read(self.folder)
        return held["models"] if held and held["config"] == self.config else []


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
