"""A checkpoint as the class that its config names, and the part of it that is converted.

A composite model (a language model with image or sound towers) is converted one part at a time, by
the name of the part's config: `text_config`, `decoder`, `thinker_config.text_config`.
"""

import functools
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.models.auto import modeling_auto
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from transformers.utils.hub import cached_file

from hf_sigmoid import checkpoint_files, compat, parameters
from hf_sigmoid.files import existing_parent

# Where a config without `architectures` looks its class up, in this order.
MAPPINGS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MASKED_LM", "")
LARGEST_SHARD_BYTES = 5 * 10**9  # of an offloaded model: each shard is written from memory
UNUSED = "_hf_sigmoid_unused"  # of a model: names of weights in its files that it has no place for
ROOM_TO_RUN = 1.5  # times a model's weights
PLACEMENTS = ("auto", "balanced", "balanced_low_0", "sequential")  # device maps that name no device


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that a checkpoint was saved as, so that none of its weights is lost."""
    for name in config.architectures or []:
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
            return cls
    for task in MAPPINGS:
        mapping = getattr(modeling_auto, f"MODEL_{f'FOR_{task}_' if task else ''}MAPPING")
        if type(config) in mapping:
            cls = mapping[type(config)]
            return cls[0] if isinstance(cls, tuple) else cls
    raise ValueError(f"transformers has no model of type {config.model_type!r}")


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without weights, on the meta device."""
    with torch.device("meta"):
        return model_class(config)._from_config(config)


def load(
    path: str,
    *,
    device_map: str | dict | None = None,
    max_memory: dict | None = None,
    offload_near: Path | None = None,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """The model, from safetensors only, in the dtype that it was saved in.

    Of files that mix dtypes, in its config's; `save` gives what was rounded back as it was.

    Args:
        device_map, max_memory: as `from_pretrained`: where the weights are kept; what fits into no
            memory stays on the disk. None: on a GPU that holds them with room to run, else the CPU.
        dtype: another one to hold the weights in.
        offload_near: a folder on whose disk weights are written that cannot stay in their file.

    Raises:
        ValueError: a device that is not there, a file that cannot be read, or weights that the
            checkpoint lacks.
    """
    if isinstance(device_map, str) and device_map not in PLACEMENTS:
        try:
            torch.empty(0, device=device_map)
        except (RuntimeError, AssertionError) as error:
            why = str(error).strip().splitlines()[0]
            raise ValueError(f"device_map {device_map} cannot be used here: {why}") from error
    config = transformers.AutoConfig.from_pretrained(path)
    options: dict = {"use_safetensors": True, "output_loading_info": True}
    offloaded = None
    if device_map is not None:
        offloaded = tempfile.TemporaryDirectory(prefix=".offloaded.", dir=offload_near)
        options |= {"device_map": device_map, "max_memory": max_memory}
        options["offload_folder"] = offloaded.name
    try:
        options["dtype"] = dtype or _dtype(path, config)
        model, info = model_class(config).from_pretrained(path, **options)
    except SafetensorError as error:
        raise ValueError(f"{path}: a safetensors file cannot be read: {error}") from error
    compat.check_not_all_on_disk(model)
    if device_map is None and (device := _gpu_that_holds(model)) is not None:
        model.to(device)
    if offloaded is not None and any(Path(offloaded.name).iterdir()):
        weakref.finalize(model, offloaded.cleanup)
    elif offloaded is not None:
        offloaded.cleanup()  # what stays on the disk stays in the checkpoint's own files
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{path} lacks {len(missing)} weights of {type(model).__name__}, which would be random "
            f"numbers: {', '.join(missing[:3])}"
        )
    # Neither written by transformers nor asked for by it: `save` carries them over.
    model.__dict__[UNUSED] = [
        name for name in info["unexpected_keys"] if f".{parameters.HOLDER}." not in name
    ] + sorted(getattr(model, "all_tied_weights_keys", None) or {})
    return model.eval()


def _gpu_that_holds(model: PreTrainedModel) -> torch.device | None:
    """The first CUDA device with the room that weights and a pass over some windows take."""
    needed = ROOM_TO_RUN * sum(tensor.nbytes for tensor in model.state_dict().values())
    for index in range(torch.cuda.device_count()):
        if torch.cuda.mem_get_info(index)[0] >= needed:
            return torch.device("cuda", index)
    return None


