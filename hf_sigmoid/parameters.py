"""The `log_length` holder on each converted attention module, which gives a row its number.

    row_m = β_h + γ_h log n_m (+ w_h·q_m) (+ u_h·x_m)   n_m = keys visible to query m
    row_m = β_h + γ_h max(0, log(n_m / L))              with an anchor L: β up to n = L

is the bias of sigmoid attention or the multiplier of SSMax. x_m is what the attention module gets
for query m, and q_m its query with its position in it. Which of offset β, slope γ, query w and
hidden u are parameters, and their initial values, is in the config's section (`configuration.py`).

x_m is noted by hooks of the attention module, which are on it while its holder has u.
"""

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig

from hf_sigmoid.layer_types import FUNCTIONS, HOLDER

NAMES = ("offset", "slope", "query", "hidden")
INPUTS = "_hf_sigmoid_inputs"  # of an attention module with u, what it got, while it runs


class LogLength(nn.Module):
    """The per-query terms of one module, float32. Read it by calling it: FSDP and PEFT hook that.

    Args:
        widths: of q and of x, None where unknown.
    """

    def __init__(self, function: str, heads: int, widths: dict[str, int | None], section: dict):
        super().__init__()
        self.function = function
        self.heads = heads
        self.values = {name: section.get(name, 0.0) for name in NAMES}
        self.anchor = section.get("anchor")  # L, or None
        self.hooks: tuple = ()  # on the attention module
        self.name = ""  # the attention module's
        shapes = {name: (heads, widths[name]) if name in widths else (heads,) for name in NAMES}
        for name in NAMES:
            wanted = name in section["parameters"] and function in FUNCTIONS
            if wanted and None in shapes[name]:
                raise ValueError(f"the width of `{name}` is unknown: expected it without `{name}`")
            # Not the default dtype, which transformers sets to the model's while it builds one.
            empty = torch.empty(shapes[name], dtype=torch.float32) if wanted else None
            parameter = nn.Parameter(empty, section["learn"]) if wanted else None
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every parameter to what the config says."""
        for name, parameter in self.named_parameters(recurse=False):
            value = _value(self.values[name], self.heads, parameter)
            init.copy_(parameter, divided_like(value, parameter))

    def is_initial(self) -> bool:
        """Does every parameter still have the value that the config gives it?"""
        for name, parameter in self.named_parameters(recurse=False):
            if parameter.is_meta:
                continue
            value = _value(self.values[name], self.heads, parameter)
            if not torch.equal(_local(parameter), _local(divided_like(value, parameter))):
                return False
        return True

    def forward(self, log_n: Tensor, query: Tensor, inputs: Tensor | None = None) -> Tensor:
        """Per-query terms `[B, H, M]`, float32.

        Args:
            log_n: broadcastable to `[B, H, M]`.
            query: `[B, H, M, D]`.
            inputs: what the attention module got, `[B, M, width]`; needed where there is u.

        Always a new tensor: FSDP2 frees the storage of a gathered parameter after this call.
        """
        if self.anchor is not None:
            log_n = (log_n - math.log(self.anchor)).clamp(min=0)
        offset, slope = self._read("offset", query), self._read("slope", query)
        if isinstance(offset, Tensor) and isinstance(slope, Tensor):
            row = torch.addcmul(offset, slope, log_n)
        else:
            row = offset + slope * log_n
        if self.query is not None:
            if query.shape[-1] != self.query.shape[-1]:
                raise ValueError(
                    f"{self.name}: a query bias that reads queries of {self.query.shape[-1]} "
                    f"features got {query.shape[-1]}: expected it without `query`"
                )
            row = row + torch.einsum("bhmd,hd->bhm", query.float(), _local(self.query).float())
        if self.hidden is not None:
            row = row + self._of_inputs(inputs, query)
        return row

    def _of_inputs(self, inputs: Tensor | None, query: Tensor) -> Tensor:
        """u_h·x_m `[B, H, M]`."""
        if not fits(inputs, query, self.hidden.shape[-1]):
            given = None if inputs is None else list(inputs.shape)
            wanted = [query.shape[0], query.shape[2], self.hidden.shape[-1]]
            raise ValueError(
                f"{self.name}: a query bias that reads hidden states needs a module whose first "
                f"input is {wanted}, one row a query, got {given}: expected it without `hidden`"
            )
        x = inputs.to(query.device).float()
        return torch.einsum("bmc,hc->bhm", *_replicated(x, self.hidden))

    def _read(self, name: str, query: Tensor) -> Tensor | float:
        """One number for all heads, or one a head: [1, H, 1], float32."""
        parameter, value = getattr(self, name), self.values[name]
        if parameter is not None:
            return _local(parameter).float().view(1, -1, 1)
        if isinstance(value, (int, float)):
            return float(value)
        return torch.as_tensor(value, dtype=torch.float32, device=query.device).view(1, -1, 1)

    def extra_repr(self) -> str:
        return f"function={self.function!r}, heads={self.heads}"


def attach(model: nn.Module) -> None:
    """Give every attention module whose config has the section its holder. Idempotent."""
    configs = (getattr(module, "config", None) for module in model.modules())
    if not any(getattr(config, "hf_sigmoid", None) for config in configs):
        return  # not ours: every model that is built comes by here
    for name, module in attention_modules(model):
        section = getattr(module.config, "hf_sigmoid", None)
        if not section or hasattr(module, HOLDER):
            continue
        layer = layer_index(name, module)
        converted = section.get("layers") is None or layer in section["layers"]
        function = section["function"] if converted else "softmax"
        holder = LogLength(function, head_count(module), widths(module), section)
        # Added to a finished model it joins the others; in one that is being made without memory
        # it stays on the meta device, even where a module (diffllama's) has a parameter with some.
        own = next(module.parameters(), None)
        if own is not None and not any(parameter.is_meta for parameter in holder.parameters()):
            holder = holder.to(_execution_device(module) if own.is_meta else own.device)
        holder.name = name
        module.add_module(HOLDER, holder)
        if holder.hidden is not None:
            holder.hooks = watch_inputs(module, _keep_inputs)


def _keep_inputs(module: nn.Module, inputs: Tensor | None) -> None:
    if inputs is not None:
        setattr(module, INPUTS, inputs)
    elif hasattr(module, INPUTS):  # not if its first input is absent
        delattr(module, INPUTS)


def per_query_terms(module: nn.Module, log_n: Tensor, query: Tensor) -> Tensor:
    """What the holder of a running attention module gives: `LogLength.forward`."""
    return getattr(module, HOLDER)(log_n, query, getattr(module, INPUTS, None))


def watch_inputs(module: nn.Module, keep: Callable[[nn.Module, Tensor | None], None]) -> tuple:
    """Call `keep` with a module and its first input when it begins, with None when it ends.

    Returns:
        The hooks.
    """
    first = list(inspect.signature(type(module).forward).parameters)[1]
    return (
        module.register_forward_pre_hook(functools.partial(_begins, keep, first), with_kwargs=True),
        module.register_forward_hook(functools.partial(_ends, keep), always_call=True),
    )


def _begins(keep, first: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
    keep(module, args[0] if args else kwargs.get(first))


def _ends(keep, module: nn.Module, args: tuple, output: object) -> None:
    keep(module, None)


def fits(inputs: Tensor | None, query: Tensor, width: int | None = None) -> bool:
    """Is what an attention module got `[B, M, width]`, one row for each query?"""
    shape = getattr(inputs, "shape", ())
    return shape[:-1] == (query.shape[0], query.shape[2]) and width in (None, shape[-1])


def _execution_device(module: nn.Module) -> torch.device | str | int:
    """Where accelerate runs a module whose weights it offloaded; meta if it did not."""
    hooks = (getattr(each, "_hf_hook", None) for each in module.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return next((device for device in devices if device is not None), "meta")


def attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of everything that calls transformers' attention interface."""
    from transformers.modeling_utils import PreTrainedModel

    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "config", None), PreTrainedConfig)
        and not isinstance(module, PreTrainedModel)
        and uses_interface(type(module))
    ]


