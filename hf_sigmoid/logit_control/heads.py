"""The features of a projection that belong to each head, found by running an attention module.

Not read off names: projections are fused, grouped, latent or transposed, and in more than one
order. A module is called once more as its model calls it, with a function of ours in the place of
attention, and gradients say which output features a head's query or key is made of. Of a module on
the meta device a copy with random numbers is called: which features reach which head is the same.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_sigmoid import parameters, support
from hf_sigmoid.replace_attention import standing_in


@dataclass
class Place:
    """The features of a projection that belong to each head."""

    module: str  # name of the projection in the model
    features: list[Tensor]  # for each head the projection's output (query, key) or input features


class RecordedCall:
    """One call of an attention module, to be repeated on a float32 copy of it.

    In 16 bits rounding would pass for a norm that undoes a scaling, or hide one.
    """

    def __init__(self, name: str, module: nn.Module, args: tuple, kwargs: dict):
        self.module = _with_numbers(copy.deepcopy(module).float().eval())
        self.heads = parameters.head_count(module)
        self.args, self.kwargs = _float((args, kwargs))
        self.projections = {
            f"{name}.{child}": part
            for child, part in self.module.named_modules()
            if is_projection(part) and "lora_" not in child  # what PEFT adds beside one
        }

    def run(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """The module's output with `function(query, key, value)` `[B, M, H, V]` as attention."""

        def attention(module, query, key, value, attention_mask, **kwargs):
            groups = query.shape[1] // value.shape[1]
            return function(query, key, value.repeat_interleave(groups, 1)), None

        with standing_in([self.module.config], attention):
            output = self.module(*self.args, **self.kwargs)
        return output[0] if isinstance(output, tuple) else output


def one_call(model: PreTrainedModel, name: str, ids: Tensor) -> RecordedCall | None:
    """A model's call of one of its attention modules on token ids `[B, T]`; None: there is none."""
    module, calls = model.get_submodule(name), []

    def note(module, args, kwargs):
        calls.append((args, kwargs))
        raise _Reached

    hook = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            if model.device.type == "meta":
                _run_without_numbers(model, ids)
            else:
                model(ids.to(model.device), use_cache=False)
    except _Reached:
        pass
    finally:
        hook.remove()
    return RecordedCall(name, module, *calls[0]) if calls else None


def _run_without_numbers(model: PreTrainedModel, ids: Tensor) -> None:
    """Run a model on the meta device: all that looks at values, mask and attention, is ours."""

    def attention(module, query, key, value, attention_mask, **kwargs):
        B, H, M, _ = query.shape
        return query.new_empty(B, M, H, value.shape[-1]), None

    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool, device="meta")
    configs = [c for c in support.configs(model) if hasattr(c, "_experts_implementation_internal")]
    before = [config._experts_implementation_internal for config in configs]
    try:
        for config in configs:
            # The other ways to run experts look at values, or want 16 bits, also on "meta".
            config._experts_implementation_internal = "batched_mm"
        with standing_in(support.configs(model), attention):
            model(ids.to("meta"), attention_mask=mask, use_cache=False)
    finally:
        for config, name in zip(configs, before, strict=True):
            config._experts_implementation_internal = name


class _Reached(Exception):
    pass


def written_by(call: RecordedCall, which: int) -> tuple[Place | None, tuple[Tensor, ...]]:
    """The projection in which every head's query (0) or key (1) has output features of its own.

    Returns:
        That projection, the one nearest to the attention (None: there is none); and query, key and
        value `[B, H, M, D]` of the call.
    """
    seen: dict[str, Tensor] = {}
    inputs: list[tuple[Tensor, ...]] = []

    def tracked(name):
        def hook(module, args, output):
            seen[name] = output.detach().requires_grad_()
            return seen[name]

        return hook

    def note(query, key, value):
        inputs.append((query, key, value))
        return averages(query, key, value)

    hooks = [part.register_forward_hook(tracked(name)) for name, part in call.projections.items()]
    try:
        with torch.enable_grad():
            call.run(note)
    finally:
        for hook in hooks:
            hook.remove()
    rows = inputs[0][which]
    direction = torch.randn_like(rows)
    for name, output in reversed(seen.items()):
        used = []
        for head in range(rows.shape[1]):
            (gradient,) = torch.autograd.grad(
                (rows[:, head] * direction[:, head]).sum(), output, retain_graph=True,
                allow_unused=True,
            )  # fmt: skip
            if gradient is None:
                break
            used.append(gradient.flatten(0, -2).abs().amax(0) > 0)
        if len(used) != rows.shape[1] or not all(each.any() for each in used):
            continue
        if torch.stack(used).sum(0).max() > 1:
            continue  # a feature of several heads: the narrow half of a latent projection
        return Place(name, [each.nonzero().flatten() for each in used]), inputs[0]
    return None, inputs[0]


def averages(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Something that every head's output could be: `[B, M, H, V]`, each head its own."""
    B, H, M, _ = query.shape
    mean = value.mean(2, keepdim=True) + value.std()
    return mean.expand(B, H, M, value.shape[-1]).transpose(1, 2).contiguous()


def is_projection(module: nn.Module) -> bool:
    """A projection whose weight is a plain matrix: quantised ones cannot be multiplied into."""
    return type(module) in (nn.Linear, Conv1D) and module.weight.is_floating_point()


def _with_numbers(module: nn.Module) -> nn.Module:
    """A module on the meta device with random numbers on the CPU."""
    if any(parameter.is_meta for parameter in module.parameters()):
        module.to_empty(device="cpu")
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                torch.nn.init.normal_(tensor)
            else:
                tensor.data.zero_()
    return module


def _float(given):
    """Tensors in tuples, lists and dicts: floats as float32, those on the meta device as random."""
    if isinstance(given, Tensor):
        if given.is_meta:
            empty = torch.zeros(given.shape, dtype=given.dtype, device="cpu")
            given = torch.randn_like(empty) if given.is_floating_point() else empty
        return given.float() if given.is_floating_point() else given
    if isinstance(given, tuple | list):
        return type(given)(map(_float, given))
    if isinstance(given, dict):
        return {key: _float(value) for key, value in given.items()}
    return given