def _dtype(path: str, config: PreTrainedConfig) -> torch.dtype | str:
    """The dtype to hold a checkpoint's weights in."""
    found = checkpoint_files.dtypes_of(path)
    if len(found) == 1:
        return next(iter(found))
    # Of a weight that the model calls otherwise its file's dtype could not be given back.
    names = skeleton(config).state_dict().keys() if found else ()
    same_names = all(name in names for name in checkpoint_files.weights_of(path))
    return "auto" if same_names else widest(found)


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """One that holds all of them exactly."""
    return functools.reduce(torch.promote_types, dtypes)


def save(model: PreTrainedModel, folder: Path, source: str, **known) -> None:
    """Write a model, also one with offloaded weights, in files as large as its source's.

    What was not changed is written as it lies in the source's files; `known` as for `give_back`.
    """
    index = cached_file(
        source, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False
    )
    files = [] if index is None else Path(index).parent.glob("*.safetensors")
    limits = [max(file.stat().st_size for file in files)] if files else []
    tensors = model.state_dict()
    if any(tensor.is_meta for tensor in tensors.values()):
        limits.append(LARGEST_SHARD_BYTES)
        # Offloaded weights that were used since are no longer one object if they are tied.
        tied = [name for name in model.all_tied_weights_keys if tensors[name].is_meta]
        tensors = {name: tensor for name, tensor in tensors.items() if name not in tied}
    options = {"max_shard_size": min(limits)} if limits else {}
    model.save_pretrained(folder, state_dict=tensors, **options)
    written = checkpoint_files.weights_of(folder)
    unused = [name for name in model.__dict__.get(UNUSED, ()) if name not in written]
    checkpoint_files.give_back(folder, source, unused=unused, **known)


def check_disk(target: Path, model: PreTrainedModel) -> None:
    """Raise ValueError if a copy of the model cannot be written, before the work and not after."""
    compat.check_written_from_disk(model)
    parent = existing_parent(target)
    needed = sum(tensor.nbytes for tensor in model.state_dict().values())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ValueError(
            f"the output needs {needed / 1e9:.2f} GB, {parent} has {free / 1e9:.2f} GB"
        )


def loading_class(model: PreTrainedModel) -> str:
    """The class of transformers that a reader loads a model by."""
    known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model.config.model_type)
    name = type(model).__name__
    return "AutoModelForCausalLM" if known == name else name


def weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names and weights, sorted; those that are offloaded are read one at a time."""
    for name, tensor in sorted(model.state_dict().items()):
        yield name, load_offloaded_parameter(model, name) if tensor.is_meta else tensor.detach()


def positions(model: PreTrainedModel, part: str | None) -> int | None:
    """The number of tokens that a model can read, None if its config names no bound."""
    inner = part_of(model, part)
    names = (f"max_{stack}position_embeddings" for stack in ("", "encoder_", "decoder_"))
    bounds = [getattr(inner.config, name, None) for name in names]
    longest = min((bound for bound in bounds if isinstance(bound, int)), default=None)
    for module in inner.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            return table.num_embeddings - table.padding_idx - 1  # roberta counts from there
    return longest


# Parts


def parts(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """The configs of a composite model that have no parts themselves, by dotted name."""
    found: dict[str, PreTrainedConfig] = {}
    for name, child in parameters.sub_configs(config).items():
        inner = parts(child)
        found |= {f"{name}.{key}": value for key, value in inner.items()} or {name: child}
    return found


def find_part(config: PreTrainedConfig, part: str | None) -> tuple[str | None, PreTrainedConfig]:
    """Name and config of what is converted: the part that reads and writes text if None is given.

    Raises:
        ValueError: no such part, or none that is named by the config as its text model.
    """
    known = parts(config)
    if not known:
        if part is not None:
            raise ValueError(f"--part: {config.model_type!r} has no parts, got {part!r}")
        return None, config
    names = ", ".join(known)
    if part is None:
        text = config.get_text_config(decoder=True)
        part = next((name for name, child in known.items() if child is text), None)
        if part is None:
            raise ValueError(
                f"{config.model_type!r} has parts ({names}) and none of them is its text model: "
                "name the one to convert by --part"
            )
    elif part not in known:
        raise ValueError(f"--part must be one of {names}, got {part!r}")
    return part, known[part]


def part_of(model: PreTrainedModel, part: str | None) -> PreTrainedModel:
    """The outermost model inside this one that has the config of a part."""
    if part is None:
        return model
    config = parts(model.config)[part]
    owners = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is config]
    if not owners or any(each not in {*owners[0].modules()} for each in owners):
        raise ValueError(f"{type(model).__name__} has no single model of its part {part}")
    return owners[0]
