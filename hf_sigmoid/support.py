"""Models that cannot run, refused by name before anything changes: never softmax under our name."""

import difflib
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from hf_sigmoid.parameters import (
    FUNCTIONS,
    HOLDER,
    attention_modules,
    code_names,
    holder_of,
    holders,
    layer_index,
    sub_configs,
    uses_interface,
)
from hf_sigmoid.replace_attention import give_back

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel

# Other models that change their masks get a dense form (masks.DENSE, masks.ADDITIVE).
OWN_MASKS = {
    "gemma4_assistant": "turns its attention mask around, with the config of a model that does not",
    "gemma4_unified_assistant": "turns its attention mask around, as gemma4_assistant does",
}


class Unsupported(ValueError):
    """A model, or an argument that it passes to attention, that a function cannot honour."""


# Before a model is built


def check_class(
    cls: "type[PreTrainedModel] | None", config: PreTrainedConfig, function: str
) -> None:
    """Raise `Unsupported` if a model of this class (None: unknown) and config cannot run it."""
    if cls is not None and not cls._can_set_attn_implementation():
        raise Unsupported(
            f"{cls.__name__} does not go through transformers' attention interface: "
            f"attn_implementation={function!r} would be ignored and softmax would run"
        )
    if cls is not None:
        _refuse_tables_of_classes(sys.modules[cls.__module__], function)
    refuse_scaled_twice(config, function)
    refuse_own_masks(config, function)


def check_name(cls: "type[PreTrainedModel]", request: str | None) -> None:
    """Raise ValueError, with the nearest name, for a name that is none of an attention function.

    A name with "/" is of a kernel on the hub, which transformers looks up.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if request is None or not isinstance(request, str) or request in known or "/" in request:
        return
    near = difflib.get_close_matches(request.lower(), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    if request.lower() == "softmax":
        hint = "; softmax is 'sdpa' or 'eager' here."
    raise ValueError(
        f"attn_implementation={request!r} is no attention function{hint}"
        + f" {cls.__name__} can be given {', '.join(_servable(cls, known))}"
    )


def _servable(cls: "type[PreTrainedModel]", known: Sequence[str]) -> list[str]:
    """Those of the known names that a class says it supports, ours first."""
    flags = {
        "sdpa": "_supports_sdpa",
        "flex": "_supports_flex_attn",
        "flash": "_supports_flash_attn",
    }
    return [
        *FUNCTIONS,
        *(
            name
            for name in known
            if name not in FUNCTIONS
            and all(getattr(cls, flag, True) for word, flag in flags.items() if word in name)
        ),
    ]


def check_parts(config: PreTrainedConfig, request: str | dict) -> None:
    """Raise `Unsupported` if a dict of parts gives one of our names to a part that is none."""
    if not isinstance(request, dict):
        return
    parts = sub_configs(config)
    for name, wanted in request.items():
        if name == "" or not names_ours(wanted):
            continue
        if name not in (config.sub_configs or {}):
            known = ", ".join(config.sub_configs or {}) or "none"
            raise Unsupported(
                f"attn_implementation names the part {name!r}, which {type(config).__name__} does "
                f"not have, and softmax would run; its parts: {known}"
            )
        if name in parts:
            check_parts(parts[name], wanted)


def names_ours(request: str | dict | None) -> bool:
    """Does a name, or a dict of names by part, ask for one of our functions?"""
    if isinstance(request, dict):
        return any(map(names_ours, request.values()))
    return request in FUNCTIONS


def refuse_own_masks(config: PreTrainedConfig, function: str) -> None:
    """Raise `Unsupported` where a model changes its mask in a way that needs transformers' form."""
    for prefix, what in OWN_MASKS.items():
        if getattr(config, "model_type", "").startswith(prefix):
            raise Unsupported(
                f"{config.model_type} {what}: {function} attention is not supported, use the "
                "model's own softmax"
            )


def refuse_scaled_twice(config: PreTrainedConfig, function: str) -> None:
    """Raise `Unsupported` where ssmax would scale logits that the model scales by log length."""
    if function != "ssmax":
        return
    rope = getattr(config, "rope_parameters", None) or {}
    cure = None
    if getattr(config, "attn_temperature_tuning", False):  # llama4
        cure = "set config.attn_temperature_tuning to False, or"
    elif rope.get("llama_4_scaling_beta"):  # ministral3, mistral4
        cure = "set config.rope_parameters['llama_4_scaling_beta'] to 0, or"
    elif getattr(config, "log_scaling_n_floor", None):  # inkling, inkling2, inkling2_loop
        cure = "set config.log_scaling_n_floor to None, or"
    elif getattr(config, "use_logn_attn", False):  # Qwen 1, remote code
        cure = "set config.use_logn_attn to False, or"
    elif getattr(config, "model_type", "").startswith(("mistral_large4", "beam")):
        cure = "it has no switch;"
    if cure is not None:
        raise Unsupported(
            f"{config.model_type} already scales its logits by log length, and ssmax would do it "
            f"twice: {cure} use attn_implementation='sigmoid' or its own softmax"
        )