def detach(model: nn.Module) -> None:
    """Remove every holder."""
    for _, module in list(holders(model)):
        for hook in holder_of(module).hooks:
            hook.remove()
        del module._modules[HOLDER]


def holders(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and attention module of every holder."""
    for name, module in model.named_modules():
        if holder_of(module) is not None:
            yield name, module


def holder_of(module: nn.Module) -> LogLength | None:
    """The holder on an attention module, also inside PEFT's wrapper of a module to save."""
    held = module._modules.get(HOLDER)
    held = getattr(held, "original_module", held)
    return held if isinstance(held, LogLength) else None


@functools.lru_cache(None)
def uses_interface(cls: type) -> bool:
    """Does any method of this class look an attention function up in transformers' interface?"""
    return "ALL_ATTENTION_FUNCTIONS" in code_names(cls)


@functools.lru_cache(None)
def code_names(cls: type) -> frozenset[str]:
    """Every global and attribute that the methods of this class name."""
    members = [member for base in cls.__mro__ for member in vars(base).values()]
    functions = filter(
        inspect.isfunction, (getattr(member, "__func__", member) for member in members)
    )
    return frozenset(name for each in functions for name in inspect.unwrap(each).__code__.co_names)


def head_count(module: nn.Module) -> int:
    """Query heads of an attention module."""
    on_module = (
        "num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "heads", "num_attn_heads",
        "attention_heads",
    )  # fmt: skip
    for name in on_module:
        if isinstance(value := getattr(module, name, None), int):
            return value
    if (value := config_heads(module.config)) is not None:
        return value
    if isinstance(value := getattr(module, "groups", None), int):  # florence2's channels
        return value
    width = getattr(getattr(module, "q_proj", None), "out_features", None)
    if width and (dim := getattr(module, "head_dim", None)):  # lw_detr
        return width // dim
    raise ValueError(f"{type(module).__name__}: cannot tell the number of its query heads")


def head_dim(module: nn.Module) -> int | None:
    """Head dim of the queries of an attention module, None if unknown."""
    for owner in (module, module.config):
        for name in ("qk_head_dim", "head_dim", "attention_head_size"):
            if isinstance(value := getattr(owner, name, None), int):
                return value
    hidden = getattr(module.config, "hidden_size", None) or getattr(module.config, "d_model", None)
    return hidden // head_count(module) if hidden else None


def widths(module: nn.Module) -> dict[str, int | None]:
    """Features of a query, and of what the module gets for it; None if unknown."""
    return {"query": head_dim(module), "hidden": _input_width(module)}


def _input_width(module: nn.Module) -> int | None:
    for child in module.modules():  # the first projection of all reads it
        if isinstance(width := getattr(child, "in_features", getattr(child, "nx", None)), int):
            return width
    return getattr(module.config, "hidden_size", None)


def sub_configs(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """The configs of a composite model's parts."""
    pairs = ((name, getattr(config, name, None)) for name in config.sub_configs or {})
    return {name: child for name, child in pairs if isinstance(child, PreTrainedConfig)}


def config_heads(config: PreTrainedConfig) -> int | None:
    names = (
        "num_attention_heads", "num_heads", "n_heads", "n_head", "encoder_attention_heads",
        "decoder_attention_heads",
    )  # fmt: skip
    for name in names:
        if isinstance(value := getattr(config, name, None), int):
            return value
    return None


def layer_index(name: str, module: nn.Module) -> int | None:
    """Index of the layer that an attention module belongs to."""
    index = getattr(module, "layer_idx", None)
    if isinstance(index, int) and index >= 0:
        return index
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    return int(numbers[0]) if numbers else None


def _value(value: float | list[float], heads: int, parameter: Tensor) -> Tensor:
    number = torch.as_tensor(value, dtype=parameter.dtype, device=parameter.device)
    return number.expand(parameter.shape) if number.dim() == 0 else number.reshape(parameter.shape)


def _replicated(x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """x and u as local tensors; of heads that are split, x's gradient sums over the processes."""
    if any(place.is_shard() for place in getattr(hidden, "placements", ())):
        from torch.distributed.tensor import DTensor, Partial, Replicate

        mesh, places = hidden.device_mesh, hidden.placements
        whole = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        parts = [Partial() if place.is_shard() else Replicate() for place in places]
        x = whole.to_local(grad_placements=parts)
    return x, _local(hidden).float()


def _local(parameter: Tensor) -> Tensor:
    """A local tensor, also where tensor parallelism or FSDP2 made it a DTensor."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def divided_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, known to every process, where and as a parameter of its shape is divided."""
    whole = whole.to(parameter.device)
    if not hasattr(parameter, "placements"):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    known = DTensor.from_local(whole.contiguous(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return known.redistribute(placements=parameter.placements)
