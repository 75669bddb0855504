"""Documents that the `datasets` library keeps: of files, and data sets of the hub or of a folder.

`datasets` is imported when one of them is opened: it takes a second, and the built-in text needs
none of it.
"""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_sigmoid.errors import BadInput
from hf_sigmoid.text import formats
from hf_sigmoid.text.documents import REFUSE, REPLACE, Reading, documents
from hf_sigmoid.training.arrow_rows import Shards, Stored, first_line

_PARSED = 2  # the next number where `documents` reads another text of a file: what is cached is old


def cached_files(files: list[Path], reading: Reading) -> Stored:
    """The documents of files, put into the Arrow files of datasets' cache once.

    Raises:
        BadInput: for a file that cannot be read, with the line or row.
    """
    versions = [(str(f.absolute()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    asked = json.dumps([_PARSED, versions, reading.field, reading.bad_text])
    fingerprint = hashlib.sha256(asked.encode()).hexdigest()[:32]
    dataset = _import(reading).Dataset
    try:
        rows = _generated(dataset, tuple(files), reading, fingerprint=fingerprint)
    except Exception as error:  # whatever datasets and a disk without room can raise
        cause = error.__cause__ or error
        if isinstance(cause, BadInput):
            raise cause from None
        raise reading.error(f"cannot keep {files[0].name}: {first_line(cause)}") from error
    return Stored(rows, reading, "what is cached of the files,")


def streamed_files(files: list[Path], reading: Reading) -> Shards:
    """Files as a stream of shards, a file each, without a copy on disk."""
    # As datasets reads a null; a run that began so goes on.
    reading = replace(reading, null_is_blank=True)
    return _shards(_generated(_import(reading).IterableDataset, files, reading), reading)


def named(
    name: str, subset: str | None, split: str, revision: str | None, reading: Reading, *,
    streaming: bool,
) -> Stored | Shards:  # fmt: skip
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
        for given, expected, why in (("subset", None, ""), ("streaming", False, ": it is no copy")):
            if (value := {"subset": subset, "streaming": streaming}[given]) != expected:
                raise BadInput(
                    f"{prefix}{given}: expected {json.dumps(expected)} for {name}, which "
                    f"save_to_disk left{why}, got {value!r}"
                )
        return _rows(_saved(folder, split, reading), reading, name)
    files = [f for f in folder.rglob("[!.]*") if f.is_file()] if folder.is_dir() else []
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
        given = {"split": split, "revision": revision, "streaming": streaming}
        loaded = _read(reading, name, _import(reading).load_dataset, name, subset, **given)
        return _shards(loaded, reading) if streaming else _rows(loaded, reading, name)


def _generated(kind: Any, files: Sequence[Path], reading: Reading, **options: Any) -> Any:
    """A dataset with a row for each document."""
    datasets = _import(reading)
    features = datasets.Features({reading.field: datasets.Value("large_string")})
    given = {"files": files, "reading": reading}
    return kind.from_generator(_documents, features=features, gen_kwargs=given, **options)


def _documents(files: Sequence[Path], reading: Reading) -> Iterator[dict[str, str]]:
    """A row for each document; datasets keeps nothing that has none."""
    rows = (document for file in files for document in documents(file, reading))
    first = next(rows, "")
    yield from ({reading.field: document} for document in itertools.chain([first], rows))


def _rows(loaded: Any, reading: Reading, name: str) -> Stored:
    _check_field(loaded.features, reading)
    return Stored(loaded, reading, name)


def _shards(loaded: Any, reading: Reading) -> Shards:
    """A stream whose first row has text."""
    first = _read(reading, "its first row", lambda: next(iter(loaded.with_format("arrow")), None))
    if first is None:
        raise reading.error("no text in it, expected at least one row")
    if loaded.features:
        _check_field(loaded.features, reading)
    else:
        _check_known(first.column_names, reading)
    return Shards(loaded, reading)


def _read(reading: Reading, what: str, function: Any, *given: Any, **options: Any) -> Any:
    """The result of a function of datasets; its errors become one line."""
    try:
        return function(*given, **options)
    except BadInput:
        raise
    except Exception as error:  # whatever datasets, its file formats and the network can raise
        cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" else None
        raise reading.error(f"cannot read {what}: {first_line(cause or error)}") from error


def _import(reading: Reading) -> Any:
    """The package `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise reading.error(
            f"reading it needs the package {error.name}: pip install 'hf-sigmoid[recipes]'"
        ) from None
    return datasets


def _saved(folder: Path, split: str, reading: Reading) -> Any:
    """The data set that `save_to_disk` left: the split of a folder of splits, or the only one."""
    loaded = _read(reading, str(folder), _import(reading).load_from_disk, str(folder))
    if not isinstance(loaded, dict):
        return loaded
    if split not in loaded:
        raise BadInput(f"{reading.prefix}split: {folder} has no split {split!r}; its splits are "
                       f"{_list(loaded)}")  # fmt: skip
    return loaded[split]


def _refuse_bad_json(files: list[Path], reading: Reading) -> None:
    """Half surrogate pairs in JSON, which datasets drops without a word."""
    strict = replace(reading, bad_text=REFUSE, null_is_blank=True, prefix=None)
    for file in files:
        if formats.format_of(file) in (".jsonl", ".json"):
            try:
                for _ in documents(file, strict):
                    pass
            except BadInput as error:
                if "surrogate" in str(error):
                    raise _mended(error, reading) from None


@contextlib.contextmanager
def _named_line(files: list[Path], reading: Reading) -> Iterator[None]:
    """Say which line of `.jsonl` files is broken, where datasets only says that one is."""
    try:
        yield
    except BadInput as error:
        lines = [file for file in files if formats.format_of(file) == ".jsonl"]
        for _ in itertools.chain.from_iterable(documents(file, reading) for file in lines):
            pass
        if lines and reading.bad_text == REPLACE:
            raise _mended(error, reading) from error
        raise


def _mended(error: BadInput, reading: Reading) -> BadInput:
    return BadInput(f"{error}; expected its files as {reading.prefix}path, which mends bad text")


def _check_field(features: Any, reading: Reading) -> None:
    _check_known(features, reading)
    feature = features[reading.field]
    kind = getattr(feature, "dtype", type(feature).__name__)
    if kind not in ("string", "large_string"):
        raise reading.error(f"{reading.field!r} is not text but {kind} ({reading.prefix}field)")


def _check_known(names: Iterable[str], reading: Reading) -> None:
    if reading.field not in names:
        chosen = f"({reading.prefix}field)"
        raise reading.error(f"no field {reading.field!r} {chosen}; its fields are {_list(names)}")


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
