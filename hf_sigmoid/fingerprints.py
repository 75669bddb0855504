"""Hashes that tell one checkpoint, tokenizer or file from another; all of them are SHA-256.

Each is written into folders, and compared with what later runs find, so none of them may change.
"""

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

AT_ONCE = 1 << 22  # bytes


def of_file(path: Path) -> str:
    """The hash of every byte of a file."""
    digest = hashlib.sha256()
    _read_into(digest, path)
    return digest.hexdigest()


def of_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """The hash of tensors in the order given: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        _bytes_into(digest, tensor)
    return digest.hexdigest()


def of_tensor(tensor: Tensor) -> str:
    """The hash of a tensor's type, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    _bytes_into(digest, tensor)
    return digest.hexdigest()


def of_tokenizer(tokenizer: Any) -> str:
    """The hash of the vocabulary, and of a text that is cut."""
    text = "The 1st of May 2024, naïve café: 北京 \t x_y = f(z);\n"
    parts = [sorted(tokenizer.get_vocab().items()), tokenizer(text)["input_ids"]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def of_folder_quickly(folder: Path) -> str:
    """The hash of a checkpoint's weights: sizes, beginnings and ends of its files.

    Every byte of a large model would take minutes.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode() + stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read())
    return digest.hexdigest()


def of_folder(folder: Path) -> str:
    """The hash of every byte of a checkpoint's configuration and weights, in 16 digits."""
    files = sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")])
    return _of_files(tuple((file, file.stat().st_mtime_ns) for file in files))


@cache
def _of_files(files: tuple[tuple[Path, int], ...]) -> str:
    """A file that was written since is read again."""
    digest = hashlib.sha256()
    for file, _ in files:
        digest.update(file.name.encode())
        _read_into(digest, file)
    return digest.hexdigest()[:16]


def _read_into(digest: Any, path: Path) -> None:
    with path.open("rb") as file:
        while chunk := file.read(AT_ONCE):
            digest.update(chunk)


def _bytes_into(digest: Any, tensor: Tensor) -> None:
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    for part in flat.split(AT_ONCE):
        digest.update(part.numpy())
