"""The text of a conversion or an evaluation: files, folders, data sets, or the built-in novel.

    my_text.txt, my_rows.csv                    files, see `formats.py`; `texts/*.txt` is a pattern
    my_texts/                                   a folder: its files of known formats, by path
    dataset:NAME[:CONFIG[:SPLIT[:FIELD]]]       documents of a data set, in order, as many as needed

Documents have an empty line between them. NAME is a data set of the hub, or a local folder or file
of rows. An empty part is its default: the only CONFIG, the SPLIT train, the FIELD text.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hf_sigmoid import text
from hf_sigmoid.errors import BadInput
from hf_sigmoid.text.documents import Reading, documents
from hf_sigmoid.text.formats import KNOWN, ROWS, Paths, find, format_of, title

DATASET = "dataset:"
SHUFFLED = 1000  # documents that a seed shuffles among, read ahead of those that are used

BUILTIN = {
    text.train: "the built-in novel's training chapters",
    text.held_out: "the built-in novel's held-out chapters",
}

Given = Paths | None


@dataclass(frozen=True)
class Text:
    """A text that was read, and its name in reports."""

    name: str
    content: str

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


def read(
    given: Given,
    builtin: Callable[[], str],
    what: str,
    tokenizer: Any,
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
            names.append(DATASET + ":".join([title(name) if Path(name).exists() else name, *rest]))
        else:
            content = joined(source, f"the {what} text")
            names.append(title(source) + "/" * Path(source).is_dir())
        if not content.strip():
            raise ValueError(f"the {what} text must not be empty, got {source}")
        contents.append(content)
    return Text(", ".join(names), "\n\n".join(contents))


def joined(source: str | Path, key: str) -> str:
    """The documents of a file, a folder or a pattern, those without words left out.

    Args:
        key: what an error calls them.

    Raises:
        BadInput: there is none, or one that cannot be read.
    """
    files = find(source, key, with_markdown=True)
    if not files:
        raise BadInput(f"{key}: expected a folder with {', '.join(KNOWN)} files, got {source}")
    found = (each for file in files for each in documents(file, Reading(key)))
    return "\n\n".join(each for each in found if each.strip())


def _dataset(given: str, what: str, tokenizer: Any, tokens: int, seed: int | None) -> str:
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
    path = Path(name)
    known = format_of(path)
    if not path.exists() and (name[0] in "./~" or known in ROWS):
        raise ValueError(f"there is no file or folder {name}")
    if path.is_file():
        if known not in ROWS:
            raise ValueError(f"expected a file of {', '.join(ROWS)}, got {name}")
        if known == ".tsv":
            options["sep"] = "\t"
        if known in (".jsonl", ".json"):
            # datasets drops half surrogate pairs without a word.
            for _ in documents(path, Reading("its documents", field)):
                pass
        builder = {".jsonl": "json", ".tsv": "csv"}.get(known, known[1:])
        rows = load_dataset(builder, data_files=name, **options)
    else:
        rows = load_dataset(name, config or None, **options)
    if seed is not None:
        rows = rows.shuffle(seed=seed, buffer_size=SHUFFLED)
    reading = Reading("its documents", field)
    for number, row in enumerate(rows, 1):
        if field not in row:
            raise ValueError(f"no field {field!r}, its fields are {', '.join(sorted(row))}")
        if not isinstance(row[field], str):
            kind = type(row[field]).__name__
            raise ValueError(f"the field {field!r} must hold text, got {kind}")
        yield reading.checked(row[field], f"row {number}")
