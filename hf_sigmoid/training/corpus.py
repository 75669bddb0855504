"""The documents of a training run: the built-in text by chapter, files, data sets, or a mixture."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_sigmoid import text
from hf_sigmoid.errors import BadInput
from hf_sigmoid.text.documents import Reading
from hf_sigmoid.text.formats import find, title
from hf_sigmoid.training import data_sets, run_keys

BUILTIN = "builtin"
SAMPLED = 10_000  # documents whose text is in the fingerprint of a larger source
SAMPLED_STREAM = 100  # and the first ones of a streamed one


@dataclass
class Documents:
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

    def __init__(self, sources: Sequence[Documents], weights: Sequence[float] = (1.0,)):
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


def open_corpus(data: run_keys.Data) -> Corpus:
    """The corpus that `data` of a run's configuration describes.

    Raises:
        BadInput: with the key, for what is not there, cannot be read, or holds no text.
    """
    if data.mixture is None:
        return Corpus([_open(data, "data.")])
    sources = [_open(each, f"data.mixture[{i}].") for i, each in enumerate(data.mixture)]
    return Corpus(sources, [each.weight for each in data.mixture])


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


def _open(given: run_keys.Source, prefix: str) -> Documents:
    """The documents of one source.

    Args:
        prefix: of its keys in an error, "data." or "data.mixture[0].".
    """
    key = f"{prefix}path" if given.dataset is None else f"{prefix}dataset"
    reading = Reading(key, given.field, given.bad_text, prefix)
    if given.dataset is not None:
        asked = (given.subset, given.split, given.revision)
        documents = data_sets.named(given.dataset, *asked, reading, streaming=given.streaming)
        folder = Path(given.dataset)
        # A folder is what lies in it, wherever it is.
        identity = asked if folder.is_dir() else (given.dataset, *asked)
        first = title(folder) if folder.is_dir() else given.dataset
        name = ":".join(filter(None, (first, given.subset, given.split)))
        source, what = Documents(documents, name, key, identity), given.dataset
    elif given.path in (None, BUILTIN):
        return Documents(text.chapters(text.train()), "the built-in text", key, ())
    else:
        names = [given.path] if isinstance(given.path, str) else given.path
        files = find(names, key)
        read = data_sets.streamed_files if given.streaming else data_sets.cached_files
        documents = read(files, reading)
        source = Documents(documents, ", ".join(map(title, names)), key, ())
        what = ", ".join(names) or "an empty list"
    if next(source.texts(), None) is None:
        raise BadInput(f"{key}: no text in {what}")
    return source


def _sha256(texts: Iterable[str]) -> str:
    """The hash of the texts as a list in JSON, of which no more than one is held."""
    digest = hashlib.sha256(b"[")
    for number, each in enumerate(texts):
        digest.update(b", " * (number > 0) + json.dumps(each).encode())
    digest.update(b"]")
    return digest.hexdigest()
