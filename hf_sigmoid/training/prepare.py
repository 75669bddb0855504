"""Continued pretraining up to its first step: refusals that need no weights, then the model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import AutoConfig

import hf_sigmoid
from hf_sigmoid.compat import lacks_division, recompute_activations
from hf_sigmoid.configuration import find_section
from hf_sigmoid.context_parallel import check_model
from hf_sigmoid.embedded import checkpoint
from hf_sigmoid.errors import BadInput
from hf_sigmoid.loading import check_weights, load, load_model, max_positions, twin
from hf_sigmoid.logit_control.shards import reshard
from hf_sigmoid.optim import Heads
from hf_sigmoid.training import (
    dry_run,
    loop,
    opening,
    optimization,
    processes,
    sharding,
    trained,
    training_plots,
)
from hf_sigmoid.training.held_out import HeldOut
from hf_sigmoid.training.job import Job, check_room, open_job
from hf_sigmoid.training.layout import Division
from hf_sigmoid.training.logit_control import LogitControl, find_controlled, query_key_names
from hf_sigmoid.training.packing import documents_leak
from hf_sigmoid.training.pretraining import Pretraining
from hf_sigmoid.training.run_keys import Run
from hf_sigmoid.training.speed import Speed
from hf_sigmoid.training.trackers import need


@dataclass(frozen=True)
class Checked:
    """A run that nothing is wrong with, as far as can be known before weights are loaded.

    Attributes:
        source: the folder of the model.
        twin: the model without weights, with the run's attention.
        heads: whose logits can be controlled.
    """

    job: Job
    source: str
    twin: Any
    heads: Heads | None
    held_out: HeldOut


def train(run: Run, *, dry: bool = False, plot: bool = False) -> Path | None:
    """The folder of the final model; None if a signal ended the run, or if it is `dry`."""
    if plot:
        training_plots.check()
    checked = check(run, fresh=dry)
    job, run = checked.job, checked.job.run
    final: Path | None = job.folder.final
    if dry or not job.is_finished():
        model = trained.select(checked.twin, run)
        for line in opening.describe(job, model, [opening.trains(run, model)]):
            job.processes.say(line)
        if dry:
            describe(checked, model)
            return None
        check_disk(job, model)
        final = loop.run_to_end(job, build(checked))
    if final and plot and job.processes.main:
        training_plots.draw(job.folder.root)
    return final


def check(run: Run, *, fresh: bool = False) -> Checked:
    """Everything that can be known, and refused, before the weights are loaded.

    Args:
        fresh: do not go on from a checkpoint.
    """
    for tracker in run.log.trackers or []:
        need(tracker, "log.trackers")
    if run.parameters == "lora":
        need("peft", "lora.rank")
    begun = processes.begin(
        run.train.precision, log_with=run.log.trackers, project_dir=run.output_dir
    )
    with begun.accelerator.local_main_process_first():
        source = checkpoint(run.model)
    check_weights(source)
    _refuse_another_function(run, source)
    model = twin(source, run.attn)
    _refuse_what_cannot_be_divided(run, begun.layout, model)
    job = open_job(run, begun, source, fresh=fresh)
    held_out = HeldOut(run.evaluate, job.tokenizer, run.train.block_size, max_positions(source))
    return Checked(job, source, model, find_controlled(run.optim, model), held_out)


def build(checked: Checked) -> Pretraining:
    """The model and its optimiser, ready for a first step."""
    job, run = checked.job, checked.job.run
    model = load_weights(checked)
    bare = job.processes.accelerator.unwrap_model(model)
    speed = Speed(bare, job.processes.device, run.train.precision)
    query_key = query_key_names(checked.heads, bare)
    groups = optimization.parameter_groups(bare, run, query_key)
    optimizer = optimization.make_optimizer(groups, run)
    control = LogitControl(run, checked.heads, bare, optimizer, job.tokenizer)
    return Pretraining(
        job, checked.source, model, bare, optimizer, control, speed, checked.held_out
    )


def load_weights(checked: Checked) -> Any:
    """The model, from its source or from the checkpoint, with DDP around it where it has copies."""
    job, run = checked.job, checked.job.run
    layout, device = job.processes.layout, job.processes.device
    saved = job.resumed.folder / "model" if job.resumed else None
    whole = saved is not None and run.parameters != "lora" and not job.resumed.is_sharded
    config = layout.distributed_config()
    # Weights stay in fp32: precision=bf16 is autocast, and small updates are not rounded away.
    with sharding.transformers_shards():
        model = load_model(
            str(saved) if whole else checked.source,
            dtype=torch.float32,
            attn=run.attn,
            **({"distributed_config": config} if config else {}),
        )
    if layout.fsdp:
        sharding.tie_again(model)
    if config is None:
        # Where it will run: another device is another attention path.
        model.to(device)
    check_documents(model)
    if run.train.gradient_checkpointing:
        recompute_activations(model, use_reentrant=False)
    set_seed(run.seed)  # the start of adapters
    model = trained.select(model, run, adapter=saved).train()
    if layout.world > 1 and not layout.splits_weights:
        model = job.processes.accelerator.prepare(model)
    return model


def check_documents(model: Any) -> None:
    """Refuse a model that lets the documents of a packed block see each other."""
    leak = documents_leak(model)
    reshard(model)
    if leak:
        raise BadInput(
            f"{type(model).__name__} with attn {model.config._attn_implementation!r} lets the "
            "documents of a packed block see each other; expected one that honours position_ids"
        )


def check_disk(job: Job, model: Any) -> None:
    """Room for the final model and for checkpoints, before the work."""
    sizes = opening.sizes(model)
    everything, moving = 4 * sum(sizes.values()), 4 * sizes[True]
    saved = moving if job.run.parameters == "lora" else everything
    every, keep = job.run.checkpoint.every, job.run.checkpoint.keep
    number = keep + 1 if every else 1  # one while it is written
    check_room(job, everything + number * (saved + 2 * moving))


def describe(checked: Checked, model: Any) -> None:
    """The plan of a run, and one step of two layers."""
    job, run = checked.job, checked.job.run
    groups = optimization.parameter_groups(model, run, query_key_names(checked.heads, model))
    for line in dry_run.describe(job, model, groups):
        job.processes.say(line)
    if job.processes.layout.world > 1:
        return
    set_seed(run.seed)
    cut = dry_run.two_layers(checked.twin.config, run.attn, job.processes.device)
    check_documents(cut)
    heads = find_controlled(run.optim, cut)
    cut = trained.select(cut, run).train()
    groups = optimization.parameter_groups(cut, run, query_key_names(heads, cut))
    job.processes.say(dry_run.one_step(job, cut, groups))


def _refuse_another_function(run: Run, source: str) -> None:
    """A converted checkpoint trained on as something else would be saved as what it was."""
    section = find_section(load(AutoConfig, source))
    own = section and section["function"]
    if section and run.attn not in (None, own):
        raise BadInput(
            f"attn: {run.model} was converted to {own}, got {run.attn}; leave attn out, or "
            "make it a softmax model again by hf-sigmoid revert first"
        )


def _refuse_what_cannot_be_divided(run: Run, layout: Division, model: Any) -> None:
    split, size = layout.splits_weights, run.train.block_size
    lack = lacks_division(fsdp=layout.fsdp, tensor=layout.tensor, copies=layout.replicate)
    for said, met in {
        f"lora.rank: expected one process or data parallel with adapters, got {layout}": (
            split or layout.context > 1
        )
        and run.parameters == "lora",
        f"optim.optimizer: expected adamw with {layout}, got muon, which orthogonalises whole "
        "matrices": split and run.optim.optimizer == "muon",
        f"train.block_size: expected a multiple of the {layout.context} processes that share a "
        f"row, got {size}": size % layout.context,
        "checkpoint.state: expected full where no weights are divided, got sharded on "
        f"{layout}": run.checkpoint.state == "sharded" and not split,
        f"{layout}: {lack}": split and lack,
    }.items():
        if met:
            raise BadInput(said)
    if layout.context > 1:
        try:
            check_model(model)
        except hf_sigmoid.Unsupported as error:
            raise BadInput(f"parallelism_config_cp_size {layout.context}: {error}") from error
