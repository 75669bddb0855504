"""The plan of a run, and one step of it on the model's first two layers, without its weights."""

import copy
import time
from collections.abc import Iterator
from typing import Any

import torch

from hf_sigmoid.loading import from_config
from hf_sigmoid.training import opening, optimization
from hf_sigmoid.training.job import Job
from hf_sigmoid.training.layout import Division
from hf_sigmoid.training.run_keys import Run
from hf_sigmoid.training.update import loss_and_gradients

LAYERS = 2


def describe(job: Job, model: Any, groups: list[dict]) -> Iterator[str]:
    """The lines to print behind opening.py's. `model` may be on the meta device."""
    run, warm = job.run, max(1, job.run.warmup_steps)
    yield optimization.describe(groups)
    yield f"{job.tokens_per_step:,} tokens a step, {job.tokens_per_step * run.steps:,} in all"
    yield "rate: " + ", ".join(
        f"{optimization.lr_factor_of(run, step):.3g} of the peak at step {step}"
        for step in sorted({1, warm, (warm + run.steps) // 2, run.steps})
    )
    yield "memory of a process, estimated: " + ", ".join(
        f"{name} {size / 1e9:.2f} GB"
        for name, size in memory(run, model, job.processes.layout).items()
    )


def memory(run: Run, model: Any, layout: Division) -> dict[str, float]:
    """Bytes on one process: float32 weights, gradients and two moments, and the activations.

    Activations by Korthikanti et al. 2022 (arXiv 2205.05198, equation 2) without the attention
    matrix, which no kernel here keeps: 34 bytes a token, feature and layer in 16 bits; 2 with
    gradient checkpointing, and one layer in full. Logits are kept in float32 with their gradient.
    """
    sizes = opening.sizes(model)
    trained, total = sizes[True], sum(sizes.values())
    config = model.config.get_text_config()
    share = layout.shard * layout.tensor
    rows = run.train.batch_size * run.train.block_size
    width = 2 if run.train.precision == "bf16" else 4
    a_layer = rows * config.hidden_size * 17 * width / layout.tensor
    layers = config.num_hidden_layers
    kept = (
        a_layer + layers * rows * config.hidden_size * width
        if run.train.gradient_checkpointing
        else layers * a_layer
    )
    slots = 1 if run.optim.optimizer == "muon" else 2
    parts = {
        "weights": 4 * total / share,
        "gradients": 4 * trained / share,
        "optimiser": 4 * slots * trained / share,
        "activations": kept,
        "logits": rows * config.vocab_size * (8 + width),
    }
    return {**parts, "together": sum(parts.values())}


def two_layers(config: Any, attn: str | None, device: torch.device) -> Any:
    """A model of the same kind with random weights and its first two layers."""
    config = copy.deepcopy(config)
    inner = config.get_text_config()
    layers = inner.num_hidden_layers
    for name, value in list(vars(inner).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(inner, name, value[:LAYERS])
    inner.num_hidden_layers = min(LAYERS, layers)
    section = getattr(inner, "hf_sigmoid", None)
    if section and section.get("layers"):
        kept = [i for i in section["layers"] if i < inner.num_hidden_layers]
        section["layers"] = kept or [0]
    return from_config(config, attn, device)


def one_step(job: Job, model: Any, groups: list[dict]) -> str:
    """Train the cut by one step of this very run; its loss and how long it took."""
    optimizer = optimization.make_optimizer(groups, job.run)
    batches = job.batches()
    started = time.perf_counter()
    loss, norm = loss_and_gradients(job, model, batches)
    optimizer.step()
    seconds = time.perf_counter() - started
    return (
        f"one step of {model.config.get_text_config().num_hidden_layers} layers with random "
        f"weights: loss {loss:.4f}, gradient norm {norm:.4g}, {seconds:.2f} s"
    )
