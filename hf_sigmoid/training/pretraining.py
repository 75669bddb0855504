"""Continued pretraining: its steps, its evaluation, and what it saves.

The loss of a step is the sum of its cross entropies over the number of tokens it predicts, counted
over all micro-batches and processes, so it does not depend on how the batch is divided. A killed
run goes on from its last complete checkpoint and repeats the losses of an uninterrupted one to the
last bit: the place in the text is saved, and learning rates and random numbers are functions of
the step.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from safetensors.torch import save_file

from hf_sigmoid.logit_control.shards import reshard
from hf_sigmoid.training import checkpointing, finished_model, optimization, optimizer_state
from hf_sigmoid.training.held_out import HeldOut, brief
from hf_sigmoid.training.job import Job
from hf_sigmoid.training.logit_control import LogitControl
from hf_sigmoid.training.packing import merged
from hf_sigmoid.training.sharding import local
from hf_sigmoid.training.speed import Speed
from hf_sigmoid.training.update import loss_and_gradients


@dataclass
class Pretraining:
    """A model that trains on text, ready for a step.

    Attributes:
        source: the folder of the model that it began as.
        model: with DDP around it where there are copies; `bare` is without.
    """

    job: Job
    source: str
    model: Any
    bare: Any
    optimizer: torch.optim.Optimizer
    control: LogitControl
    speed: Speed
    held_out: HeldOut
    skipped: int = 0
    skipped_in_a_row: int = 0

    def resume(self, checkpoint: checkpointing.Checkpoint) -> None:
        """Put back what the model was not loaded from."""
        self.skipped, self.skipped_in_a_row = checkpoint.manifest["skipped"]
        if checkpoint.is_sharded:
            file = self._part(checkpoint.folder)
            optimizer_state.load_parts(file, self.optimizer, self.bare)
        else:
            file = checkpoint.folder / optimizer_state.FILE
            optimizer_state.load(file, self.optimizer, self.bare)
        self.control.load(checkpoint.folder)

    def step(self, number: int) -> dict[str, Any]:
        """One update of the weights, on every process the same, or on none; the values to log."""
        job, run, started = self.job, self.job.run, time.perf_counter()
        processes = job.processes
        # Dropout's numbers follow from the step, so there is no generator state to save.
        own = processes.layout.averaged_rank
        set_seed(((run.seed * 1_000_003 + number) * 4099 + own) % 2**32)
        place = job.packer.state()
        batches = job.batches()
        keys = sum(self.speed.keys(batch["position_ids"]) for batch in batches)
        with self.control.recording():
            loss, grad_norm = loss_and_gradients(job, self.model, batches)
        factor = optimization.lr_factor_of(run, number)
        values = {"loss": loss, "lr": run.optim.lr * factor, "grad_norm": grad_norm}
        if math.isfinite(loss) and math.isfinite(grad_norm):
            optimization.set_lr(self.optimizer, factor)
            self.optimizer.step()
            reshard(self.bare)
            values |= self.control.after_step(run.optim.lr * factor)
            self.skipped_in_a_row = 0
        else:
            values |= self._skip(number, loss, grad_norm, place)
        self.optimizer.zero_grad()
        values |= {"tokens": number * job.tokens_per_step, "skipped": self.skipped}
        return values | self.speed.measure(
            tokens=job.tokens_per_step,
            keys=int(processes.total(keys)[0]),
            seconds=time.perf_counter() - started,
            processes=processes.layout.world,
        )

    def is_due(self, number: int) -> bool:
        return self._is_held_out_due(number) or self._is_health_due(number)

    def evaluate(self, number: int) -> dict[str, Any] | None:
        """Held-out loss and needles, and the attention of a fixed batch."""
        found: dict[str, Any] = {}
        if self._is_held_out_due(number):
            measured = self.held_out.measure(self.bare, self.job)
            reshard(self.bare)
            if measured is None:
                return None
            found |= measured
            if not number:
                self.job.processes.say(f"held out, before training: {brief(found)}")
        if self._is_health_due(number):
            found["health"] = self.control.health()
            reshard(self.bare)
        return found

    def line(self, values: dict[str, Any]) -> str:
        """The progress line, which has the time that is left already."""
        loss, norm = values["loss"], values["grad_norm"]
        parts = [
            "skipped" if loss is None else f"loss {loss:.4f}, norm {norm:.2g}",
            f"{values['tok_s']:,.0f} tok/s",
            f"MFU {values['mfu']:.1%}" if values["mfu"] else f"{values['tflop_s']:.3g} TFLOP/s",
            f"{values['memory_gb']:.1f} GB",
            brief(values),
        ]
        return ", ".join(filter(None, parts))

    def not_finite(self) -> str | None:
        for name, parameter in self.bare.named_parameters():
            if not local(parameter).isfinite().all():
                return name
        return None

    def manifest(self) -> dict[str, Any]:
        counts = [self.skipped, self.skipped_in_a_row]
        return {"skipped": counts, "state": self.job.run.checkpoint.state}

    def write_checkpoint(self, folder: Path) -> None:
        """Weights that are divided are gathered, or written as they are."""
        job, main, bare = self.job, self.job.processes.main, self.bare
        control = self.control.state()  # a sum over the processes where weights are divided
        if job.run.checkpoint.state == "sharded":
            optimizer_state.save_parts(self._part(folder), self.optimizer, bare)
            if main:
                bare.config.save_pretrained(folder / "model")
        elif job.processes.layout.splits_weights or main:
            checkpointing.save_whole(folder / "model", bare, main=main)
            tensors = optimizer_state.tensors(self.optimizer, bare, keep=main)
            if main:
                save_file(tensors, folder / optimizer_state.FILE)
        if main:
            job.tokenizer.save_pretrained(folder / "model")
            self.control.write(folder, control)

    def write_final(self, folder: Path) -> None:
        finished_model.write(folder, self.job, self.source, self.bare, self.skipped)

    def _is_held_out_due(self, number: int) -> bool:
        run = self.job.run
        return bool(self.held_out) and (number % run.evaluate.every == 0 or number == run.steps)

    def _is_health_due(self, number: int) -> bool:
        run, every = self.job.run, self.job.run.evaluate.health_every
        return bool(number and every) and (number % every == 0 or number == run.steps)

    def _part(self, folder: Path) -> Path:
        return folder / f"part_{self.job.processes.layout.rank:05d}.safetensors"

    def _skip(self, number: int, loss: float, grad_norm: float, place: dict) -> dict[str, Any]:
        """No update of any process; what to log of it."""
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.job.run.train.max_skipped:
            checkpoints, done = self.job.folder.checkpoints, number - self.skipped_in_a_row
            raise FloatingPointError(
                f"step {number}: loss {loss}, gradient norm {grad_norm}, the "
                f"{self.skipped_in_a_row}. step in a row that is not finite "
                "(train.max_skipped); it changed no weight. "
                + checkpointing.last_one(checkpoints, done)
            )
        processes = self.job.processes
        processes.say(f"step {number} skipped: loss {loss}, gradient norm {grad_norm}")
        # Where the packers stood says which text it was: their seeds are the run's.
        packers = merged(processes.everywhere(place))
        return {"loss": None, "grad_norm": None, "batch": packers}
