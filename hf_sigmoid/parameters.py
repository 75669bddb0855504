"""Where a row's number comes from: the `log_length` holder, the config's section, and `configure`.

    row_m = β_h + γ_h log n_m (+ w_h·q_m)        n_m = keys visible to query m

is the bias of sigmoid attention or the multiplier of SSMax. `config.hf_sigmoid` says which function
a model
uses, in which layers, which of offset β, slope γ and query w are parameters, and their initial
values:

    {"version": 1, "function": "ssmax", "offset": 1.0, "slope": 0.0, "parameters": ["offset",
    "slope"],
     "learn": true, "layers": null}
"""

import functools
import inspect
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig

if TYPE_CHECKING:  # at run time it would register the plugin, which needs this module complete
    from transformers.modeling_utils import PreTrainedModel

FUNCTIONS = ("sigmoid", "ssmax")
HOLDER = "log_length"  # the holder's name on an attention module, and so in a checkpoint

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


class LogLength(nn.Module):
    """β_h + γ_h log n_m (+ w_h·q_m), float32. Read it by calling it: FSDP and PEFT hook that."""

    def __init__(self, function: str, heads: int, head_dim: int | None, section: dict):
        super().__init__()
        self.function = function
        self.heads = heads
        self.values = {name: section.get(name, 0.0) for name in ("offset", "slope", "query")}
        shapes = {"offset": (heads,), "slope": (heads,), "query": (heads, head_dim)}
        for name in ("offset", "slope", "query"):
            wanted = name in section["parameters"] and function in FUNCTIONS
            parameter = (
                nn.Parameter(torch.empty(shapes[name]), section["learn"]) if wanted else None
            )
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every parameter to what the config says."""
        for name, parameter in self.named_parameters(recurse=False):
            init.copy_(parameter, _value(self.values[name], self.heads, parameter))

    def forward(self, log_n: Tensor, query: Tensor) -> Tensor:
        """Row numbers `[B, H, M]`, float32, from log n broadcastable to it and `query` [B, H, M,
        D].

        Always a new tensor: FSDP2 frees the storage of a gathered parameter after this call.
        """
        row = (
            self._read("offset", query).view(1, -1, 1)
            + self._read("slope", query).view(1, -1, 1) * log_n
        )
        if self.query is not None:
            row = row + torch.einsum("bhmd,hd->bhm", query.float(), _local(self.query).float())
        return row

    def _read(self, name: str, query: Tensor) -> Tensor:
        parameter = getattr(self, name)
        if parameter is not None:
            return _local(parameter).float()
        return torch.as_tensor(self.values[name], dtype=torch.float32, device=query.device)

    def extra_repr(self) -> str:
        return f"function={self.function!r}, heads={self.heads}"


def configure(
    model_or_config: "PreTrainedModel | PreTrainedConfig",
    function: str,
    *,
    offset: float | Sequence[float] | Tensor | None = None,
    slope: float | Sequence[float] | Tensor | str | None = None,
    query: bool = False,
    learn: bool = False,
    layers: Sequence[int] | None = None,
) -> None:
    """Choose the attention function of a model, row_m = offset_h + slope_h·log n_m (+ w_h·q_m).

    Sets `config.hf_sigmoid`; on a model also adds or removes the `log_length` holders and switches
    the attention implementation. A composite model is configured through its part:
    `configure(model.model. language_model, …)` or `configure(config.text_config, …)`.

    Args:
        function: "sigmoid", "ssmax", or "softmax" to take everything back out.
        offset: β, a float or `[H]`; None takes the default (0 for sigmoid, 1 for ssmax).
        slope: γ, a float or `[H]`; None takes the default (−1 for sigmoid, 0 for ssmax). "paper" is
            1 / mean of log n over n = 1 … max_position_embeddings, for ssmax from scratch.
        query: also hold w `[H, D]`, starting at 0.
        learn: hold the numbers as trainable float32 parameters; else they are constants of the
        config.
            ssmax with neither offset nor slope given is always learnable: that is its default.
        layers: indices of the layers to convert, the others stay softmax; None converts all.

    Raises:
        ValueError: an unknown function, a value of a wrong shape or not finite, a layer that does
        not
            exist, a model without transformers' attention interface.
    """
    if function not in (*FUNCTIONS, "softmax"):
        raise ValueError(f"function must be 'sigmoid', 'ssmax' or 'softmax', got {function!r}")
    config = (
        model_or_config if isinstance(model_or_config, PreTrainedConfig) else model_or_config.config
    )
    model = None if isinstance(model_or_config, PreTrainedConfig) else model_or_config
    if function == "softmax":
        if offset is not None or slope is not None or query or learn or layers is not None:
            raise ValueError("softmax takes no offset, slope, query, learn or layers")
        _unset(config, model)
        return

    section = Section(version=1, function=function, **DEFAULTS[function], layers=None)
    section["parameters"] = list(section["parameters"])
    if offset is not None or slope is not None or query or learn:
        section["learn"] = bool(learn)
        section["parameters"] = ["offset", "slope"] if learn or query else []
        if query:
            section["parameters"].append("query")
    if slope == "paper":
        N = config.get_text_config().max_position_embeddings
        slope = 1.0 / (sum(map(math.log, range(1, N + 1))) / N)
    heads = _config_heads(config)
    section["offset"] = _plain("offset", section["offset"] if offset is None else offset, heads)
    section["slope"] = _plain("slope", section["slope"] if slope is None else slope, heads)
    if layers is not None:
        section["layers"] = sorted({int(layer) for layer in layers})
        check_layers(section["layers"], config)

    if model is None:
        config.hf_sigmoid = section
        config._attn_implementation = function
        return
    check_model(type(model), function)
    refuse_scaled_twice(config, function)
    detach(model)
    config.hf_sigmoid = section
    attach(model)
    model.set_attn_implementation(function)


def attach(model: nn.Module) -> None:
    """Give every attention module whose config has the section its holder. Idempotent."""
    from transformers.modeling_utils import PreTrainedModel

    for name, module in list(model.named_modules()):
        section = getattr(getattr(module, "config", None), "hf_sigmoid", None)
        if not section or isinstance(module, PreTrainedModel) or not uses_interface(type(module)):
            continue
        if hasattr(module, HOLDER):
            continue
        layer = _layer_index(name, module)
        converted = section.get("layers") is None or layer in section["layers"]
        function = section["function"] if converted else "softmax"
        holder = LogLength(function, head_count(module), head_dim(module), section)
        if (parameter := next(module.parameters(), None)) is not None:
            holder = holder.to(parameter.device)  # a holder added to a finished model
        module.add_module(HOLDER, holder)


def detach(model: nn.Module) -> None:
    """Remove every holder."""
    for _, module in list(holders(model)):
        del module._modules[HOLDER]


def holders(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and attention module of every holder."""
    for name, module in model.named_modules():
        if isinstance(module._modules.get(HOLDER), LogLength):
            yield name, module


