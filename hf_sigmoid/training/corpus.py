"""The documents of a training run: the built-in text by chapter, files, data sets, or a mixture."""

import contextlib
import difflib
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hf_sigmoid import text
from hf_sigmoid.errors import BadInput
from hf_sigmoid.text.documents import REFUSE, REPLACE, Reading
from hf_sigmoid.text.formats import find, format_of, title
from hf_sigmoid.training import data_sets, text_files

BUILTIN = "builtin"
SAMPLED = 10_000  # documents whose text is in the fingerprint of a larger source
SAMPLED_STREAM = 100  # and the first ones of a streamed one


@dataclass
class Given:
    """Where a run or one source of its mixture takes its documents from.

    `path`: "builtin" (the training chapters of the built-in text; the held-out ones are never
    read), or files, folders and patterns, see `hf_sigmoid/text/formats.py`.
    `dataset`: a name of the hub or a local folder, with `subset`, `split` and `revision`.
    """

    path: str | list[str] | None = None
    dataset: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    field: str = "text"
    bad_text: str = REFUSE
    streaming: bool = False


@dataclass
class Source:
    """One source: `documents` has a length and an index, or it has `shards` and `windows`."""

    documents: Any
    name: str  # without the folder that it is in: it goes into a model's card
    key: str  # what an error calls it, "data.path"
    identity: tuple[str | None, ...]  # of a streamed data set of the hub: what was asked for

    @property
    def is_streamed(self) -> bool:
        return isinstance(self.documents, data_sets.Shards)

    def texts(self) -> Iterator[str]:
        """Every text once, in no random order, blank ones left out."""
        documents: Iterable[str] = self.documents
        if self.is_streamed:
            documents = (
                document
                for shard in range(self.documents.shards)
                for window in self.documents.windows(shard, 0, SAMPLED_STREAM)
                for document in window
            )
        return (document for document in documents if document.strip())

    def fingerprint(self) -> str:
        if self.is_streamed:
            first = itertools.islice(self.texts(), SAMPLED_STREAM)
            return _sha256([*map(str, self.identity), str(self.documents.shards), *first])
        rows = len(self.documents)
        if rows <= SAMPLED:
            return _sha256(self.documents)
        sample = (self.documents[i * (rows - 1) // (SAMPLED - 1)] for i in range(SAMPLED))
        return _sha256(itertools.chain([str(rows)], sample))

    def describe(self) -> str:
        if self.is_streamed:
            return f"{self.name}: streaming, {self.documents.shards} shards"
        return f"{self.name}: {len(self.documents)} documents"


class Corpus:
    """Sources and the part of the tokens that each is to have.

    Attributes:
        sources: what a packer reads, a sequence of texts or a `data_sets.Shards` each.
        weights: positive; one source has weight 1.
        fingerprint: of the text, wherever it lies. A source of up to 10,000 documents goes in
            whole, a larger one with its number of documents and 10,000 of them, a streamed one with
            what was asked for, its number of shards and its first documents.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float] = (1.0,)):
        assert len(sources) == len(weights)
        self.parts, self.weights = list(sources), list(weights)
        self.sources = [source.documents for source in sources]
        prints = [source.fingerprint() for source in sources]
        self.fingerprint = prints[0] if len(prints) == 1 else _sha256(
            each for pair in zip(prints, map(repr, self.weights), strict=True) for each in pair
        )  # fmt: skip

    def describe(self) -> str:
        """One line a source: its name, its documents or shards, its part of the tokens."""
        total = sum(self.weights)
        return "\n".join(
            source.describe() + (f", weight {weight / total:.4g}" if len(self.parts) > 1 else "")
            for source, weight in zip(self.parts, self.weights, strict=True)
        )


def open_corpus(data: Any, *, steps_known: bool = True) -> Corpus:
    """The corpus that `data` of a run's configuration describes.

    Args:
        data: has the attributes of `Given`, and `mixture`: None or a list of dictionaries of the
            same keys and `weight`.
        steps_known: False where an epoch of the corpus is to be counted.

    Raises:
        BadInput: with the key, for what is not there, cannot be read, or holds no text.
    """
    given = Given(**{f.name: getattr(data, f.name, f.default) for f in fields(Given)})
    mixture = getattr(data, "mixture", None)
    if not steps_known and (mixture is not None or given.streaming):
        raise BadInput(
            "train.steps: expected a number of steps, got null: an epoch is known of one source "
            "that is not streamed"
        )
    if mixture is None:
        return Corpus([_open(given, "data.")])
    for f in fields(Given):
        if getattr(given, f.name) != f.default:
            raise BadInput(
                f"data.{f.name}: expected it in the sources of data.mixture, got both "
                f"data.mixture and data.{f.name} = {getattr(given, f.name)!r}"
            )
    if not isinstance(mixture, list) or not mixture:
        raise BadInput(f"data.mixture: expected a list of sources, got {mixture!r}")
    members = [_member(each, f"data.mixture[{i}]") for i, each in enumerate(mixture)]
    sources = [_open(given, f"data.mixture[{i}].") for i, (given, _) in enumerate(members)]
    return Corpus(sources, [weight for _, weight in members])


def encoder(tokenizer: Any, append_eos: bool) -> Callable[[str], list[int]]:
    """Text to token ids: whatever the tokenizer puts around them, and its end-of-text token."""
    end = [tokenizer.eos_token_id] if append_eos and tokenizer.eos_token_id is not None else []

    def encode(text: str) -> list[int]:
        # verbose=False: that a document is longer than the model's positions is no news here.
        ids = tokenizer(text, verbose=False)["input_ids"]
        return ids if ids[-1:] == end else ids + end

    return encode


def check_length(corpus: Corpus, encode: Callable[[str], list[int]], block_size: int) -> None:
    """Refuse a corpus one of whose sources does not fill one block; reads no more than that."""
    for source in corpus.parts:
        tokens = 0
        for document in source.texts():
            tokens += len(encode(document))
            if tokens >= block_size:
                break
        else:
            raise BadInput(
                f"{source.key}: the corpus has {tokens} tokens, expected at least one block of "
                f"train.block_size = {block_size}"
            )


def _member(given: Any, key: str) -> tuple[Given, float]:
    """One source of a mixture and its weight."""
    if not isinstance(given, dict):
        raise BadInput(f"{key}: expected keys and values, got {given!r}")
    known = {f.name: f.type for f in fields(Given)} | {"weight": float}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
            raise BadInput(f"{key}: unknown key {name!r}; the nearest known key is {near!r}")
    values = {name: _checked(f"{key}.{name}", given[name], known[name]) for name in given}
    weight = values.pop("weight", None)
    if weight is None or not 0 < weight < math.inf:
        raise BadInput(f"{key}.weight: expected a positive number, got {weight!r}")
    source = Given(**values)
    if source.path is None and source.dataset is None:
        raise BadInput(f"{key}: expected a path or a dataset, got neither")
    return source, weight


def _checked(key: str, value: Any, kind: Any) -> Any:
    """A value of a mixture's source, read as `run_config` reads one of the run."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and not isinstance(value, bool):
        # YAML 1.1 reads 1e-1, without a point, as text.
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value)
    elif kind is bool:
        if isinstance(value, bool):
            return value
    elif is_number:
        return str(value)  # a folder may be called 7
    elif isinstance(value, list):
        if kind == (str | list[str] | None) and all(isinstance(each, str) for each in value):
            return value
    elif isinstance(value, str) or (value is None and kind is not str):
        return value
    expected = str(getattr(kind, "__name__", kind) if isinstance(kind, type) else kind)
    raise BadInput(f"{key}: expected {expected.replace('None', 'null')}, got {value!r}")


def _open(given: Given, prefix: str) -> Source:
    """One source.

    Args:
        prefix: of its keys in an error, "data." or "data.mixture[0].".
    """
    if given.bad_text not in (REFUSE, REPLACE):
        raise BadInput(f"{prefix}bad_text: expected {REFUSE} or {REPLACE}, got {given.bad_text!r}")
    if given.dataset is not None:
        return _open_dataset(given, prefix)
    key = f"{prefix}path"
    for name, default in (("subset", None), ("split", "train"), ("revision", None)):
        if getattr(given, name) != default:
            raise BadInput(
                f"{prefix}{name}: expected it with {prefix}dataset only, "
                f"got {getattr(given, name)!r} without one"
            )
    if given.path in (None, BUILTIN):
        if given.streaming:
            raise BadInput(f"{prefix}streaming: expected false for the built-in text, got true")
        return Source(text.chapters(text.train()), "the built-in text", key, ())
    names = [given.path] if isinstance(given.path, str) else given.path
    files = find(names, key)
    reading = Reading(key, given.field, given.bad_text, prefix)
    documents = (data_sets.streamed_files if given.streaming else _read)(files, reading)
    source = Source(documents, ", ".join(map(title, names)), key, ())
    return _with_text(source, ", ".join(names) or "an empty list")


def _open_dataset(given: Given, prefix: str) -> Source:
    key = f"{prefix}dataset"
    if given.path is not None:
        raise BadInput(f"{prefix}path and {key}: expected one of them, got both")
    documents = data_sets.named(
        given.dataset,
        given.subset,
        given.split,
        given.revision,
        Reading(key, given.field, given.bad_text, prefix),
        streaming=given.streaming,
    )
    asked = (given.subset, given.split, given.revision)
    folder = Path(given.dataset)
    # A folder is what lies in it, wherever it is.
    identity = asked if folder.is_dir() else (given.dataset, *asked)
    first = title(folder) if folder.is_dir() else given.dataset
    name = ":".join(filter(None, (first, given.subset, given.split)))
    return _with_text(Source(documents, name, key, identity), given.dataset)


def _read(
    files: list[Path], reading: Reading
) -> text_files.TextFiles | data_sets.Rows | text_files.Joined:
    """The documents of files in their order; neighbours of one kind are read together."""
    parts = [read(list(group), reading) for read, group in itertools.groupby(files, _reader)]
    return parts[0] if len(parts) == 1 else text_files.Joined(parts)


def _reader(file: Path) -> Callable[[list[Path], Reading], Any]:
    if text_files.has_places(file):
        return text_files.TextFiles
    return data_sets.parquet if format_of(file) == ".parquet" else data_sets.parsed


def _with_text(source: Source, name: str) -> Source:
    if next(source.texts(), None) is None:
        raise BadInput(f"{source.key}: no text in {name}")
    return source


def _sha256(texts: Iterable[str]) -> str:
    """Of the texts as a list in JSON, of which no more than one is held."""
    digest = hashlib.sha256(b"[")
    for number, each in enumerate(texts):
        digest.update(b", " * (number > 0) + json.dumps(each).encode())
    digest.update(b"]")
    return digest.hexdigest()
