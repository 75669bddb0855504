"""The config's section and `configure`: which function a model uses, where, and with what numbers.

`config.hf_sigmoid` is written by `save_pretrained` and read back:

    {"version": 1, "function": "ssmax", "offset": 1.0, "slope": 0.0,
     "parameters": ["offset", "slope"], "learn": true, "layers": null}

and "anchor": L if the per-query term starts to grow at L keys only.
"""

import difflib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig

from hf_sigmoid.layer_types import layer_count
from hf_sigmoid.parameters import (
    FUNCTIONS,
    HOLDER,
    attach,
    attention_modules,
    config_heads,
    detach,
    head_count,
    holder_of,
    holders,
    sub_configs,
)
from hf_sigmoid.support import check_class, unchanged_on_error

if TYPE_CHECKING:  # at run time it would register the plugin, which needs this module complete
    from transformers.modeling_utils import PreTrainedModel

# What a config that says nothing computes: sigmoid keeps the total weight of a row about constant
# (b = −log n, Ramapuram et al. 2024, section 3), ssmax is plain softmax, ready to learn.
DEFAULTS = {
    "sigmoid": {"offset": 0.0, "slope": -1.0, "parameters": [], "learn": False},
    "ssmax": {"offset": 1.0, "slope": 0.0, "parameters": ["offset", "slope"], "learn": True},
}


class Section(dict):
    """`config.hf_sigmoid` as made by this process; one read from a config.json is a plain dict.

    The difference: a checkpoint whose config.json has the section must have the parameters too.
    """


class DefaultSection(Section):
    """A section that nobody configured: the model was only given the name of a function."""


def configure(
    model_or_config: "PreTrainedModel | PreTrainedConfig",
    function: str,
    *,
    offset: float | Sequence[float] | Tensor | None = None,
    slope: float | Sequence[float] | Tensor | str | None = None,
    query: bool = False,
    hidden: bool = False,
    learn: bool = False,
    layers: Sequence[int] | None = None,
    anchor: int | None = None,
) -> None:
    """Choose a model's function, row_m = offset_h + slope_h·log n_m (+ w_h·q_m + u_h·x_m).

    Sets `config.hf_sigmoid`; on a model also adds or removes the `log_length` holders and switches
    the attention implementation. A composite model is configured through its parts:
    `configure(model.model.language_model, …)` or `configure(config.text_config, …)`.

    Args:
        function: "sigmoid", "ssmax", or "softmax" to take everything back out.
        offset: β, a float or `[H]`; None takes the default (0 for sigmoid, 1 for ssmax).
        slope: γ, a float or `[H]`; None takes the default (−1 for sigmoid, 0 for ssmax). "paper" is
            1 / mean of log n over n = 1 … max_position_embeddings, for ssmax from scratch.
        query: also hold w `[H, D]`, starting at 0.
        hidden: also hold u `[H, hidden size]`, starting at 0, for x_m, which the attention module
            gets for query m. A module that gets none raises ValueError when it runs.
        learn: hold the numbers as trainable float32 parameters; else they are constants of the
            config. ssmax with neither offset nor slope given is always learnable: its default.
        layers: indices of the layers to convert, the others stay softmax; None converts all.
        anchor: L; log n is replaced by max(0, log(n / L)), so that the query scale is offset_h
            up to n = L keys.

    Raises:
        ValueError: an unknown function, a value of a wrong shape or not finite, a layer that does
            not exist, a composite model, a model without transformers' attention interface.
    """
    if function not in (*FUNCTIONS, "softmax"):
        near = difflib.get_close_matches(str(function).lower(), (*FUNCTIONS, "softmax"), n=1)
        raise ValueError(
            f"function must be 'sigmoid', 'ssmax' or 'softmax', got {function!r}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    config = (
        model_or_config if isinstance(model_or_config, PreTrainedConfig) else model_or_config.config
    )
    model = None if isinstance(model_or_config, PreTrainedConfig) else model_or_config
    if function == "softmax":
        given = (offset, slope, layers, anchor)
        if any(each is not None for each in given) or query or hidden or learn:
            raise ValueError(
                "softmax takes no offset, slope, query, hidden, learn, layers or anchor"
            )
        _unset(config, model)
        return

    parts = sub_configs(config)
    if parts:
        raise ValueError(
            f"{type(config).__name__} is composed of parts with configs of their own: "
            f"configure one of them ({', '.join(parts)}), or the module that it belongs to"
        )
    section = _section(function)
    if offset is not None or slope is not None or query or hidden or learn:
        section["learn"] = bool(learn)
        section["parameters"] = ["offset", "slope"] if learn or query or hidden else []
        section["parameters"] += ["query"] * query + ["hidden"] * hidden
    if isinstance(slope, str) and slope == "paper":
        slope = _paper_slope(config, function)
    heads = config_heads(config)
    if model is not None:
        counts = sorted({head_count(module) for _, module in attention_modules(model)})
        heads = counts[0] if len(counts) == 1 else " or ".join(map(str, counts))
    section["offset"] = _plain("offset", section["offset"] if offset is None else offset, heads)
    section["slope"] = _plain("slope", section["slope"] if slope is None else slope, heads)
    if layers is not None:
        if not layers:
            raise ValueError("layers must name at least one layer, or be None for all of them")
        section["layers"] = check_layers(layers, config)
    if anchor is not None:
        if not isinstance(anchor, int) or isinstance(anchor, bool) or anchor < 1:
            raise ValueError(f"anchor must be a number of keys, at least 1, got {anchor!r}")
        section["anchor"] = anchor

    check_class(None if model is None else type(model), config, function)
    _refuse_wrapped(model)
    if model is None:
        config.hf_sigmoid = Section(section)
        config._attn_implementation = function
        return
    with unchanged_on_error(model):
        detach(model)
        for each in _configs(config, model):
            each.hf_sigmoid = Section(section)
        attach(model)
        model.set_attn_implementation(function)  # which checks the whole model