def make_default_section(config: PreTrainedConfig, function: str) -> None:
    """A model that is given one of our functions by name gets the section that says so."""
    section = Section(version=1, function=function, **DEFAULTS[function], layers=None)
    section["parameters"] = list(section["parameters"])
    config.hf_sigmoid = section


def check_section(config: PreTrainedConfig) -> None:
    """Raise ValueError if the section is not one that this release can read."""
    section = config.hf_sigmoid
    needed = {"version", "function", "offset", "slope", "parameters", "learn", "layers"}
    if not isinstance(section, dict) or set(section) - needed or needed - set(section):
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


def check_model(cls: "type[PreTrainedModel]", function: str) -> None:
    """Raise ValueError if this class would ignore the function and run softmax."""
    if not cls._can_set_attn_implementation():
        raise ValueError(
            f"{cls.__name__} does not go through transformers' attention interface: "
            f"attn_implementation={function!r} would be ignored and softmax would run"
        )


def refuse_scaled_twice(config: PreTrainedConfig, function: str) -> None:
    """Raise ValueError where ssmax would scale logits that the model scales by log length."""
    if function != "ssmax":
        return
    rope = getattr(config, "rope_parameters", None) or {}
    ways_off = {
        "llama4": "attn_temperature_tuning"
        if getattr(config, "attn_temperature_tuning", False)
        else None,
        "ministral3": "rope_parameters['llama_4_scaling_beta']"
        if rope.get("llama_4_scaling_beta")
        else None,
        "mistral4": "rope_parameters['llama_4_scaling_beta']"
        if rope.get("llama_4_scaling_beta")
        else None,
        "inkling": "log_scaling_n_floor" if getattr(config, "log_scaling_n_floor", None) else None,
        "mistral_large4": "",
        "beam": "",
    }
    model_type = getattr(config, "model_type", "")
    for name, switch in ways_off.items():
        if model_type.startswith(name) and switch is not None:
            cure = f"set config.{switch} to None or 0, or" if switch else "it has no switch;"
            raise ValueError(
                f"{model_type} already scales its logits by log length, "
                "and ssmax would do it twice: "
                f"{cure} use attn_implementation='sigmoid' or its own softmax"
            )


