"""Which parameter gets which learning rate and decay, and how the rates move."""

import math
from typing import Any

import torch
from run_config import Run


def parameter_groups(model: torch.nn.Module, run: Run) -> list[dict[str, Any]]:
    """Every trainable parameter in exactly one group; the first rule that fits decides.

    `log_length`: the attention row numbers, few and far from zero: a rate of their own, no decay.
    `no_decay`: norms, biases and other vectors, and embeddings unless asked otherwise.
    `decay`: the rest.
    """
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    optim = run.optim
    groups = {
        "log_length": {"lr": optim.log_length_lr, "weight_decay": 0.0},
        "no_decay": {"lr": optim.lr, "weight_decay": 0.0},
        "decay": {"lr": optim.lr, "weight_decay": optim.weight_decay},
    }
    members: dict[str, dict[str, torch.nn.Parameter]] = {name: {} for name in groups}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if "log_length" in name.split("."):
            # A step of 1e-3 is below half a unit of bfloat16 at 1: such a parameter would not move.
            assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}"
            group = "log_length"
        elif parameter.ndim < 2 or (id(parameter) in embeddings and not optim.decay_embeddings):
            group = "no_decay"
        else:
            group = "decay"
        members[group][name] = parameter
    return [
        {
            "name": name,
            "params": list(members[name].values()),
            "names": list(members[name]),
            "peak_lr": settings["lr"],
            **settings,
        }
        for name, settings in groups.items()
        if members[name]
    ]


def describe(groups: list[dict[str, Any]]) -> str:
    """The groups as a table."""
    lines = [f"{'group':<12}{'tensors':>8}{'parameters':>14}{'lr':>10}{'decay':>8}  first"]
    for group in groups:
        count = sum(parameter.numel() for parameter in group["params"])
        lines.append(
            f"{group['name']:<12}{len(group['params']):>8}{count:>14,}{group['peak_lr']:>10.2g}"
            f"{group['weight_decay']:>8.2g}  {group['names'][0]}"
        )
    return "\n".join(lines)


def lr_factor(step: int, *, steps: int, warmup_steps: int, min_ratio: float) -> float:
    """The part of the peak rate that step 1, 2, … uses: linear warmup, then half a cosine.

    A function of the step alone, so a resumed run has no scheduler state to restore.
    """
    if step <= warmup_steps:
        return step / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
