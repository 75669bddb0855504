"""The documents of a training run: the built-in text by chapter, or files."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errors import BadInput

from hf_sigmoid import text


def documents(path: str | list[str], field: str) -> list[str]:
    """The non-empty documents of a corpus.

    Args:
        path: "builtin" (the training chapters of the built-in text; the held-out ones are never
        read), or
            files and folders: a `.jsonl` holds a document in `field` of each line, and any other
            file is one document. A folder stands for its `.txt` and `.jsonl` files.
        field: the key of the text in a line of `.jsonl`.
    """
    if path == "builtin":
        return text.chapters(text.train())
    paths = [Path(p) for p in ([path] if isinstance(path, str) else path)]
    found = [d for p in paths for file in _files(p) for d in _read(file, field)]
    if not found:
        raise BadInput(f"data.path: no text in {', '.join(map(str, paths)) or 'an empty list'}")
    return found


def fingerprint(documents: list[str]) -> str:
    """The same for the same documents in the same order, and for no others."""
    return hashlib.sha256(json.dumps(documents).encode()).hexdigest()


def encoder(tokenizer: Any, append_eos: bool) -> Callable[[str], list[int]]:
    """Text to token ids: whatever the tokenizer puts around them, and its end-of-text token."""
    end = [tokenizer.eos_token_id] if append_eos and tokenizer.eos_token_id is not None else []

    def encode(text: str) -> list[int]:
        # verbose=False: that a document is longer than the model's positions is no news here.
        ids = tokenizer(text, verbose=False)["input_ids"]
        return ids if ids[-1:] == end else ids + end

    return encode


def check_length(documents: list[str], encode: Callable[[str], list[int]], block_size: int) -> None:
    """Refuse a corpus that does not fill one block."""
    tokens = 0
    for document in documents:
        tokens += len(encode(document))
        if tokens >= block_size:
            return
    raise BadInput(
        f"data.path: the corpus has {tokens} tokens, expected at least one block of "
        f"train.block_size = {block_size}"
    )


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl"))
    if not path.is_file():
        raise BadInput(f"data.path: no such file: {path}")
    return [path]


def _read(file: Path, field: str) -> list[str]:
    try:
        content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"data.path: {file} is not UTF-8 text: {error}") from None
    texts = _lines(file, content, field) if file.suffix == ".jsonl" else [content]
    return [each for each in texts if each.strip()]


def _lines(file: Path, content: str, field: str) -> list[str]:
    texts = []
    # Only newlines end a line of JSON: splitlines() would also cut at U+2028 inside a text.
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            texts.append(json.loads(line)[field])
        except json.JSONDecodeError as error:
            raise BadInput(f"data.path: {file} line {number} is not JSON: {error}") from None
        except (KeyError, TypeError):
            raise BadInput(
                f"data.path: {file} line {number} has no key {field!r} (data.field)"
            ) from None
        if not isinstance(texts[-1], str):
            raise BadInput(f"data.path: {file} line {number}: {field!r} is not text")
    return texts
