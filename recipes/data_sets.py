"""Documents of data sets that the `datasets` library reads: Parquet files, and names of the hub.

`datasets` is imported when one of them is opened: it takes a second, and text files need none of
it.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import text_files
from errors import BadInput

# pandas and pyarrow raise these for files that are not what they are called; a broken connection
# is an OSError and no mistake of the corpus.
_BROKEN_FILE = (ValueError, TypeError, KeyError)


class Rows(Sequence):
    """The documents of a data set in memory-mapped Arrow files, which every process shares."""

    def __init__(self, rows: Any, field: str):
        self.rows, self.field = rows.select_columns(field), field
        if len(rows) <= text_files.ALL_READ and (blank := _blank(self.rows, field)).any():
            self.rows = self.rows.select(np.flatnonzero(~blank))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> str:
        return self.rows[index][self.field] or ""


class Shards:
    """The documents of a streamed data set, shard by shard.

    Args:
        rows: an `IterableDataset`.
        key: what an error calls the data set, "data.dataset".
    """

    def __init__(self, rows: Any, field: str, key: str):
        self.rows, self.field, self.key = rows.select_columns(field), field, key
        self.shards = rows.num_shards

    def windows(self, shard: int, first: int, rows: int) -> Iterator[list[str]]:
        """The texts of `rows` rows at a time, from row `first` on, a multiple of `rows`.

        Raises:
            BadInput: for a shard that cannot be read as far as that.
        """
        batches = self.rows.shard(self.shards, shard).iter(batch_size=rows)
        try:
            for batch in itertools.islice(batches, first // rows, None):
                yield [self._text(text, shard) for text in batch[self.field]]
        except _BROKEN_FILE as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(
                f"{self.key}: cannot read shard {shard}: {_first_line(error)}"
            ) from error

    def _text(self, value: Any, shard: int) -> str:
        if value is not None and not isinstance(value, str):
            raise BadInput(
                f"{self.key}: shard {shard}: {self.field!r} is not text but {type(value).__name__}"
            )
        return value or ""


def parquet(files: list[Path], field: str, key: str, field_key: str) -> Rows:
    """The column `field` of Parquet files, put into the Arrow files of datasets' cache once.

    Raises:
        BadInput: for a file that is not Parquet, or without text in that column.
    """
    _import(key, "Parquet files")
    for file in files:
        _check_parquet(file, field, key, field_key)
    loaded = _load(key, "Parquet files", "parquet", data_files=_names(files), columns=[field])
    return Rows(loaded, field)


def streamed_files(files: list[Path], field: str, key: str, field_key: str) -> Shards:
    """Files of one kind as a stream of shards, a file each, without a copy on disk."""
    builders = {text_files.LINES: "json", text_files.COLUMNS: "parquet"}
    kinds = sorted({file.suffix for file in files})
    if len(kinds) != 1 or kinds[0] not in builders:
        raise BadInput(
            f"{key}: expected only .jsonl or only .parquet files to stream "
            f"({key.rpartition('.')[0]}.streaming), got {', '.join(kinds) or 'no file'}"
        )
    _import(key, "a stream of files")
    for file in files if kinds[0] == text_files.COLUMNS else []:
        _check_parquet(file, field, key, field_key)
    with _named_line(files, field, key, field_key):
        return _shards(
            _load(key, "the files", builders[kinds[0]], data_files=_names(files), streaming=True),
            field,
            key,
            field_key,
        )


def named(
    name: str,
    subset: str | None,
    split: str,
    revision: str | None,
    field: str,
    *,
    streaming: bool,
    prefix: str,
) -> Rows | Shards:
    """A data set of the hub, or of a local folder (files, or what `save_to_disk` left).

    Args:
        prefix: of the keys in an error, "data.".

    Raises:
        BadInput: for a data set, subset, split or field that is not there, or that cannot be read.
    """
    key, field_key = f"{prefix}dataset", f"{prefix}field"
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
        return _rows(_saved(folder, split, prefix), field, key, field_key)
    suffixes = {file.suffix for file in folder.rglob("*")} if folder.is_dir() else set()
    if ".txt" in suffixes and not suffixes & {*text_files.KINDS[1:], ".json", ".csv", ".arrow"}:
        # datasets would make a document of every line.
        raise BadInput(
            f"{key}: expected Parquet or JSON in {name}, got .txt files; a folder of texts is "
            f"given as {prefix}path"
        )
    files = sorted(folder.rglob(f"*{text_files.LINES}")) if folder.is_dir() else []
    with _named_line(files, field, key, field_key):
        loaded = _load(key, name, name, subset, split=split, revision=revision, streaming=streaming)
        make = _shards if streaming else _rows
        return make(loaded, field, key, field_key)


def _rows(loaded: Any, field: str, key: str, field_key: str) -> Rows:
    _check_field(loaded.features, field, key, field_key)
    return Rows(loaded, field)


def _shards(loaded: Any, field: str, key: str, field_key: str) -> Shards:
    """A stream whose first row has text."""
    try:
        first = next(iter(loaded), None)
    except Exception as error:
        raise BadInput(f"{key}: cannot read its first row: {_first_line(error)}") from error
    if first is None:
        raise BadInput(f"{key}: no text in it, expected at least one row")
    if loaded.features:
        _check_field(loaded.features, field, key, field_key)
    elif field not in first:
        raise BadInput(f"{key}: no field {field!r} ({field_key}); its fields are {_list(first)}")
    return Shards(loaded, field, key)


def _load(key: str, what: str, *arguments: Any, split: str = "train", **options: Any) -> Any:
    """`datasets.load_dataset`, whose errors become one line."""
    datasets = _import(key, what)
    try:
        return datasets.load_dataset(*arguments, split=split, **options)
    except Exception as error:  # whatever datasets, its file formats and the network can raise
        cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" else None
        raise BadInput(f"{key}: cannot read {what}: {_first_line(cause or error)}") from error


def _import(key: str, what: str) -> Any:
    """The package `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise BadInput(
            f"{key}: reading {what} needs the package {error.name}: "
            "pip install 'hf-sigmoid[recipes]'"
        ) from None
    return datasets


def _saved(folder: Path, split: str, prefix: str) -> Any:
    """What `save_to_disk` left: the split of a folder of splits, or the only one."""
    datasets = _import(f"{prefix}dataset", str(folder))
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise BadInput(f"{prefix}dataset: cannot read {folder}: {_first_line(error)}") from error
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise BadInput(f"{prefix}split: {folder} has no split {split!r}; its splits are "
                       f"{_list(loaded)}")  # fmt: skip
    return loaded[split]


@contextlib.contextmanager
def _named_line(files: list[Path], field: str, key: str, field_key: str) -> Iterator[None]:
    """Say which line of `.jsonl` files is broken, where datasets only says that one is."""
    try:
        yield
    except BadInput:
        for file in files if all(file.suffix == text_files.LINES for file in files) else []:
            text_files.TextFiles([file], field, key, field_key)
        raise


def _check_parquet(file: Path, field: str, key: str, field_key: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(file)
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{key}: {file} is not Parquet: {_first_line(error)}") from None
    if field not in schema.names:
        raise BadInput(f"{key}: {file} has no column {field!r} ({field_key}); its columns are "
                       f"{_list(schema.names)}")  # fmt: skip
    kind = schema.field(field).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise BadInput(f"{key}: {file}: {field!r} is not text but {kind}")


def _check_field(features: Any, field: str, key: str, field_key: str) -> None:
    if field not in features:
        raise BadInput(f"{key}: no field {field!r} ({field_key}); its fields are {_list(features)}")
    kind = getattr(features[field], "dtype", type(features[field]).__name__)
    if kind not in ("string", "large_string"):
        raise BadInput(f"{key}: {field!r} is not text but {kind} ({field_key})")


def _blank(rows: Any, field: str) -> np.ndarray:
    """Which rows hold nothing but white space, or null."""
    import pyarrow.compute as pc

    found = [np.empty(0, bool)]
    for table in rows.with_format("arrow").iter(batch_size=10_000):
        trimmed = pc.utf8_trim_whitespace(table.column(field))
        blank = pc.fill_null(pc.equal(pc.binary_length(trimmed), 0), True)
        found.append(blank.to_numpy(zero_copy_only=False))
    return np.concatenate(found)


def _names(files: list[Path]) -> list[str]:
    return [str(file) for file in files]


def _list(names: Any) -> str:
    return ", ".join(sorted(names))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
