"""Differences between the releases that we run on; each entry names the release that ends it.

All other code is written for the newest release of transformers.
"""

import warnings
from typing import Any

import transformers
from packaging.version import Version

# The lowest and the newest release that tests were run on; README says which tests.
TESTED = {"transformers": ("5.4", "5.24"), "torch": ("2.10", "2.14")}
LOWEST = "5.4"  # of transformers: before it the methods that we wrap are others

RELEASE = Version(transformers.__version__)

# The argument of a model's forward, and the field of its output, with the keys and values so far.
# Ends with 5.24, where it is "cache".
CACHE = "cache" if Version("5.24") <= RELEASE else "past_key_values"

# Continuous batching calls whatever attention function a model has. Until 5.24 it needs paged ones,
# which fill its cache themselves: any other sees the new tokens only. Ends with 5.24.
BATCHES_ANY_FUNCTION = Version("5.24") <= RELEASE

# Until 5.20 set_attn_implementation knows a part that was given its own config by the config's
# class, so it passes over copies (the stacks of T5). Ends with 5.20.
_PASSES_OVER_COPIES = Version("5.20") > RELEASE


def check_transformers() -> None:
    """Raise ImportError for a release that is too old to be wrapped."""
    if RELEASE.release[:2] < Version(LOWEST).release:
        raise ImportError(
            f"hf_sigmoid needs transformers {LOWEST} or newer, this is {RELEASE}: "
            "pip install -U transformers"
        )


def warn_of_untested() -> None:
    """Warn once for a release of transformers or torch that no test has seen."""
    import torch

    for package, (lowest, newest) in TESTED.items():
        given = RELEASE if package == "transformers" else Version(torch.__version__)
        low, new = Version(lowest), Version(newest)
        if not low.release[:2] <= given.release[:2] <= new.release[:2]:
            warnings.warn(
                f"hf_sigmoid is tested with {package} {lowest} to {newest}, this is {given}: "
                "run its tests first",
                stacklevel=5,
            )


def set_copies(model: Any, function: str) -> None:
    """Let the parts of a model that have copies of its config run the function, too. Until 5.20."""
    from transformers.modeling_utils import PreTrainedModel

    from hf_sigmoid import replace_attention

    if not _PASSES_OVER_COPIES or not model._can_set_attn_implementation():
        return
    named = [getattr(model.config, name, None) for name in model.config.sub_configs or ()]
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or type(part.config) is not type(model.config):
            continue
        if not any(part.config is each for each in (model.config, *named)):
            replace_attention.use([part.config], part.get_correct_attn_implementation(function))


def recompute_activations(model: Any, **options: Any) -> None:
    """Let the backward pass compute activations again. Ends with 5.23, which renamed the method."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)(options)


def is_croppable(cache: Any) -> bool:
    """Can a cache of dynamic layers forget its last tokens? Until 5.17 all can. Ends with 5.17."""
    return getattr(cache, "is_croppable", True)


def rope_kinds(config: Any, parameters: dict[str, Any]) -> list[str]:
    """The kinds of layers that have a RoPE each. Ends with 5.18, where it is a config's method."""
    if hasattr(config, "nested_rope_parameter_keys"):
        return config.nested_rope_parameter_keys(parameters)
    return [key for key in parameters if key in (getattr(config, "layer_types", None) or ())]


def dequantise_gguf() -> dict[str, Any]:
    """What from_pretrained needs to read a GGUF file's weights in full: nothing until 5.17.

    Raises:
        ImportError: until 5.6, whose tokenizers of GGUF files put a token before every text.
    """
    if Version("5.6") > RELEASE:
        raise ImportError(f"reading a GGUF file needs transformers 5.6 or newer, this is {RELEASE}")
    if Version("5.17") > RELEASE:
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def check_not_all_on_disk(model: Any) -> None:
    """Refuse a model of which nothing is in memory.

    Raises:
        ValueError: before 5.15, which does not take that for offloading: it would not run, or not
            be saved.
    """
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    if Version("5.15") <= RELEASE or len(places) > 1:
        return
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} was put on the disk as a whole, which needs transformers 5.15 "
            f"or newer, this is {RELEASE}: give --device-map more memory, or leave it out"
        )


def check_written_from_disk(model: Any) -> None:
    """Refuse weights on the disk that a checkpoint has by other names or in pieces, as experts.

    Raises:
        ValueError: before 5.14, whose `save_pretrained` looks for those names in the model.
    """
    if Version("5.14") <= RELEASE:
        return
    from transformers.core_model_loading import revert_weight_conversion

    far = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_meta}
    if far and not revert_weight_conversion(model, dict(far)).keys() <= far.keys():
        raise ValueError(
            f"{type(model).__name__} is written from the disk by transformers 5.14 or newer, this "
            f"is {RELEASE}: give --device-map memory for all of it, or leave it out"
        )


def lacks_division(*, fsdp: bool, tensor: int, copies: int) -> str:
    """Why this release does not divide weights so as it reads them; "" if it does. Ends with 5.23.

    FSDP2 and tensor parallelism came with 5.16, both at once with 5.18, copies of shards with 5.23.
    """
    needed = "5.23" if copies > 1 else "5.18" if fsdp and tensor > 1 else "5.16"
    if Version(needed) <= RELEASE:
        return ""
    return f"expected transformers {needed} or newer, got {RELEASE}"


def mesh_of(module: Any) -> Any:
    """The processes that share a module's weights, as torch's mesh; None: all of them are here.

    Until 5.16 tensor parallelism leaves plain tensors, and notes the mesh on their modules. Ends
    with 5.16: the parameters say it.
    """
    meshes = [getattr(each, "device_mesh", None) for each in module.parameters()]
    meshes += [getattr(each, "_hf_device_mesh", None) for each in module.modules()]
    return next((mesh for mesh in meshes if mesh is not None), None)


def check_sharded(model: Any) -> None:
    """Refuse float32 per-query terms in one group of FSDP2 with weights of another dtype.

    torch would stop at the first forward pass. Ends with 5.23, which gives them their own group.

    Raises:
        ImportError: before 5.23, with sharded weights that are not float32.
    """
    import torch

    if Version("5.23") <= RELEASE or not getattr(model, "_is_fsdp_managed_module", False):
        return
    if model.dtype != torch.float32:
        raise ImportError(
            f"FSDP2 of a model in {model.dtype} with per-query terms needs transformers 5.23 or "
            f"newer, this is {RELEASE}: load it in float32"
        )


def fsdp_groups(state: Any) -> list[Any]:
    """The groups of weights of a module under FSDP2. Ends with torch 2.13: 2.11 has one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [group for group in [state._fsdp_param_group] if group is not None]


def forget_fsdp_group(state: Any, group: Any) -> None:
    """Take a group away from a module under FSDP2. Ends with torch 2.13, as `fsdp_groups`."""
    if hasattr(state, "_fsdp_param_groups"):
        state._fsdp_param_groups.remove(group)
    else:
        state._fsdp_param_group = None


def all_gather(whole: Any, part: Any, group: Any = None) -> None:
    """Every process's part into `whole`. Ends with torch 2.13, which renamed the collective."""
    from torch import distributed

    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(whole, part, group=group)


def reduce_scatter(part: Any, whole: Any, group: Any = None) -> None:
    """This process's part of the sum of `whole`. Ends with torch 2.13, as `all_gather`."""
    from torch import distributed

    scatter = getattr(distributed, "reduce_scatter_single", None)
    (scatter or distributed.reduce_scatter_tensor)(part, whole, group=group)