def _refuse_tables_of_classes(file, function: str) -> None:
    """Some files look their attention class up by name: our name leads to a refusal there.

    Without it they raise KeyError: 'sigmoid'. A part of the same file that is on the interface
    still runs.
    """
    for table, classes in vars(file).items():
        if table.endswith("ATTENTION_CLASSES") and isinstance(classes, dict):
            known = [name for name in classes if name not in FUNCTIONS]
            classes.setdefault(function, functools.partial(_refuse_class, table, known, function))


def _refuse_class(table: str, known: list[str], function: str, *args, **kwargs) -> NoReturn:
    raise Unsupported(
        f"{table} has attention of its own for {', '.join(known)} only, not through transformers' "
        f"interface: attn_implementation={function!r} cannot run there. Of a composite model, name "
        "the parts that can change, in a dict by the names of its sub-configs"
    )


# Once it is built


def check_model(model: "PreTrainedModel", requested: dict[int, str] | None = None) -> None:
    """Raise `Unsupported` if some part of a built model would not compute what its name says.

    Args:
        requested: what the sub-configs asked for before the model was built, by their ids: a part
            that asked for one of our functions must have it. None: every part must, that was not
            given another function by a dict.
    """
    from transformers.modeling_utils import PreTrainedModel

    function = model.config._attn_implementation
    for path, part in model.named_modules():
        if not isinstance(part, PreTrainedModel):
            continue
        name = part.config._attn_implementation
        if name in FUNCTIONS:
            check_class(type(part), part.config, name)
            _check_modules(part, name)
        elif function in FUNCTIONS and _has_softmax(part):
            wish = function if requested is None else requested.get(id(part.config), function)
            if wish in FUNCTIONS:
                raise Unsupported(
                    f"{type(model).__name__}: its part {path} ({type(part).__name__}) does not "
                    f"take attn_implementation={function!r} from it and would stay softmax. "
                    f"{_by_parts(model.config, function)}"
                )
    inner = {part.config._attn_implementation for part in models_of(model)}
    if ours := sorted(inner & set(FUNCTIONS)):
        refuse_own_masks(model.config, ours[0])
        _check_layers(model)
    if ours and len(inner) > 1 and getattr(model.config, "model_type", "") == "blt":
        raise Unsupported(
            f"blt makes the masks of all its parts: give them one function, not {inner}"
        )
    if function in FUNCTIONS and not attention_modules(model):
        raise Unsupported(
            f"{type(model).__name__} has no attention that goes through transformers' interface "
            "(a module with a `config` that looks its function up in ALL_ATTENTION_FUNCTIONS): "
            f"attn_implementation={function!r} would change nothing"
        )


def wishes(config: PreTrainedConfig) -> dict[int, str | None]:
    """The function that each sub-config names, at any depth, by its id."""
    found: dict[int, str | None] = {}
    for part in sub_configs(config).values():
        found |= {id(part): part._attn_implementation, **wishes(part)}
    return found


def uses_ours(model: "PreTrainedModel") -> bool:
    """Does any part of the model run one of our functions?"""
    return any(part.config._attn_implementation in FUNCTIONS for part in models_of(model))


def is_part(model: "PreTrainedModel") -> bool:
    """Is another model being built that this one is a part of?"""
    from transformers.modeling_utils import PreTrainedModel

    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(owner, PreTrainedModel) and owner is not model:
            return True
    return False


def refuse_sinks(module: nn.Module, path: str = "") -> NoReturn:
    where = f" ({path})" if path else ""
    raise Unsupported(
        f"sigmoid: {type(module).__name__}{where} has attention sinks, a term of a softmax's "
        "denominator; sigmoid attention has none. Use attn_implementation='ssmax', or configure() "
        "with the `layers` that have no sinks"
    )


@contextmanager
def unchanged_on_error(model: "PreTrainedModel") -> Iterator[None]:
    """A refusal leaves functions, sections and holders of a model as they were."""
    found = {id(config): config for config in configs(model)}
    names = [(config, config._attn_implementation) for config in found.values()]
    sections = {key: vars(config).get("hf_sigmoid") for key, config in found.items()}
    owned = {module: module._modules[HOLDER] for _, module in holders(model)}
    try:
        yield
    except BaseException:
        give_back(names)
        for key, config in found.items():
            if sections[key] is None:
                vars(config).pop("hf_sigmoid", None)
            else:
                config.hf_sigmoid = sections[key]
        for module in {*owned, *(module for _, module in holders(model))}:
            module._modules.pop(HOLDER, None)
            if module in owned:
                module._modules[HOLDER] = owned[module]
        raise


def check_softmax_model(
    model: "PreTrainedModel", function: str, layers: Sequence[int] | None = None
) -> None:
    """Raise `Unsupported` if a model that runs softmax now could not run `function` throughout."""
    for part in models_of(model):
        check_class(type(part), part.config, function)
        _refuse_private(part, function)
    for path, module in attention_modules(model) if function == "sigmoid" else ():
        if _has_sinks(module) and (layers is None or layer_index(path, module) in layers):
            refuse_sinks(module, path)


def _check_modules(model: "PreTrainedModel", function: str) -> None:
    """Raise `Unsupported` if modules of this model itself would stay softmax or have sinks."""
    _refuse_private(model, function)
    for path, module in attention_modules(model):
        holder = holder_of(module)
        converted = module.config._attn_implementation == function and (
            holder is None or holder.function == function
        )
        if function == "sigmoid" and converted and _has_sinks(module):
            refuse_sinks(module, path)


def _has_sinks(module: nn.Module) -> bool:
    return isinstance(getattr(module, "sinks", None), nn.Parameter)


def _refuse_private(model: "PreTrainedModel", function: str) -> None:
    private = sorted({type(module).__name__ for module in _own(model) if is_private(type(module))})
    if private:
        raise Unsupported(
            f"{type(model).__name__}: {', '.join(private)} computes softmax attention without "
            f"transformers' interface and would stay softmax beside {function!r}. "
            f"{_by_parts(model.config, function)}"
        )


def _check_layers(model: "PreTrainedModel") -> None:
    """Raise `Unsupported` if a layer that a section names has no attention to convert."""
    sections: dict[tuple, tuple[dict, set[int | None]]] = {}
    for path, module in attention_modules(model):
        if (section := getattr(module.config, "hf_sigmoid", None)) and section.get("layers"):
            # The stacks of T5 have copies of one config, and not always as many layers.
            key = type(module.config), str(section)
            there = sections.setdefault(key, (section, set()))[1]
            there.add(layer_index(path, module))
    for section, there in sections.values():
        if missing := sorted(set(section["layers"]) - there):
            raise Unsupported(
                f"{type(model).__name__}: layers {missing} have no attention to convert to "
                f"{section['function']}; layers that have: {sorted(there - {None})}"
            )


def _by_parts(config: PreTrainedConfig, function: str) -> str:
    """A sentence on a way out; empty if there is none."""
    if parts := list(sub_configs(config)):
        return (
            f"Name the parts that can change, as attn_implementation={{{parts[0]!r}: "
            f"{function!r}}}; its parts: {', '.join(parts)}"
        )
    return "As part of a composite model, leave it out of a dict of attn_implementation by part"


def models_of(model: nn.Module) -> Iterator["PreTrainedModel"]:
    from transformers.modeling_utils import PreTrainedModel

    return (part for part in model.modules() if isinstance(part, PreTrainedModel))


def configs(model: "PreTrainedModel") -> Iterator[PreTrainedConfig]:
    """Every config that a part of the model has, and their sub-configs."""
    pending = [part.config for part in models_of(model)]
    pending += [module.config for _, module in attention_modules(model)]
    while pending:
        config = pending.pop()
        yield config
        pending += sub_configs(config).values()


def _own(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that do not belong to a model inside it, pooling heads left out.

    A pooling head (siglip's, aimv2's) has one learned query over a finished sequence.
    """
    from transformers.modeling_utils import PreTrainedModel

    for child in model.children():
        if not isinstance(child, PreTrainedModel) and "Pooling" not in type(child).__name__:
            yield child
            yield from _own(child)


def _has_softmax(model: "PreTrainedModel") -> bool:
    """Does this model itself have attention, of either kind?"""
    return any(is_private(type(each)) or uses_interface(type(each)) for each in _own(model))


@functools.lru_cache(None)
def is_private(cls: type) -> bool:
    """Is it softmax attention of q·k that does not look the function up in the interface?"""
    if cls is nn.MultiheadAttention:
        return True
    if not re.search("Attention|Attn", cls.__name__) or uses_interface(cls):
        return False
    # Of learned weights, not of q·k: deformable sampling, gates; a mask head's map is an output.
    if re.search("Deformable|Gated|AttentionMap$", cls.__name__):
        return False
    return bool(SOFTMAX & code_names(cls))


SOFTMAX = {
    "softmax", "Softmax", "scaled_dot_product_attention", "multi_head_attention_forward",
    "eager_attention_forward",
}  # fmt: skip
