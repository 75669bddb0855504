"""Distillation of attention: its steps, its stages, and what it saves."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from safetensors.torch import save_file

from hf_sigmoid.conversions import folding, perplexity
from hf_sigmoid.conversions.revert import hashed
from hf_sigmoid.errors import BadInput
from hf_sigmoid.loading import check_source
from hf_sigmoid.training import (
    distilled_model,
    held_out,
    loop,
    opening,
    optimization,
    optimizer_state,
    processes,
)
from hf_sigmoid.training.checkpointing import Checkpoint
from hf_sigmoid.training.distillation import Distillation, load_trained
from hf_sigmoid.training.job import Job, check_room, open_job
from hf_sigmoid.training.packing import IGNORED, documents_leak
from hf_sigmoid.training.run_keys import Distil, EndToEnd, Layerwise
from hf_sigmoid.training.teacher_and_student import load_both

TRAINED = "trained.safetensors"
PROBE = "The attention of every head"


@dataclass
class Distilling:
    """A student and its teacher, ready for a step.

    Attributes:
        folded: what earlier distillations have folded into the student.
        weights: hashes of both models as they were loaded.
        probe: some token ids `[1, T]`.
        named: all that trains in any stage, by name; `trained` does in this one.
    """

    job: Job
    models: Distillation
    folded: folding.Folded | None
    weights: dict[str, str]
    probe: torch.Tensor
    held_out: dict[str, torch.Tensor]
    named: dict[str, torch.nn.Parameter]
    stage: Layerwise | EndToEnd | None = None
    trained: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer | None = None

    def resume(self, checkpoint: Checkpoint) -> None:
        """Put back what trains, and the optimiser of the stage that was saved."""
        load_trained(checkpoint.folder / TRAINED, self.named)
        # Here, not at the next step: the step that was saved may be evaluated and saved once more.
        self._begin(self._stage_of(checkpoint.step))
        file = checkpoint.folder / optimizer_state.FILE
        optimizer_state.load(file, self.optimizer, self.models.student)

    def step(self, number: int) -> dict[str, Any]:
        """One update of the weights; the values to log."""
        job, run, started = self.job, self.job.run, time.perf_counter()
        layerwise = number <= run.layerwise.steps
        stage = self._stage_of(number)
        if stage is not self.stage:
            self._begin(stage)
        within = number if layerwise else number - run.layerwise.steps
        batches = [
            {name: tensor.to(job.processes.device) for name, tensor in batch.items()}
            for batch in job.batches()
        ]
        if layerwise:
            values = self._layerwise(batches)
        else:
            fade = run.end_to_end.blend * stage.steps
            self.models.blend(min(1.0, within / fade) if fade else 1.0)
            values = self._end_to_end(batches)
        self._reduce_gradients()
        norm = self._clip(layerwise)
        if not (math.isfinite(values["loss"]) and math.isfinite(norm)):
            raise FloatingPointError(f"step {number}: loss {values['loss']}, gradient norm {norm}")
        factor = optimization.lr_factor(
            within,
            steps=stage.steps,
            warmup_steps=max(1, int(run.optim.warmup * stage.steps)),
            min_ratio=run.optim.min_lr_ratio,
        )
        optimization.set_lr(self.optimizer, factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        tokens = job.tokens_per_step
        return {
            "stage": "layerwise" if layerwise else "end_to_end",
            "loss": values.pop("loss"), "grad_norm": norm, **values, "tokens": number * tokens,
            "tok_s": tokens / (time.perf_counter() - started),
        }  # fmt: skip

    def is_due(self, number: int) -> bool:
        run = self.job.run
        due = number % run.evaluate.every == 0 or number == run.steps
        return bool(number and self.held_out) and due

    def evaluate(self, number: int) -> dict[str, Any]:
        """Perplexity of the student that comes out, not of a mixture."""
        self.models.blend(1.0)
        found = {
            name: perplexity(self.models.student, windows, progress=False)
            for name, windows in self.held_out.items()
        }
        return {"perplexity": found}

    def line(self, values: dict[str, Any]) -> str:
        return f"loss {values['loss']:.4f}, {values['tok_s']:,.0f} tok/s"

    def not_finite(self) -> str | None:
        return next((name for name, p in self.named.items() if not p.isfinite().all()), None)

    def manifest(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def write_checkpoint(self, folder: Path) -> None:
        if not self.job.processes.main:
            return
        trained = {name: p.detach().cpu().contiguous() for name, p in self.named.items()}
        save_file(trained, folder / TRAINED)
        tensors = optimizer_state.tensors(self.optimizer, self.models.student)
        save_file(tensors, folder / optimizer_state.FILE)

    def write_final(self, folder: Path) -> None:
        """The student, without what distillation added to it."""
        # The source's tensors make `revert` exact, as long as nothing but numbers was trained.
        numbers_only = {stage.train for stage in self.job.run.stages.values()} == {"numbers"}
        folded = self.models.finish(self.probe, keep_originals=numbers_only)
        if self.folded is not None:
            kept = numbers_only and bool(self.folded.originals)
            folded = self.folded.and_then(folded, keep_originals=kept)
        if self.job.processes.main:
            modules = list(self.models.modules)
            distilled_model.write(folder, self.job, self.models.student, folded, modules)

    def _stage_of(self, number: int) -> Layerwise | EndToEnd:
        run = self.job.run
        return run.layerwise if number <= run.layerwise.steps else run.end_to_end

    def _begin(self, stage: Layerwise | EndToEnd) -> None:
        """Let what the stage trains train, under an optimiser of its own."""
        optim = self.job.run.optim
        self.stage, self.trained = stage, self.models.select(stage.train)
        groups: dict[float, list[torch.nn.Parameter]] = {}
        for name, parameter in self.trained.items():
            is_number = bool({"log_length", "head_scales"} & {*name.split(".")})
            rate = stage.numbers_lr if is_number else stage.lr
            if is_number and parameter.dim() > 1:
                # A step of Adam moves every weight by the rate; their sum is what a query sees.
                rate /= math.sqrt(parameter.shape[-1])
            groups.setdefault(rate, []).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": each, "peak_lr": rate} for rate, each in groups.items()],
            betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=0.0,
        )  # fmt: skip

    def _layerwise(self, batches: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        """Gradients of each module's own error; the errors' mean, and each."""
        share = 1 / (len(batches) * self.job.processes.layout.data_ranks)
        errors = []
        for batch in batches:
            with self.job.processes.accelerator.autocast():
                errors.append(self.models.layerwise(batch, scale=share))
        divided = len(errors) * self.job.processes.layout.data_ranks
        found = self.job.processes.total(
            *(sum(e[name] for e in errors) / divided for name in self.models.modules)
        )
        return {"loss": sum(found) / len(found), "layers": [round(e, 5) for e in found]}

    def _end_to_end(self, batches: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        """Gradients of the whole model's loss; its weighted mean over the predicted tokens."""
        processes, kl = self.job.processes, self.job.run.end_to_end.kl
        asked = sum(batch["weights"][batch["labels"] != IGNORED].sum().item() for batch in batches)
        predicted = max(1.0, processes.total(asked)[0])
        total = 0.0
        for batch in batches:
            with processes.accelerator.autocast():
                loss = self.models.end_to_end(batch, kl=kl, ignored=IGNORED)
            (loss / predicted).backward()
            total += loss.item()
        return {"loss": processes.total(total)[0] / predicted}

    def _reduce_gradients(self) -> None:
        """Sum over the processes: hooks run backward module by module, which DDP cannot wrap."""
        if self.job.processes.layout.data_ranks == 1:
            return
        for parameter in self.trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = self.job.processes.accelerator.reduce(parameter.grad, "sum")

    def _clip(self, layerwise: bool) -> float:
        """Clip each module's gradients alone where they are independent; the largest norm."""
        limit = self.job.run.optim.clip or math.inf
        groups = [list(self.trained.values())]
        if layerwise:
            groups = [
                [p for name, p in self.trained.items() if name.startswith(f"{module}.")]
                for module in self.models.modules
            ]
        norms = [torch.nn.utils.clip_grad_norm_(group, limit).item() for group in groups if group]
        return max(norms) if all(map(math.isfinite, norms)) else math.inf