def _refuse_wrapped(model: "PreTrainedModel | None") -> None:
    """Holders that an adapter keeps copies of are not to be changed under it."""
    for name, module in holders(model) if model is not None else ():
        if module._modules[HOLDER] is not holder_of(module):
            raise ValueError(
                f"{name}.{HOLDER} belongs to a PEFT adapter (modules_to_save): merge or unload the "
                "adapter before the attention is configured again"
            )


def make_default_section(config: PreTrainedConfig, function: str) -> None:
    """A model that is given one of our functions by name gets the section that says so."""
    config.hf_sigmoid = DefaultSection(_section(function))


def forget_default(model: "PreTrainedModel", function: str | None) -> None:
    """Drop a section that only a name made, if another name is asked for and nothing learnt."""
    section = getattr(model.config, "hf_sigmoid", None)
    if not isinstance(section, DefaultSection) or function in (None, section["function"]):
        return
    owners = [module for _, module in holders(model) if module.config.hf_sigmoid is section]
    if all(holder_of(module).is_initial() for module in owners):
        for module in owners:
            detach(module)
        del model.config.hf_sigmoid


def check_section(config: PreTrainedConfig) -> None:
    """Raise ValueError if the section is not one that this release can read."""
    section = config.hf_sigmoid
    needed = {"version", "function", "offset", "slope", "parameters", "learn", "layers"}
    extra = set(section) - needed - {"anchor"} if isinstance(section, dict) else set()
    if not isinstance(section, dict) or extra or needed - set(section):
        given = sorted(section) if isinstance(section, dict) else type(section).__name__
        raise ValueError(f"config.hf_sigmoid must have the keys {sorted(needed)}, got {given}")
    if section["version"] != 1:
        raise ValueError(
            f"config.hf_sigmoid must be of version 1, got {section['version']}: upgrade hf-sigmoid"
        )
    if section["function"] not in FUNCTIONS:
        raise ValueError(
            f"config.hf_sigmoid['function'] must be in {FUNCTIONS}, got {section['function']!r}"
        )


def check_layers(layers: Sequence[int], config: PreTrainedConfig) -> list[int]:
    """The indices, sorted; ValueError if one is not of a layer."""
    count = layer_count(config)
    for layer in layers:
        fits = isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0
        if not fits or (isinstance(count, int) and layer >= count):
            last = f" to {count - 1}" if isinstance(count, int) else ""
            raise ValueError(f"layers must be indices from 0{last}, got {layer!r}")
    return sorted(set(layers))


def find_section(config: PreTrainedConfig) -> dict | None:
    """The first section that a config or one of its parts has."""
    parts = sub_configs(config).values()
    found = (getattr(config, "hf_sigmoid", None), *map(find_section, parts))
    return next((section for section in found if section), None)


def _section(function: str) -> dict:
    section = {"version": 1, "function": function, **DEFAULTS[function], "layers": None}
    return {**section, "parameters": list(section["parameters"])}


def _configs(config: PreTrainedConfig, model: nn.Module | None) -> list[PreTrainedConfig]:
    """This config and every copy that a part of the model holds (the stacks of T5), each once."""
    found = {id(config): config}
    if model is not None:
        for part in (*_parts(model), *(module for _, module in attention_modules(model))):
            found.setdefault(id(part.config), part.config)
    return list(found.values())


def _parts(model: nn.Module) -> list["PreTrainedModel"]:
    from transformers.modeling_utils import PreTrainedModel

    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _unset(config: PreTrainedConfig, model: "PreTrainedModel | None") -> None:
    """Back to softmax: no section, no holders, transformers' default function."""
    _refuse_wrapped(model)
    pending = _configs(config, model)
    while pending:
        each = pending.pop()
        if getattr(each, "hf_sigmoid", None):
            del each.hf_sigmoid
        if model is None and each._attn_implementation in FUNCTIONS:
            each._attn_implementation = None
        pending += sub_configs(each).values()
    if model is not None:
        detach(model)
        for part in _parts(model):
            if part.config._attn_implementation in FUNCTIONS:
                name = "sdpa" if part._supports_sdpa else "eager"
                # Of this part alone: others may not support it, or run what they were given.
                part.set_attn_implementation({"": name})


def _paper_slope(config: PreTrainedConfig, function: str) -> float:
    """1 / mean of log n over n = 1 … N: the multiplier is 1 on average over that length."""
    if function != "ssmax":
        raise ValueError(f"slope='paper' is SSMax's, got it for {function}")
    N = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(N, int) or N < 2:
        raise ValueError(
            "slope='paper' needs config.max_position_embeddings of at least 2, "
            f"got {N}: give the slope as a number"
        )
    return N / sum(map(math.log, range(1, N + 1)))


def _plain(name: str, value: Any, heads: int | str | None) -> float | list[float]:
    """A float or a list of H floats that JSON can hold."""
    if isinstance(value, Tensor):
        value = value.detach().double().tolist()
    single = isinstance(value, (int, float)) and not isinstance(value, bool)
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    numbers = [value] if single else list(value) if listed else []
    real = all(isinstance(number, (int, float)) for number in numbers)
    if not numbers or not real or (listed and len(numbers) != heads):
        given = f"{len(value)} values" if listed else value
        raise ValueError(f"{name} must be a float or {heads} floats, one a head, got {given!r}")
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value) if single else [float(number) for number in numbers]
