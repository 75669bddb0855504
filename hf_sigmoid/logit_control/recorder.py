"""The largest logit of every head over all calls of a model, from the kernels' own statistics.

A "final" logit is what the weights are made of: z + b of sigmoid attention, c z of SSMax. The
"product" is z itself, τ q·k with what the model adds to it, which is all that W_Q and W_K control;
the kernels give the former, and b and c > 0 of every query are known, so max z follows exactly.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_sigmoid import parameters
from hf_sigmoid.attention import MAXIMA
from hf_sigmoid.logit_control.blocks import plain_name
from hf_sigmoid.logit_control.shards import head_part


class Maxima:
    """Running maxima of one attention module's logits, by head.

    A maximum is the same however often a call is repeated: recomputation under gradient
    checkpointing changes nothing.
    """

    def __init__(self):
        self.final: Tensor | None = None  # [H]
        self.product: Tensor | None = None

    def add(self, max_logit: Tensor, options: dict[str, Any]) -> None:
        """The largest final logit of each query `[B, H, M]`, and the call's per-query terms."""
        max_logit = max_logit.detach()
        if "bias" in options:
            product = max_logit - _detached(options["bias"])
        else:
            multiplier = _detached(options["multiplier"])
            multiplier = torch.as_tensor(multiplier, device=max_logit.device)
            # c z is largest where z is; of c < 0 where −z is; c = 0 says nothing of z.
            product = torch.where(multiplier == 0, -math.inf, max_logit / multiplier.abs())
        final, product = max_logit.amax((0, 2)), product.amax((0, 2))
        if self.final is not None:
            final, product = torch.maximum(self.final, final), torch.maximum(self.product, product)
        self.final, self.product = final, product


class Recorder:
    """The largest logits so far; `record` yields it."""

    def __init__(self, modules: dict[str, tuple[nn.Module, Maxima]]):
        self._modules = modules

    def max_logits(self, *, final: bool = False) -> dict[str, Tensor]:
        """The largest logits `[H]` of each attention module that was called, by its name.

        The products z, which `QKClip` wants; with `final` what the weights are made of. Of this
        process: `all_reduce_max` takes the maxima over all. Under tensor parallelism the heads of
        other processes have −∞ here.
        """
        found = {}
        for name, (module, maxima) in self._modules.items():
            here = maxima.final if final else maxima.product
            if here is None:
                continue
            heads, part, _ = head_part(module, len(here))
            whole = here.new_full((heads,), -math.inf)
            whole[part] = here
            found[name] = whole
        return found

    def reset(self) -> None:
        """Begin anew, for maxima by step."""
        for _, maxima in self._modules.values():
            maxima.final = maxima.product = None


@contextlib.contextmanager
def record(model: nn.Module) -> Iterator[Recorder]:
    """While open, note the largest logit of every head in all calls through our two functions.

    In training, autocast, under gradient checkpointing (close it after the backward pass, which
    repeats the forward pass as it was), DDP, FSDP2 and tensor parallelism. A model that runs a
    softmax of transformers' is not seen: use `Health`.

    Args:
        model: it, or what wraps it; module names are those of the bare model.

    Raises:
        ValueError: it has no attention module on transformers' interface, or is being recorded.
    """
    modules = {
        plain_name(name): (module, Maxima()) for name, module in parameters.attention_modules(model)
    }
    if not modules:
        raise ValueError(f"{type(model).__name__} has no attention module that can be recorded")
    if any(hasattr(module, MAXIMA) for module, _ in modules.values()):
        raise ValueError(f"{type(model).__name__} is being recorded already")
    try:
        for module, maxima in modules.values():
            setattr(module, MAXIMA, maxima)
        yield Recorder(modules)
    finally:
        for module, _ in modules.values():
            vars(module).pop(MAXIMA, None)


@torch.no_grad()
def all_reduce_max(
    max_logits: dict[str, Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Maxima over the processes, in one message. Alone: as they are.

    Collective, and every process must have called the same modules.
    """
    if not max_logits or not (dist.is_available() and dist.is_initialized()):
        return max_logits
    everything = torch.cat(list(max_logits.values()))
    dist.all_reduce(everything, dist.ReduceOp.MAX, group)
    parts = everything.split([len(each) for each in max_logits.values()])
    return dict(zip(max_logits, parts, strict=True))


def _detached(row: float | Tensor) -> float | Tensor:
    return row.detach() if isinstance(row, Tensor) else row
