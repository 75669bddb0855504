"""Getting models and tokenizers ready for a command."""

import difflib
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_sigmoid import fingerprints
from hf_sigmoid.checkpoint_files import saved_dtype
from hf_sigmoid.errors import BadInput

ADAPTER = "adapter_config.json"


def check_source(name: str, names: tuple[str, ...] = (), *, what: str = "model") -> None:
    """Refuse what can be neither a checkpoint's folder nor a hub id, and say what it is instead.

    Args:
        name: as it was given.
        names: words that mean a checkpoint, offered where one is nearly spelt.
        what: the name is of, "model" or "adapter".

    Raises:
        BadInput: a folder that is not there, a file, or the folder of an adapter.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        is_adapter = (path / ADAPTER).is_file()
        if what == "adapter" and not is_adapter:
            raise BadInput(f"adapter {name}: expected the folder of a PEFT adapter, got another")
        if what == "model" and is_adapter and not (path / "config.json").is_file():
            base = json.loads((path / ADAPTER).read_text(encoding="utf-8"))
            base = base.get("base_model_name_or_path") or "BASE"
            raise BadInput(
                f"model {name} is a PEFT adapter of {base}, expected a model: write the two as one "
                f"by hf-sigmoid merge {name} OUT --base {base}"
            )
        return
    if path.exists():
        raise BadInput(f"{what} {name} is a file, expected a folder or a hub id")
    near = next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.75)), None)
    near = near or _nearest_folder(path)
    hub_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and name[0] not in ".~"
    # Of what has a folder's name here as its first part a folder is meant.
    if near or not hub_id or ("/" in name and Path(path.parts[0]).is_dir()):
        raise BadInput(
            f"{what} {name}: there is no such folder" + (f"; did you mean {near}?" if near else "")
        )


def _nearest_folder(path: Path) -> str | None:
    """An existing folder whose path differs from this one by a slip of the pen in one part."""
    missing = next(part for part in (*reversed(path.parents), path) if not part.exists())
    if not missing.parent.is_dir():
        return None
    beside = [each.name for each in missing.parent.iterdir() if each.is_dir()]
    for name in difflib.get_close_matches(missing.name, beside, cutoff=0.75):
        found = missing.parent / name / path.relative_to(missing)
        if found.is_dir():
            return str(found)
    return None


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a checkpoint.

    Raises:
        BadInput: a folder without one, or one that cannot be read.
    """
    folder = Path(source)
    known = ("tokenizer", "vocab", "spiece", "sentencepiece", "merges")
    if folder.is_dir() and not any(file.name.startswith(known) for file in folder.iterdir()):
        raise BadInput(
            f"model {source} has no tokenizer in its folder, expected tokenizer.json or the like: "
            "save it there, tokenizer.save_pretrained(FOLDER)"
        )
    return load(AutoTokenizer, source)


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


def fingerprint(source: str, *, quick: bool = False) -> str:
    """A hash of a checkpoint's folder; of a hub id, what the hub calls its newest files."""
    if (folder := Path(source)).is_dir():
        of = fingerprints.of_folder_quickly if quick else fingerprints.of_folder
        return of(folder)
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
