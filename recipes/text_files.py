"""Documents in text files, read when they are asked for, so that they may exceed memory.

A `.jsonl` holds a document in one field of each line, a `.parquet` in one column of each row, and
any other file is one document. Of a line or a file only its place is kept.
"""

import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from errors import BadInput

LINES, COLUMNS = ".jsonl", ".parquet"
KINDS = (".txt", LINES, COLUMNS)  # what a folder is searched for
# Up to so much all documents are read at the start: what is not text ends the run before it begins,
# and blank ones are left out. Of more, a sample is read, and the packer passes over blanks.
ALL_READ = 1_000_000  # documents
ALL_READ_BYTES = 1 << 32
_CHUNK = 1 << 24  # bytes


def find(paths: str | list[str], key: str) -> list[Path]:
    """The files of a list of files and folders; a folder stands for its files of KINDS.

    Args:
        key: what an error calls the list, "data.path".
    """
    found = []
    for path in [Path(each) for each in ([paths] if isinstance(paths, str) else paths)]:
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if p.suffix in KINDS and p.is_file())
        elif path.is_file():
            found.append(path)
        else:
            raise BadInput(f"{key}: no such file: {path}")
    return found


class TextFiles(Sequence):
    """The documents of `.jsonl` and text files, in the order of the files.

    Args:
        key: what an error calls the files, "data.path".
        field: the key of the text in a line of `.jsonl`.
        field_key: what an error calls the field, "data.field".

    Raises:
        BadInput: from here and from reading a document, with the file and the line's number.
    """

    def __init__(self, files: list[Path], field: str, key: str, field_key: str):
        self.files, self.field, self.key, self.field_key = files, field, key, field_key
        # To open a file can take longer than to read a document of it; few files may be open.
        self._opened = lru_cache(maxsize=16)(partial(open, mode="rb"))
        spans = [self._spans(number, file) for number, file in enumerate(files)]
        # [documents, 3]: the number of the file, and the first byte and the one behind the last.
        self.spans = np.concatenate(spans) if spans else np.empty((0, 3), np.int64)
        size = int((self.spans[:, 2] - self.spans[:, 1]).sum())
        if len(self.spans) <= ALL_READ and size <= ALL_READ_BYTES:
            self.spans = self.spans[[bool(self[i].strip()) for i in range(len(self.spans))]]

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> str:
        number, start, stop = map(int, self.spans[index])
        file = self.files[number]
        content = self._bytes(file, start, stop)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            where = f"{file} line {_line(file, start)}" if file.suffix == LINES else file
            raise BadInput(f"{self.key}: {where} is not UTF-8 text: {error}") from None
        if file.suffix == LINES:
            return self._parsed(text, file, start)
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def _parsed(self, line: str, file: Path, start: int) -> str:
        """The text of a line of JSON; of a blank one, none."""
        if not line.strip():
            return ""
        try:
            text = json.loads(line)[self.field]
        except json.JSONDecodeError as error:
            where = f"{file} line {_line(file, start)}"
            raise BadInput(f"{self.key}: {where} is not JSON: {error}") from None
        except (KeyError, TypeError, IndexError):
            where = f"{file} line {_line(file, start)}"
            raise BadInput(
                f"{self.key}: {where} has no key {self.field!r} ({self.field_key})"
            ) from None
        if not isinstance(text, str):
            where = f"{file} line {_line(file, start)}"
            raise BadInput(
                f"{self.key}: {where}: {self.field!r} is not text but {type(text).__name__}"
            )
        return text

    def _spans(self, number: int, file: Path) -> np.ndarray:
        try:
            if file.suffix != LINES:
                return np.array([[number, 0, file.stat().st_size]], np.int64)
            ends = np.concatenate([*_newlines(file), [file.stat().st_size]]).astype(np.int64)
        except OSError as error:
            raise BadInput(f"{self.key}: cannot read {file}: {error.strerror}") from None
        starts = np.concatenate([[0], ends[:-1] + 1])
        spans = np.stack([np.full_like(starts, number), starts, ends], axis=1)
        return spans[ends > starts]

    def _bytes(self, file: Path, start: int, stop: int) -> bytes:
        try:
            content = os.pread(self._opened(file).fileno(), stop - start, start)
        except OSError as error:
            raise BadInput(f"{self.key}: cannot read {file}: {error.strerror}") from None
        if len(content) < stop - start:
            raise BadInput(f"{self.key}: {file} has become shorter since it was opened")
        return content


class Joined(Sequence):
    """Several sequences of documents, one after the other."""

    def __init__(self, parts: list[Sequence[str]]):
        self.parts = parts
        self.ends = np.cumsum([len(part) for part in parts]).tolist()

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int) -> str:
        part = bisect_right(self.ends, index)
        return self.parts[part][index - (self.ends[part - 1] if part else 0)]


def _newlines(file: Path) -> Iterator[np.ndarray]:
    """Where the newlines of a file are. Only they end a line of JSON: not U+2028 inside a text."""
    with open(file, "rb") as stream:
        first = 0
        while chunk := stream.read(_CHUNK):
            yield first + np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
            first += len(chunk)


def _line(file: Path, position: int) -> int:
    """The number of the line that begins at a position, the first being 1."""
    return 1 + sum(int((ends < position).sum()) for ends in _newlines(file))
