"""Documents that the `datasets` library keeps: Parquet, parsed files, and data sets of the hub.

`datasets` is imported when one of them is opened: it takes a second, and text files need none of
it.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hf_sigmoid.errors import BadInput
from hf_sigmoid.text import formats
from hf_sigmoid.text.documents import REFUSE, REPLACE, Reading, check_parquet, documents
from hf_sigmoid.training import text_files
from hf_sigmoid.training.arrow_rows import Rows, Shards, first_line

_COLUMNS = ".parquet"
_PARSED = 1  # the next number where `documents` reads another text of a file: what is cached is old


def parquet(files: list[Path], reading: Reading) -> Rows:
    """The column of Parquet files, put into the Arrow files of datasets' cache once.

    Raises:
        BadInput: for a file that is not Parquet, or without text in that column.
    """
    _import(reading, "Parquet files")
    ends = np.cumsum([check_parquet(file, reading) for file in files]).tolist()
    loaded = _load(
        reading, "Parquet files", "parquet", data_files=_names(files), columns=[reading.field]
    )

    def place(row: int) -> tuple[str, int]:
        part = bisect_right(ends, row)
        return str(files[part]), 1 + row - (ends[part - 1] if part else 0)

    return Rows(loaded, reading, place)


def parsed(files: list[Path], reading: Reading) -> Rows:
    """The documents of files that are read as a whole, put into datasets' cache once.

    Raises:
        BadInput: for a file that cannot be read, with the line.
    """
    datasets = _import(reading, files[0].name)
    known = [(str(file.absolute()), *_version(file)) for file in files]
    asked = [_PARSED, known, reading.field, reading.bad_text]
    try:
        rows = datasets.Dataset.from_generator(
            _documents,
            features=datasets.Features({reading.field: datasets.Value("large_string")}),
            gen_kwargs={"files": tuple(files), "reading": reading},
            fingerprint=hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32],
        )
    except Exception as error:  # whatever datasets and a disk without room can raise
        cause = error.__cause__ or error
        if isinstance(cause, BadInput):
            raise cause from None
        raise reading.error(f"cannot keep {files[0].name}: {first_line(cause)}") from error
    return Rows(rows, reading, lambda row: ("what is cached of the files", row + 1))


def streamed_files(files: list[Path], reading: Reading) -> Shards:
    """Files of one kind as a stream of shards, a file each, without a copy on disk."""
    kinds = {formats.format_of(file) for file in files}
    if kinds not in ({text_files.LINES}, {_COLUMNS}):
        found = sorted({"".join(file.suffixes[-1:]) or file.name for file in files})
        raise reading.error(
            f"expected only {text_files.LINES} or only {_COLUMNS} files to stream "
            f"({reading.prefix}streaming), got {', '.join(found) or 'no file'}"
        )
    datasets = _import(reading, "a stream of files")
    if kinds == {_COLUMNS}:
        for file in files:
            check_parquet(file, reading)
        loaded = _load(reading, "the files", "parquet", data_files=_names(files), streaming=True)
    else:
        loaded = datasets.IterableDataset.from_generator(
            _documents,
            features=datasets.Features({reading.field: datasets.Value("large_string")}),
            # As datasets reads a null; a run that began so goes on.
            gen_kwargs={"files": files, "reading": replace(reading, null_is_blank=True)},
        )
    return _shards(loaded, reading)


def named(
    name: str,
    subset: str | None,
    split: str,
    revision: str | None,
    reading: Reading,
    *,
    streaming: bool,
) -> Rows | Shards:
    """A data set of the hub, or of a local folder (files, or what `save_to_disk` left).

    Raises:
        BadInput: for a data set, subset, split or field that is not there, or that cannot be read.
    """
    key, prefix = reading.key, reading.prefix
    folder = Path(name)
    if not folder.exists() and (folder.is_absolute() or name[:1] in (".", "~")):
        raise BadInput(f"{key}: no such folder: {name}")
    if folder.is_file():
        raise BadInput(f"{key}: expected a folder or a name of the hub, got the file {name}; "
                       f"a file is given as {prefix}path")  # fmt: skip
    if folder.is_dir() and revision is not None:
        raise BadInput(f"{prefix}revision: expected null for the folder {name}, got {revision!r}")
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        if subset is not None:
            raise BadInput(
                f"{prefix}subset: expected null for {name}, which save_to_disk left, got {subset!r}"
            )
        if streaming:
            raise BadInput(
                f"{prefix}streaming: expected false for {name}, which save_to_disk left: its "
                "files are not read into memory"
            )
        return _rows(_saved(folder, split, reading), reading, name)
    files = [*folder.rglob("[!.]*")] if folder.is_dir() else []
    kinds = {formats.format_of(file) for file in files}
    if ".txt" in kinds and not kinds & {*formats.ROWS} and not list(folder.rglob("*.arrow")):
        # datasets would make a document of every line.
        raise BadInput(
            f"{key}: expected Parquet or JSON in {name}, got .txt files; a folder of texts is "
            f"given as {prefix}path"
        )
    if not streaming:  # a stream is not read twice
        _refuse_bad_json(files, reading)
    with _named_line(files, reading):
        loaded = _load(
            reading, name, name, subset, split=split, revision=revision, streaming=streaming
        )
        return _shards(loaded, reading) if streaming else _rows(loaded, reading, name)


def _documents(files: Sequence[Path], reading: Reading) -> Iterator[dict[str, str]]:
    """A row for each document; datasets keeps nothing that has none."""
    rows = (document for file in files for document in documents(file, reading))
    first = next(rows, "")
    yield from ({reading.field: document} for document in itertools.chain([first], rows))


def _version(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _rows(loaded: Any, reading: Reading, name: str) -> Rows:
    _check_field(loaded.features, reading)
    return Rows(loaded, reading, lambda row: (name, row + 1))


def _shards(loaded: Any, reading: Reading) -> Shards:
    """A stream whose first row has text."""
    try:
        first = next(iter(loaded.with_format("arrow")), None)
    except BadInput:
        raise
    except Exception as error:
        raise reading.error(f"cannot read its first row: {first_line(error)}") from error
    if first is None:
        raise reading.error("no text in it, expected at least one row")
    if loaded.features:
        _check_field(loaded.features, reading)
    elif reading.field not in first.column_names:
        raise reading.error(
            f"no field {reading.field!r} ({reading.prefix}field); its fields are "
            f"{_list(first.column_names)}"
        )
    return Shards(loaded, reading)


def _load(
    reading: Reading, what: str, *arguments: Any, split: str = "train", **options: Any
) -> Any:
    """`datasets.load_dataset`, whose errors become one line."""
    datasets = _import(reading, what)
    try:
        return datasets.load_dataset(*arguments, split=split, **options)
    except Exception as error:  # whatever datasets, its file formats and the network can raise
        cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" else None
        raise reading.error(f"cannot read {what}: {first_line(cause or error)}") from error


def _import(reading: Reading, what: str) -> Any:
    """The package `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise reading.error(
            f"reading {what} needs the package {error.name}: pip install 'hf-sigmoid[recipes]'"
        ) from None
    return datasets


def _saved(folder: Path, split: str, reading: Reading) -> Any:
    """What `save_to_disk` left: the split of a folder of splits, or the only one."""
    datasets = _import(reading, str(folder))
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise reading.error(f"cannot read {folder}: {first_line(error)}") from error
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise BadInput(f"{reading.prefix}split: {folder} has no split {split!r}; its splits are "
                       f"{_list(loaded)}")  # fmt: skip
    return loaded[split]


def _refuse_bad_json(files: list[Path], reading: Reading) -> None:
    """Half surrogate pairs in JSON, which datasets drops without a word."""
    strict = dataclasses.replace(reading, bad_text=REFUSE, null_is_blank=True, prefix=None)
    for file in files:
        if file.is_file() and formats.format_of(file) in (text_files.LINES, ".json"):
            try:
                for _ in documents(file, strict):
                    pass
            except BadInput as error:
                if "surrogate" in str(error):
                    raise BadInput(
                        f"{error}; expected its files as {reading.prefix}path, which mends bad text"
                    ) from None


@contextlib.contextmanager
def _named_line(files: list[Path], reading: Reading) -> Iterator[None]:
    """Say which line of `.jsonl` files is broken, where datasets only says that one is."""
    try:
        yield
    except BadInput as error:
        lines = [f for f in files if formats.format_of(f) == text_files.LINES and f.is_file()]
        for _ in itertools.chain.from_iterable(documents(file, reading) for file in lines):
            pass
        if lines and reading.bad_text == REPLACE:
            path = f"{reading.prefix}path"
            raise BadInput(
                f"{error}; expected its files as {path}, which mends bad text"
            ) from error
        raise


def _check_field(features: Any, reading: Reading) -> None:
    field, chosen = reading.field, f"({reading.prefix}field)"
    if field not in features:
        raise reading.error(f"no field {field!r} {chosen}; its fields are {_list(features)}")
    kind = getattr(features[field], "dtype", type(features[field]).__name__)
    if kind not in ("string", "large_string"):
        raise reading.error(f"{field!r} is not text but {kind} {chosen}")


def _names(files: list[Path]) -> list[str]:
    return [str(file) for file in files]


def _list(names: Any) -> str:
    return ", ".join(sorted(names))
