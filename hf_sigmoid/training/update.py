"""The loss of a step and its gradients, however the step is divided."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_sigmoid.context_parallel import context_parallel, split
from hf_sigmoid.training.job import Job
from hf_sigmoid.training.packing import IGNORED, model_inputs, predicted_tokens
from hf_sigmoid.training.sharding import norm_and_clip, whole, without_reduction


def loss_and_gradients(
    job: Job, model: Any, batches: list[dict[str, torch.Tensor]]
) -> tuple[float, float]:
    """Mean cross entropy over all predicted tokens of the step, and its gradient's norm."""
    processes = job.processes
    predicted = max(1, int(processes.total(predicted_tokens(batches))[0]))
    total = 0.0
    for number, batch in enumerate(batches, 1):
        with (
            without_reduction(model, last=number == len(batches)),
            _shared_rows(job, model, batch) as part,
        ):
            with processes.accelerator.autocast():
                loss = _summed_cross_entropy(model, part)
            # Gradients are averaged over the processes; this loss is their sum.
            (loss * (processes.layout.averaged / predicted)).backward()
        total += loss.item()
    parameters = [p for p in model.parameters() if p.requires_grad]
    norm = norm_and_clip(processes.accelerator, parameters, job.run.optim.clip or math.inf)
    return processes.total(total, of_parts=True)[0] / predicted, norm


@contextmanager
def _shared_rows(
    job: Job, model: Any, batch: dict[str, torch.Tensor]
) -> Iterator[dict[str, torch.Tensor]]:
    """This process's part of a batch, on its device, while attention sees whole rows."""
    batch = {name: tensor.to(job.processes.device) for name, tensor in batch.items()}
    group = job.processes.context_group
    if group is None:
        yield batch
        return
    bare = job.processes.accelerator.unwrap_model(model)
    with context_parallel(bare, group, batch["position_ids"]):
        yield {name: split(tensor, group) for name, tensor in batch.items()}


def _summed_cross_entropy(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = whole(model(**model_inputs(batch)).logits).float().flatten(0, 1)
    labels = batch["labels"].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
