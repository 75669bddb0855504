"""One update of the weights, on every process the same, or on none."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import set_seed

from hf_sigmoid.context_parallel import context_parallel, split
from hf_sigmoid.shards import reshard
from hf_sigmoid.training import optimization, parallel
from hf_sigmoid.training.loop import merged
from hf_sigmoid.training.packing import IGNORED, predicted_tokens, step_batches
from hf_sigmoid.training.prepared import Prepared


class Update(Prepared):
    """`step`, of a run that was built."""

    def step(self, step: int) -> tuple[dict[str, Any], bool]:
        """One update. The values to log, and whether any process was asked to stop."""
        run, started = self.run, time.perf_counter()
        # Dropout's numbers follow from the step, so there is no generator state to save.
        own = self.layout.averaged_rank
        set_seed(((run.seed * 1_000_003 + step) * 4099 + own) % 2**32)
        place = self.packer.state()
        batches = step_batches(
            self.packer, rank=self.rank, ranks=self.ranks,
            batch_size=run.train.batch_size, grad_accumulation=run.train.grad_accumulation,
        )  # fmt: skip
        keys = sum(self.speed.keys(batch["position_ids"]) for batch in batches)
        with self.control.recording():
            loss, grad_norm = self.loss_and_gradients(self.model, batches)
        keys, stopping = self._sum(keys, float(self.stop.asked))
        factor = optimization.lr_factor(
            step,
            steps=run.steps,
            warmup_steps=run.warmup_steps,
            min_ratio=run.optim.min_lr_ratio,
            schedule=run.optim.schedule,
        )
        values = {"loss": loss, "lr": run.optim.lr * factor, "grad_norm": grad_norm}
        if math.isfinite(loss) and math.isfinite(grad_norm):
            optimization.set_lr(self.optimizer, factor)
            self.optimizer.step()
            reshard(self._bare_model())
            values |= self.control.after_step(run.optim.lr * factor)
            self.skipped_in_a_row = 0
        else:
            values |= self._skip(step, loss, grad_norm, place)
        self.optimizer.zero_grad()
        tokens = self.blocks_per_step * run.train.block_size
        values |= {"tokens": step * tokens, "skipped": self.skipped}
        values |= self.speed.measure(
            tokens=tokens,
            keys=int(keys),
            seconds=time.perf_counter() - started,
            processes=self.layout.world,
        )
        return values, bool(stopping)

    def loss_and_gradients(self, model: Any, batches: list[dict]) -> tuple[float, float]:
        """Mean cross entropy over all predicted tokens of the step, and its gradient's norm."""
        predicted = max(1, int(self._sum(predicted_tokens(batches))[0]))
        total = 0.0
        for number, batch in enumerate(batches, 1):
            with (
                parallel.without_reduction(model, last=number == len(batches)),
                self._shared_rows(batch) as part,
            ):
                with self.accelerator.autocast():
                    loss = _summed_cross_entropy(model, part)
                # Gradients are averaged over the processes; this loss is their sum.
                (loss * (self.layout.averaged / predicted)).backward()
            total += loss.item()
        parameters = [p for p in model.parameters() if p.requires_grad]
        norm = parallel.norm_and_clip(self.accelerator, parameters, self.run.optim.clip or math.inf)
        return self._sum(total, of_parts=True)[0] / predicted, norm

    @contextmanager
    def _shared_rows(self, batch: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        """This process's part of a batch, on its device, while attention sees whole rows."""
        batch = {name: tensor.to(self.accelerator.device) for name, tensor in batch.items()}
        if self.layout.context == 1:
            yield batch
            return
        group = self.context_group
        with context_parallel(self._bare_model(), group, batch["position_ids"]):
            yield {name: split(tensor, group) for name, tensor in batch.items()}

    def _skip(self, step: int, loss: float, grad_norm: float, place: dict) -> dict[str, Any]:
        """No update of any process; what to log of it."""
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.run.train.max_skipped:
            raise FloatingPointError(
                f"step {step}: loss {loss}, gradient norm {grad_norm}, the "
                f"{self.skipped_in_a_row}. step in a row that is not finite "
                "(train.max_skipped); it changed no weight. "
                + self._last_checkpoint(step - self.skipped_in_a_row)
            )
        self._say(f"step {step} skipped: loss {loss}, gradient norm {grad_norm}")
        # Where the packers stood says which text it was: their seeds are the run's.
        from_places = self._everywhere(place)
        packers = merged(from_places)
        return {"loss": None, "grad_norm": None, "batch": packers}


def _summed_cross_entropy(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    # Without a mask and a cache, transformers reads the documents off position_ids.
    logits = model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        attention_mask=None,
        use_cache=False,
    ).logits
    return torch.nn.functional.cross_entropy(
        parallel.whole(logits).float().flatten(0, 1),
        batch["labels"].flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )
