"""The models of an evaluation: which weights, which attention function, how many positions."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from hf_sigmoid.conversions.embedded import checkpoint
from hf_sigmoid.conversions.rope import Change, change_rope, check_rope
from hf_sigmoid.errors import BadInput
from hf_sigmoid.loading import check_weights, load, load_model, max_positions, twin


@dataclass(frozen=True)
class Subject:
    """One model under one attention function.

    Args:
        name: what it is called, as `PATH`, `PATH@ATTN`, `PATH+yarn:4`.
        path: as it was given; `source` is what loads.
        attn: the function it runs under, None for the checkpoint's own.
        rope: a change of its RoPE for this evaluation, as `yarn:4`.
    """

    name: str
    path: str
    source: str
    attn: str | None
    rope: str | None
    weights: str | None  # a hash of config and weights; None of a hub id, taken at its word
    positions: int | None  # the model was made for, after the RoPE change
    tokenizer: Any

    @classmethod
    def find(cls, given: str, attn: str | None = None, rope: str | None = None) -> "Subject":
        """A model that can be loaded, without loading its weights.

        Args:
            given: `PATH`, or `PATH@ATTN`, which wins over `attn`.

        Raises:
            BadInput: no such model, weights that are not whole safetensors, an attention function
                or RoPE that it cannot have.
        """
        path, at, named = given.rpartition("@")
        # A folder's own name may hold an @.
        if not at or Path(given).exists():
            path, named = given, None
        attn = named or attn
        name = (f"{path}@{attn}" if attn else path) + (f"+{rope}" if rope else "")
        source = checkpoint(path)
        model = twin(source, attn)
        check_weights(source)
        positions = max_positions(source)
        if rope:
            positions = _rope(model, rope).positions(model.config)
        tokenizer = load(AutoTokenizer, source)
        return cls(name, path, source, attn, rope, _digest(source), positions, tokenizer)

    def load(self, dtype: torch.dtype, device: str) -> Any:
        """The model, ready to be asked."""
        model = load_model(self.source, dtype=dtype, attn=self.attn)
        if self.rope:
            change_rope(model, self.rope)
        return model.to(device).eval()


def _rope(model: Any, rope: str) -> Change:
    try:
        return check_rope(model, rope, "ssmax")
    except ValueError as error:
        raise BadInput(str(error)) from None


def _digest(source: str) -> str | None:
    """Of every byte of a folder's configuration and weights."""
    folder = Path(source)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:16]
