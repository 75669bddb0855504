"""The optimiser's state by `parameter name/slot`: whole in one file, or each process's part."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_sigmoid.parameters import divided_like
from hf_sigmoid.training.sharding import local, whole

FILE = "optimizer.safetensors"
Optimizer = torch.optim.Optimizer


def tensors(
    optimizer: Optimizer, model: Any, of: Callable = whole, *, keep: bool = True
) -> dict[str, torch.Tensor]:
    """The state; every process that holds a part of it must ask for the whole.

    Args:
        keep: False takes part in gathering and holds none of it.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    for parameter, slots in optimizer.state.items():
        for slot, tensor in slots.items():
            gathered = of(tensor.detach())
            if keep:
                found[f"{names[parameter]}/{slot}"] = gathered.contiguous().cpu()
    return found


def load(file: Path, optimizer: Optimizer, model: Any) -> None:
    """Put back what `tensors` took out."""
    with safe_open(file, framework="pt") as saved:
        _put_back(saved, optimizer, model, divided_like)


def save_parts(file: Path, optimizer: Optimizer, model: Any) -> None:
    """Write this process's part of parameters and state, as it is divided."""
    parts = {
        f"{name}/": local(p.detach()).contiguous().cpu() for name, p in model.named_parameters()
    }
    save_file(parts | tensors(optimizer, model, local), file)


@torch.no_grad()
def load_parts(file: Path, optimizer: Optimizer, model: Any) -> None:
    """Put back what `save_parts` wrote in the same layout."""
    with safe_open(file, framework="pt") as saved:
        for name, parameter in model.named_parameters():
            local(parameter).copy_(saved.get_tensor(f"{name}/"))
        _put_back(saved, optimizer, model, _part_of)


def _put_back(saved: Any, optimizer: Optimizer, model: Any, placed: Callable) -> None:
    """The state out of an open file; `placed` brings a tensor to where its parameter is."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    slots: dict[str, list[str]] = defaultdict(list)
    for key in saved.keys():  # noqa: SIM118 (a safetensors file is not iterable)
        name, slot = key.rsplit("/", 1)
        slots[name] += [slot] if slot else []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            # A parameter that never had a gradient has no state.
            for slot in slots[name]:
                tensor = saved.get_tensor(f"{name}/{slot}")
                if slot != "step":
                    tensor = placed(tensor, parameter)
                elif group.get("fused"):
                    # AdamW counts its steps on the CPU, unless one kernel does the whole update.
                    tensor = tensor.to(local(parameter).device)
                optimizer.state[parameter][slot] = tensor


def _part_of(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    part = part.to(local(parameter).device)
    if not hasattr(parameter, "placements"):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements,
        run_check=False, shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