def distil(run: Distil) -> Path | None:
    """The folder of the final model; None if a signal ended the run."""
    check_source(run.model)
    job = open_job(run, processes.begin(run.train.precision, splits=False), run.model)
    return job.folder.final if job.is_finished() else loop.run_to_end(job, _build(job))


def _build(job: Job) -> Distilling:
    """Both models, once nothing is wrong with them, and the first lines."""
    run, evaluate, device = job.run, job.run.evaluate, job.processes.device
    windows = held_out.windows(
        held_out.read_texts(evaluate.path), evaluate.windows, job.tokenizer, run.train.block_size
    )
    student, teacher, folded = load_both(run, job.processes)
    stages = {name: stage.train for name, stage in run.stages.items()}
    _check_disk(job, student, set(stages.values()))
    weights = {"model": hashed(student), "teacher": hashed(teacher)}
    if job.resumed and job.resumed.manifest["weights"] != weights:
        raise BadInput(f"model or teacher is not what {job.resumed.folder} was distilled from")
    student.to(device)
    teacher.to(device)
    if documents_leak(student):
        raise BadInput(
            f"{type(student).__name__} lets the documents of a packed block see each other; "
            "expected a model that honours position_ids"
        )
    probe = torch.tensor([job.tokenizer(PROBE)["input_ids"]], device=device)
    set_seed(run.seed)  # the start of low-rank changes
    rank = run.optim.lora_rank if "lora" in stages.values() else None
    attention = student.config._attn_implementation  # before it is that of distillation
    models = Distillation(student, teacher, lora_rank=rank, probe=probe)
    named, said, total = {}, [], sum(p.numel() for p in student.parameters())
    for name, stage in run.stages.items():
        chosen = models.select(stage.train)
        named |= chosen
        number = sum(p.numel() for p in chosen.values())
        said.append(
            opening.parameters(f"{name}, {stage.steps:,} steps, {stage.train}", number, total)
        )
    for line in opening.describe(job, student, said, attention):
        job.processes.say(line)
    return Distilling(job, models, folded, weights, probe, windows, named)


def _check_disk(job: Job, student: Any, trains: set[str]) -> None:
    """Room for the final model and for checkpoints of what trains, before the work."""
    sizes = {name: p.numel() * 4 for name, p in student.named_parameters()}
    inside = {
        "all": sum(sizes.values()),
        "projections": sum(size for name, size in sizes.items() if "attn" in name),
    }
    trained = max((inside[name] for name in trains & inside.keys()), default=0)
    # Each checkpoint holds what trains and Adam's two moments of it; one more while written.
    every, keep = job.run.checkpoint.every, job.run.checkpoint.keep
    check_room(job, sum(sizes.values()) + 3 * trained * (keep + 1 if every else 1))
