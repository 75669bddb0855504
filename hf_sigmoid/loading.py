"""Getting models and tokenizers ready for a recipe or an evaluation."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from hf_sigmoid.checkpoint_files import saved_dtype
from hf_sigmoid.errors import BadInput


def load(kind: Any, source: str, **options: Any) -> Any:
    """`kind.from_pretrained`, with its complaints as bad input."""
    try:
        return kind.from_pretrained(source, **options)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise BadInput(f"model {source}: {kind.__name__} cannot load it: {error}") from error


def load_model(
    source: str, *, dtype: torch.dtype | None = None, attn: str | None = None, **more: Any
) -> Any:
    """A causal language model with the attention function `attn`, or its own; None: as saved.

    From safetensors only: reading a pickle runs whatever code is in it.
    """
    check_weights(source)
    options = {"attn_implementation": attn} if attn else {}
    if dtype is None:
        try:
            dtype = saved_dtype(source) or "auto"
        except OSError as error:
            raise BadInput(f"model {source}: {error}") from error
    return load(AutoModelForCausalLM, source, dtype=dtype, use_safetensors=True, **options, **more)


def check_weights(source: str) -> None:
    """Refuse a folder without whole safetensors files, without loading them."""
    folder = Path(source)
    if not folder.is_dir():
        return  # a hub id: `load` says what is wrong with it
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = ", ".join(file.name for file in sorted(folder.glob("*.bin")))
        raise BadInput(
            f"model {source}: expected weights in .safetensors files, got "
            + (f"{pickles}: pickles are not loaded" if pickles else "none")
        )
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise BadInput(
                f"model {source}: expected whole weights, got a damaged {file.name}: {error}"
            ) from error


def max_positions(source: str) -> int | None:
    """The positions a model was made for, or None if it does not say."""
    return positions_of(load(AutoConfig, source))


def positions_of(config: Any) -> int | None:
    """The same, of its config."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def tokenizer_print(tokenizer: Any) -> str:
    """A hash of the vocabulary and of how a text is cut."""
    text = "The 1st of May 2024, naïve café: 北京 \t x_y = f(z);\n"
    parts = [sorted(tokenizer.get_vocab().items()), tokenizer(text)["input_ids"]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def weights_print(source: str) -> str:
    """A hash that tells one checkpoint from another: sizes, beginnings and ends of its files.

    Not of every byte, which would take minutes for a large model. The hub's revision, if that is
    where it is from.
    """
    folder = Path(source)
    if not folder.is_dir():
        return revision(source)
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode() + stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read())
    return digest.hexdigest()


def revision(source: str) -> str:
    """Of a hub id, what the hub calls its newest files."""
    return str(getattr(load(AutoConfig, source), "_commit_hash", None))


def from_config(config: Any, attn: str | None, device: torch.device | str) -> Any:
    """A model of this config with random weights (on "meta": with none)."""
    options = {"attn_implementation": attn} if attn else {}
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)


def twin(source: str, attn: str | None) -> Any:
    """A model without weights, on the meta device, to ask what the model would be.

    Raises:
        BadInput: a model or attention function that would not load.
    """
    config = load(AutoConfig, source)
    try:
        return from_config(config, attn, "meta")
    except (ValueError, ImportError) as error:
        raise BadInput(f"model {source} with attn {attn}: {error}") from error
