"""Getting models, tokenizers and processes ready for a recipe."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from errors import BadInput
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from hf_sigmoid.conversions.models import saved_dtype


def load(kind: Any, source: str, **options: Any) -> Any:
    """`kind.from_pretrained`, with its complaints as bad input."""
    try:
        return kind.from_pretrained(source, **options)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise BadInput(f"model {source}: {kind.__name__} cannot load it: {error}") from error


def load_model(source: str, *, dtype: torch.dtype | None = None, attn: str | None = None) -> Any:
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
    return load(AutoModelForCausalLM, source, dtype=dtype, use_safetensors=True, **options)


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
    return getattr(load(AutoConfig, source).get_text_config(), "max_position_embeddings", None)


def check_attention(source: str, attn: str | None) -> None:
    """Refuse a model or attention function that would not load, without loading weights."""
    config = load(AutoConfig, source)
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(
                config, **({"attn_implementation": attn} if attn else {})
            )
    except (ValueError, ImportError) as error:
        raise BadInput(f"model {source} with attn {attn}: {error}") from error


def data_parallel(precision: str) -> Accelerator:
    """An accelerator for one process or data parallel; refuses what it would get wrong.

    Context parallelism would give every process its own share of the keys and no error.
    """
    # One process may train twice, with another precision.
    AcceleratorState._reset_state()
    accelerator = Accelerator(mixed_precision={"fp32": "no", "bf16": "bf16"}[precision])
    served = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    parallelism = accelerator.parallelism_config
    sizes = [getattr(parallelism, f"{kind}_size", 1) for kind in ("tp", "cp", "sp", "dp_shard")]
    if accelerator.distributed_type not in served or max(sizes) > 1:
        raise BadInput(
            "this recipe runs on one process or data parallel, got accelerate's "
            f"{accelerator.distributed_type.value} with {parallelism}"
        )
    return accelerator
