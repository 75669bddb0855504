"""The files of text that a path stands for, by their names: one grammar for whoever reads text.

    a.txt a.md                      a document each; so is a named file without a suffix
    a.jsonl a.ndjson                a document a line, in a field of its object
    a.json                          a list of objects or strings, alone or in an object; one object;
                                    or JSON lines
    a.csv a.tsv                     a document a row, in the column of that name
    a.parquet                       the same
    any of them but .parquet with .gz or .zst behind it

Capital letters are as small ones, and `a.jsonl.txt`, as some programs save it, is JSON lines.
"""

import glob
import gzip
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from hf_sigmoid.errors import BadInput

ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
KNOWN = (".txt", ".md", *ROWS)
PACKED = (".gz", ".zst")
READ = f"{', '.join(KNOWN)}, and all but .parquet with {' or '.join(PACKED)} behind it"

Paths = str | Path | Sequence[str | Path]


def format_of(file: Path) -> str | None:
    """The suffix of KNOWN that says how a file is read; "" without a suffix, None if unknown."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    packed = suffixes[-1:] if suffixes[-1:] and suffixes[-1] in PACKED else []
    suffixes = suffixes[: len(suffixes) - len(packed)]
    if suffixes[-1:] == [".txt"] and suffixes[-2:-1] and suffixes[-2] in ROWS:
        suffixes.pop()
    if not suffixes:
        return None if packed else ""
    if suffixes[-1] not in KNOWN or (packed and suffixes[-1] == ".parquet"):
        return None
    return ".jsonl" if suffixes[-1] == ".ndjson" else suffixes[-1]


def is_packed(file: Path) -> bool:
    return file.suffix.lower() in PACKED


def title(path: str | Path) -> str:
    """The last part of a path, also of `.`: reports go to others, who have no use for the rest."""
    # A name need not be UTF-8, a report is.
    return Path(os.path.abspath(path)).name.encode("utf-8", "backslashreplace").decode("utf-8")


def find(paths: Paths, key: str, *, with_markdown: bool = False) -> list[Path]:
    """The files of files, folders and patterns such as `texts/*.jsonl`, each of them once.

    A folder stands for the files of known formats below it, by path. Hidden ones and what is in
    hidden folders are left out, and so is what goes with text and is none: `.json` beside other
    formats, where programs keep notes, and `.md` beside rows, their card. A warning names them.

    Args:
        key: what an error calls the paths, "data.path".
        with_markdown: `.md` beside `.txt` is text too. A run's corpus never had it.

    Raises:
        BadInput: for what is not there, or is of no known format.
    """
    found: dict[tuple[str, str], Path] = {}
    if "" in ([paths] if isinstance(paths, str) else paths if isinstance(paths, list) else ()):
        raise BadInput(f"{key}: expected a path, got an empty one")
    for path in _named(paths):
        if path.is_dir():
            files = _below(path, key, with_markdown)
        elif path.is_file():
            files = [path]
            if format_of(path) is None:
                raise BadInput(f"{key}: cannot read {path}: expected one of {READ}")
        else:
            raise BadInput(f"{key}: no such file: {path}")
        for file in files:
            # Not where a link of the last part leads: equal parts of a corpus may be one file.
            found.setdefault((os.path.realpath(file.parent), file.name), file)
    return list(found.values())


def open_unpacked(file: Path) -> io.BufferedReader | gzip.GzipFile:
    """A file's bytes, without the compression that its name says.

    Raises:
        ImportError: pyarrow is missing, for `.zst`.
        OSError: from here and from reading.
    """
    if not is_packed(file):
        return file.open("rb")
    if file.suffix.lower() == ".gz":
        return gzip.open(file)
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))


def _named(paths: Paths) -> Iterator[Path]:
    for given in [paths] if isinstance(paths, str | Path) else paths:
        path = os.path.expanduser(given)
        matches = [] if os.path.lexists(path) else sorted(glob.glob(str(path), recursive=True))
        yield from map(Path, matches or [path])


def _below(folder: Path, key: str, with_markdown: bool) -> list[Path]:
    formats = {
        file: format_of(file)
        for file in folder.rglob("*")
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and file.is_file()
    }
    formats = {file: each for file, each in formats.items() if each}
    kinds = set(formats.values())
    if kinds - {".md", ".json"}:
        kinds -= {".json"} if with_markdown and ".txt" in kinds else {".md", ".json"}
    elif kinds == {".md", ".json"}:
        # A README is a card of the rows; other texts beside rows leave open what is meant.
        if any(file.stem.upper() != "README" for file, each in formats.items() if each == ".md"):
            raise BadInput(
                f"{key}: {folder} holds .md and .json files: name those that are the text"
            )
        kinds = {".json"}
    left = sorted(file.name for file, each in formats.items() if each not in kinds)
    if left:
        names = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        warnings.warn(
            f"{key}: {folder} is read without {names}; name them to read them", stacklevel=2
        )
    return sorted(file for file, each in formats.items() if each in kinds)
