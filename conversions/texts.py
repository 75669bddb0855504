"""The text of a conversion or an evaluation: files, folders, data sets, or the built-in novel.

    my_text.txt                                 a UTF-8 file; several are read one after the other
    my_texts/                                   a folder: every .txt and .md below it, by path
    dataset:NAME[:CONFIG[:SPLIT[:FIELD]]]       documents of a data set, in order, as many as needed

NAME is a data set of the hub, or a local folder or file (.jsonl, .json, .parquet, .csv). An empty
part is its default: the only CONFIG, the SPLIT train, the FIELD text.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hf_sigmoid import text

DATASET = "dataset:"
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
SUFFIXES = (".txt", ".md")  # of the files of a folder that are read
SHUFFLED = 1000  # documents that a seed shuffles among, read ahead of those that are used

BUILTIN = {
    text.train: "the built-in novel's training chapters",
    text.held_out: "the built-in novel's held-out chapters",
}

Given = str | Path | Sequence[str | Path] | None


@dataclass(frozen=True)
class Text:
    """What was read, and what a report calls it."""

    name: str
    content: str

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


def read(
    given: Given,
    builtin: Callable[[], str],
    what: str,
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    *,
    seed: int | None = None,
) -> Text:
    """The text that was asked for.

    Args:
        given: see above; None takes `builtin`.
        what: what an error calls it, "calibration" or "evaluation".
        tokens: a data set is read until its documents have so many; files and folders are read
            whole.
        seed: shuffles the documents of a data set.

    Raises:
        ValueError: no such file, folder, data set or field, nothing in it, or no package to read
            it with.
    """
    if given is None:
        return Text(BUILTIN.get(builtin, "the built-in novel"), builtin())
    sources = [given] if isinstance(given, str | Path) else list(given)
    if not sources:
        raise ValueError(f"the {what} text must be a file, a folder or a data set, got none")
    contents, names = [], []
    for source in sources:
        if isinstance(source, str) and source.startswith(DATASET):
            content = _dataset(source, what, tokenizer, tokens, seed)
            name, *rest = source.removeprefix(DATASET).split(":")
            name = _name(Path(name)) if Path(name).exists() else name
            names.append(DATASET + ":".join([name, *rest]))
        elif Path(source).is_dir():
            content = _folder(Path(source), what)
            names.append(_name(Path(source)) + "/")
        else:
            content = _file(Path(source), what)
            names.append(_name(Path(source)))
        if not content.strip():
            raise ValueError(f"the {what} text must not be empty, got {source}")
        contents.append(content)
    return Text(", ".join(names), "\n\n".join(contents))


def _name(path: Path) -> str:
    """The last part of a path, also of `.`: reports go to others, who have no use for the rest."""
    return Path(os.path.abspath(path)).name


def _folder(folder: Path, what: str) -> str:
    """Its texts, by path; hidden ones, and those without words, are left out."""
    files = [
        file
        for file in folder.rglob("*")
        if file.suffix in SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and file.is_file()
    ]
    if not files:
        raise ValueError(
            f"the {what} text must be a folder with {' or '.join(SUFFIXES)} files, got {folder}, "
            "which has none"
        )
    contents = [_file(file, what) for file in sorted(files)]
    return "\n\n".join(content for content in contents if content.strip())


def _file(path: Path, what: str) -> str:
    if not path.is_file():
        raise ValueError(
            f"the {what} text must be a file or a folder, got {path}, which does not exist"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the {what} text must be UTF-8, got {path}: {error}") from error


def _dataset(given: str, what: str, tokenizer, tokens: int, seed: int | None) -> str:
    """Documents with so many tokens together, or all that there are."""
    name, config, split, field = _parts(given)
    used, found = [], 0
    try:
        for document in _documents(name, config, split or "train", field or "text", seed):
            if document.strip():
                used.append(document)
                found += len(tokenizer(document, add_special_tokens=False, verbose=False).input_ids)
            if found >= tokens:
                break
    except ImportError as error:
        raise ValueError(
            f"the {what} text: reading {given} needs the package {error.name or 'datasets'}: "
            "pip install 'hf-sigmoid[recipes]'"
        ) from error
    except Exception as error:  # whatever datasets, its file formats and the network can raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"the {what} text: cannot read {given}: {reason[0]}") from error
    return "\n\n".join(used)


def _parts(given: str) -> list[str]:
    parts = given.removeprefix(DATASET).split(":")
    if not parts[0] or len(parts) > 4:
        raise ValueError(f"expected dataset:NAME[:CONFIG[:SPLIT[:FIELD]]], got {given!r}")
    return [*parts, "", "", ""][:4]


def _documents(name: str, config: str, split: str, field: str, seed: int | None) -> Iterator[str]:
    from datasets import load_dataset

    options = {"split": split, "streaming": True}
    if not Path(name).exists() and (name[0] in "./~" or Path(name).suffix in FORMATS):
        raise ValueError(f"there is no file or folder {name}")
    if Path(name).is_file():
        format_ = FORMATS.get(Path(name).suffix)
        if format_ is None:
            raise ValueError(f"expected a file of {', '.join(FORMATS)}, got {name}")
        rows = load_dataset(format_, data_files=name, **options)
    else:
        rows = load_dataset(name, config or None, **options)
    if seed is not None:
        rows = rows.shuffle(seed=seed, buffer_size=SHUFFLED)
    for row in rows:
        if field not in row:
            raise ValueError(f"no field {field!r}, its fields are {', '.join(sorted(row))}")
        if not isinstance(row[field], str):
            kind = type(row[field]).__name__
            raise ValueError(f"the field {field!r} must hold text, got {kind}")
        yield row[field]