@functools.lru_cache(None)
def uses_interface(cls: type) -> bool:
    """Does any method of this class look an attention function up in transformers' interface?"""
    for base in cls.__mro__:
        for member in vars(base).values():
            member = getattr(member, "__func__", member)
            if inspect.isfunction(member):
                names = inspect.unwrap(member).__code__.co_names
                if "ALL_ATTENTION_FUNCTIONS" in names:
                    return True
    return False


def head_count(module: nn.Module) -> int:
    """Query heads of an attention module."""
    on_module = (
        "num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "heads", "num_attn_heads",
        "attention_heads",
    )  # fmt: skip
    for name in on_module:
        if isinstance(value := getattr(module, name, None), int):
            return value
    if (value := _config_heads(module.config)) is not None:
        return value
    raise ValueError(f"{type(module).__name__}: cannot tell the number of its query heads")


def head_dim(module: nn.Module) -> int | None:
    """Head dim of the queries of an attention module, None if unknown."""
    for owner in (module, module.config):
        for name in ("qk_head_dim", "head_dim", "attention_head_size"):
            if isinstance(value := getattr(owner, name, None), int):
                return value
    hidden = getattr(module.config, "hidden_size", None) or getattr(module.config, "d_model", None)
    return hidden // head_count(module) if hidden else None


def _config_heads(config: PreTrainedConfig) -> int | None:
    names = (
        "num_attention_heads", "num_heads", "n_heads", "n_head", "encoder_attention_heads",
        "decoder_attention_heads",
    )  # fmt: skip
    for name in names:
        if isinstance(value := getattr(config, name, None), int):
            return value
    return None


def _unset(config: PreTrainedConfig, model: "PreTrainedModel | None") -> None:
    """Back to softmax: no section, no holders, transformers' default function."""
    if getattr(config, "hf_sigmoid", None):
        del config.hf_sigmoid
    if model is None:
        if config._attn_implementation in FUNCTIONS:
            config._attn_implementation = None
        return
    detach(model)
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")


def check_layers(layers: list[int], config: PreTrainedConfig) -> None:
    count = getattr(config, "num_hidden_layers", None)
    for layer in layers:
        if layer < 0 or (isinstance(count, int) and layer >= count):
            raise ValueError(f"layers must be indices from 0 to {count - 1}, got {layer}")


def _layer_index(name: str, module: nn.Module) -> int | None:
    """Index of the layer that an attention module belongs to."""
    if isinstance(index := getattr(module, "layer_idx", None), int):
        return index
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    return int(numbers[0]) if numbers else None


def _plain(name: str, value: Any, heads: int | None) -> float | list[float]:
    """A float or a list of H floats that JSON can hold."""
    if isinstance(value, Tensor):
        value = value.detach().double().tolist()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        numbers = [float(value)]
    elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) == heads:
        numbers = [float(number) for number in value]
    else:
        given = (
            f"{len(value)} values"
            if isinstance(value, Sequence) and not isinstance(value, str)
            else value
        )
        raise ValueError(f"{name} must be a float or {heads} floats, one a head, got {given!r}")
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{name} must be finite, got {value}")
    return numbers[0] if isinstance(value, (int, float)) else numbers


def _value(value: float | list[float], heads: int, parameter: Tensor) -> Tensor:
    number = torch.as_tensor(value, dtype=parameter.dtype, device=parameter.device)
    return number.expand(parameter.shape) if number.dim() == 0 else number.reshape(parameter.shape)


def _local(parameter: Tensor) -> Tensor:
    """A fresh local tensor, also where tensor parallelism or FSDP2 made it a DTensor."""
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter) * 1.0
