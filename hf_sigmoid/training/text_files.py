"""Documents in text files, read when they are asked for, so that they may exceed memory.

A line of `.jsonl` is a document, and so is a `.txt` or `.md` file. Only their places are kept.
"""

import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from hf_sigmoid.text.documents import Reading, json_line, plain, text_start
from hf_sigmoid.text.formats import format_of, is_packed

LINES = ".jsonl"
# Up to so much all documents are read at the start: what is not text ends the run before it begins,
# and blank ones are left out. Of more, a sample is read, and the packer passes over blanks.
ALL_READ = 1_000_000  # documents
ALL_READ_BYTES = 1 << 32
_CHUNK = 1 << 24  # bytes


def has_places(file: Path) -> bool:
    """Whether a document of the file is some bytes of it, which can be read alone."""
    return format_of(file) in (LINES, ".txt", ".md", "") and not is_packed(file)


class TextFiles(Sequence):
    """The documents of files that have places, in the order of the files.

    Raises:
        BadInput: from here and from reading a document, with the file and the line's number.
    """

    def __init__(self, files: list[Path], reading: Reading):
        self.files, self.reading = files, reading
        # To open a file can take longer than to read a document of it; few files may be open. A
        # process that was forked off shares a file's position with its parent: each opens its own.
        self._opened = lru_cache(maxsize=16)(
            lambda file, process: open(file, "rb", buffering=0)  # noqa: SIM115
        )
        self._position = threading.Lock()
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
        if format_of(file) == LINES:
            return json_line(content, _Line(file, start), self.reading)
        return plain(content, file, self.reading)

    def _spans(self, number: int, file: Path) -> np.ndarray:
        try:
            with open(file, "rb") as stream:
                first = text_start(stream.read(64), file, self.reading)
            size = file.stat().st_size
            if format_of(file) != LINES:
                return np.array([[number, first, size]], np.int64)
            ends = np.concatenate([*_newlines(file), [size]]).astype(np.int64)
        except OSError as error:
            raise self.reading.error(f"cannot read {file}: {error.strerror}") from None
        starts = np.concatenate([[first], ends[:-1] + 1])
        spans = np.stack([np.full_like(starts, number), starts, ends], axis=1)
        return spans[ends > starts]

    def _bytes(self, file: Path, start: int, stop: int) -> bytes:
        try:
            with self._position:
                stream = self._opened(file, os.getpid())
                stream.seek(start)
                content = stream.read(stop - start)
        except OSError as error:
            raise self.reading.error(f"cannot read {file}: {error.strerror}") from None
        if len(content) < stop - start:
            raise self.reading.error(f"{file} has become shorter since it was opened")
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


@dataclass
class _Line:
    """A line as an error calls it; it is counted for that only."""

    file: Path
    position: int  # of its first byte

    def __str__(self) -> str:
        before = sum(int((ends < self.position).sum()) for ends in _newlines(self.file))
        return f"{self.file} line {1 + before}"


def _newlines(file: Path) -> Iterator[np.ndarray]:
    """Where the newlines of a file are. Only they end a line of JSON: not U+2028 inside a text."""
    with open(file, "rb") as stream:
        first = 0
        while chunk := stream.read(_CHUNK):
            yield first + np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
            first += len(chunk)
