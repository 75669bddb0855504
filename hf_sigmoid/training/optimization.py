"""Learning rates and decay of each parameter, the optimiser, and the schedule of the rates."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from hf_sigmoid.training.run_keys import Run
from hf_sigmoid.training.sharding import local

QUERY_KEY = "qk"


def parameter_groups(
    model: torch.nn.Module, run: Run, query_key: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Every trainable parameter in exactly one group; the first rule that fits decides.

    `log_length`: the per-query terms, few and far from zero: a rate of their own, no decay.
    `qk`: the weights of W_Q and W_K that are named in `query_key`.
    `no_decay`: norms, biases and other vectors, and embeddings unless asked otherwise.
    `decay`: the rest; under Muon without what is no hidden matrix, which is `decay_adamw`.
    """
    modules = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    embeddings = {id(p) for module in modules for p in module.parameters(recurse=False)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outer = embeddings | {id(p) for p in (head.parameters() if head is not None else ())}
    optim, query_key = run.optim, set(query_key)
    groups = {  # rate and decay
        "log_length": (optim.log_length_lr, 0.0),
        QUERY_KEY: (optim.lr * optim.qk_lr_scale, optim.weight_decay),
        "no_decay": (optim.lr, 0.0),
        "decay": (optim.lr, optim.weight_decay),
        "decay_adamw": (optim.lr, optim.weight_decay),
    }
    members: dict[str, dict[str, torch.nn.Parameter]] = {name: {} for name in groups}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if "log_length" in name.split("."):
            # A step of 1e-3 is below half a unit of bfloat16 at 1: such a parameter would not move.
            assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}"
            group = "log_length"
        elif name in query_key:
            group = QUERY_KEY
        elif parameter.ndim < 2 or (id(parameter) in embeddings and not optim.decay_embeddings):
            group = "no_decay"
        elif optim.optimizer == "muon" and (id(parameter) in outer or parameter.ndim != 2):
            group = "decay_adamw"
        else:
            group = "decay"
        members[group][name] = parameter
    return [
        {"name": name, "params": [*members[name].values()], "names": [*members[name]],
         "peak_lr": lr, "lr": lr, "weight_decay": decay}
        for name, (lr, decay) in groups.items()
        if members[name]
    ]  # fmt: skip


def make_optimizer(groups: list[dict[str, Any]], run: Run) -> torch.optim.Optimizer:
    """AdamW, whose update is one fused kernel where torch has one; or Muon and AdamW together.

    Muon's iteration needs whole matrices.
    """
    optim = run.optim
    adam = {"betas": (optim.beta1, optim.beta2), "eps": optim.eps}
    parameters = [p for group in groups for p in group["params"]]
    fused = all(local(p).device.type == "cuda" for p in parameters)
    if optim.optimizer == "adamw":
        return torch.optim.AdamW(groups, **adam, fused=fused)
    return MuonAndAdamW(groups, adam | {"fused": fused})


class MuonAndAdamW(torch.optim.Optimizer):
    """torch.optim.Muon for the matrices of the groups `decay` and `qk`, AdamW for all the rest.

    Muon's update is scaled to the size of AdamW's ("match_rms_adamw", Liu et al. 2025,
    arXiv 2502.16982, section 2.2), so that one learning rate serves both.
    """

    def __init__(self, groups: list[dict[str, Any]], adam: dict[str, Any]):
        for group in groups:
            group["muon"] = group["name"] in ("decay", QUERY_KEY)
        super().__init__(groups, {})
        # The same group dictionaries, so that a rate set on one is set on the other.
        self.parts: list[torch.optim.Optimizer] = []
        if matrices := [group for group in self.param_groups if group["muon"]]:
            self.parts.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"))
        if rest := [group for group in self.param_groups if not group["muon"]]:
            self.parts.append(torch.optim.AdamW(rest, **adam))
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for part in self.parts:
            part.step()


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


def lr_factor(
    step: int, *, steps: int, warmup_steps: int, min_ratio: float, schedule: str = "cosine"
) -> float:
    """The part of the peak rate that step 1, 2, … uses: linear warmup, then the schedule.

    A function of the step alone, so a resumed run has no scheduler state to restore.
    """
    if step <= warmup_steps:
        return step / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    left = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0
    }[schedule]  # fmt: skip
    return min_ratio + (1 - min_ratio) * left


def lr_factor_of(run: Run, step: int) -> float:
    return lr_factor(
        step, steps=run.steps, warmup_steps=run.warmup_steps, min_ratio=run.optim.min_lr_ratio,
        schedule=run.optim.schedule,
    )  # fmt: skip


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
