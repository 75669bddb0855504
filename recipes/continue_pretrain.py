"""Continue pretraining a causal language model on packed documents.

    accelerate launch recipes/continue_pretrain.py --config recipes/ssmax/continue.yaml \
        model=MODEL output_dir=runs/ssmax KEY=VALUE …

The loss of a step is the sum of its cross entropies over the number of tokens it predicts, counted
over all micro-batches and processes, so it does not depend on how the batch is divided. A killed
run goes on from its last complete checkpoint and repeats the losses of an uninterrupted one to the
last bit: the place in the text is saved, and learning rates and random numbers are functions of
the step.
"""

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkpointing
import dry_run
import errors
import finished_model
import optimization
import parallel
import resuming
import run_config
import torch
import trackers
import trained
import training_plots
from accelerate.utils import set_seed
from errors import BadInput
from held_out import HeldOut, brief
from loading import check_weights, load_model, max_positions, twin, weights_print
from logit_control import LogitControl
from loop import Loop, leave_group, merged
from packing import IGNORED, documents_leak, predicted_tokens, step_batches
from run_log import RunLog
from speed import Speed
from stop_signal import StopSignal
from tqdm import tqdm

import hf_sigmoid
from hf_sigmoid.context_parallel import check_model, context_parallel, split
from hf_sigmoid.conversions.embedded import checkpoint as resolve


def main(argv: list[str] | None = None) -> Path | None:
    """Train as the command line says; the folder of the final model, None if not finished."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", help="YAML file of the keys of Run in recipes/run_keys.py")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be done; one step of two layers"
    )
    parser.add_argument("--plot", action="store_true", help="draw the log as PNG files at the end")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="win over the file")
    # Intermixed: keys may stand before, between and after the options.
    args = parser.parse_intermixed_args(argv)
    run = run_config.load(args.config, args.overrides)
    try:
        return Training(run).start(dry=args.dry_run, plot=args.plot)
    finally:
        leave_group()


class Training(Loop):
    """One run: `check`, then `build`, then `_steps` does the work."""

    splits_weights = True

    def start(self, *, dry: bool = False, plot: bool = False) -> Path | None:
        if plot:
            training_plots.check()
        self.check(fresh=dry)
        if dry:
            return self._describe()
        final = self.final
        if not self._is_finished():
            self._check_disk()
            self.build()
            final = self._train()
        if final and plot and self.main:
            training_plots.draw(self.folder)
        return final

    def check(self, *, fresh: bool = False) -> None:
        """Everything that can be known, and refused, before the weights are loaded.

        Args:
            fresh: do not go on from a checkpoint.
        """
        run = self.run
        trackers.check(run.log.trackers)
        trained.check(run)
        self._begin(log_with=run.log.trackers, project_dir=str(self.folder))
        with self.accelerator.local_main_process_first():
            self.source = resolve(run.model)
        check_weights(self.source)
        self.twin = twin(self.source, run.attn)
        self.context_group = self.layout.context_group()
        self._refuse_what_cannot_be_divided()
        self._tokenize(self.source)
        self._count_steps()
        self.held_out = HeldOut(
            run.evaluate, self.tokenizer, run.train.block_size, max_positions(self.source)
        )
        self._find_checkpoint(fresh=fresh)
        self.control = LogitControl(run.optim, self.twin)

    def build(self) -> None:
        """The model and its optimiser, ready for a first step."""
        self.model = self._load_model()
        bare = self._bare_model()
        self.speed = Speed(bare, self.accelerator.device, self.run.train.precision)
        groups = optimization.parameter_groups(bare, self.run, self.query_key_names(bare))
        self.optimizer = optimization.make_optimizer(groups, self.run)
        self.control.begin(self.optimizer, self.tokenizer, self.run)
        self.skipped, self.skipped_in_a_row = 0, 0

    def _refuse_what_cannot_be_divided(self) -> None:
        run, layout = self.run, self.layout
        divided = layout.splits_weights or layout.context > 1
        if divided and run.parameters == "lora":
            raise BadInput(
                f"lora.rank: expected one process or data parallel with adapters, got {layout}"
            )
        if layout.splits_weights and run.optim.optimizer == "muon":
            raise BadInput(
                f"optim.optimizer: expected adamw with {layout}, got muon, which orthogonalises "
                "whole matrices"
            )
        if layout.context > 1:
            if run.train.block_size % layout.context:
                raise BadInput(
                    f"train.block_size: expected a multiple of the {layout.context} processes that "
                    f"share a row, got {run.train.block_size}"
                )
            try:
                check_model(self.twin)
            except hf_sigmoid.Unsupported as error:
                raise BadInput(f"parallelism_config_cp_size {layout.context}: {error}") from error
        if self.run.checkpoint.state == "sharded" and not self.layout.splits_weights:
            raise BadInput(
                "checkpoint.state: expected full where no weights are divided, got sharded on "
                f"{self.layout}"
            )

    def _count_steps(self) -> None:
        """The steps of `train.epochs`."""
        run = self.run
        if run.train.epochs is None:
            return
        (documents,) = self.corpus.sources

        def count() -> int:
            bar = tqdm(documents, desc="counting tokens", unit="document")
            return sum(len(self.encode(document)) for document in bar if document.strip())

        tokens = self._on_main(count)
        blocks = self.ranks * run.train.batch_size * run.train.grad_accumulation
        run.counted = max(1, math.ceil(run.train.epochs * tokens / (blocks * run.train.block_size)))
        if run.warmup_steps > run.steps:
            raise BadInput(
                f"optim.warmup_steps: expected at most the {run.steps} steps of "
                f"train.epochs={run.train.epochs}, got {run.warmup_steps}"
            )

    def _sources(self) -> dict[str, str]:
        found = super()._sources()
        if self.run.parameters == "lora" or self.run.checkpoint.state == "sharded":
            found["weights"] = weights_print(self.source)
        return found

    def query_key_names(self, model: Any) -> set[str]:
        return self.control.query_key_names(model)

    def _describe(self) -> None:
        run = self.run
        model = trained.select(self.twin, run)
        groups = optimization.parameter_groups(model, run, self.query_key_names(model))
        lines = dry_run.describe(
            run, model=model, groups=groups, layout=self.layout, corpus=self.corpus,
            blocks=self.blocks_per_step,
        )  # fmt: skip
        for line in lines:
            self._say(line)
        if self.layout.world > 1:
            return
        set_seed(run.seed)
        cut = dry_run.two_layers(self.twin.config, run.attn, self.accelerator.device)
        self._check_documents(cut)
        self.control = LogitControl(run.optim, cut)
        self.model = trained.select(cut, run).train()
        self._say(dry_run.one_step(self, self.model))

    def _check_disk(self) -> None:
        """Room for the final model and for checkpoints, before the work."""
        run = self.run
        model = trained.select(self.twin, run)
        size = {True: 0, False: 0}
        for parameter in model.parameters():
            size[parameter.requires_grad] += 4 * parameter.numel()
        saved = size[True] if run.parameters == "lora" else sum(size.values())
        number = run.checkpoint.keep + 1 if run.checkpoint.every else 1  # one while it is written
        needed = sum(size.values()) + number * (saved + 2 * size[True])
        self._check_room(needed)
        # PEFT has changed the twin, which is a model to ask about; it is not needed any more.
        self.twin = None

    def _load_model(self) -> Any:
        run = self.run
        saved = self.resumed.folder / "model" if self.resumed else None
        whole = saved is not None and run.parameters != "lora" and not self._in_parts()
        config = self.layout.distributed_config()
        # Weights stay in fp32: precision=bf16 is autocast, and small updates are not rounded away.
        with parallel.transformers_shards():
            model = load_model(
                str(saved) if whole else self.source,
                dtype=torch.float32,
                attn=run.attn,
                **({"distributed_config": config} if config else {}),
            )
        if self.layout.fsdp:
            parallel.tie_again(model)
        if config is None:
            # Where it will run: another device is another attention path.
            model.to(self.accelerator.device)
        self._check_documents(model)
        if run.train.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        set_seed(run.seed)  # the start of adapters
        model = trained.select(model, run, adapter=saved).train()
        self.control.bind(model)
        if self.layout.world > 1 and not self.layout.splits_weights:
            model = self.accelerator.prepare(model)
        return model

    def _in_parts(self) -> bool:
        return bool(self.resumed) and self.resumed.manifest["state"] == "sharded"

    def _check_documents(self, model: Any) -> None:
        leak = documents_leak(model)
        parallel.reshard(model)
        if leak:
            raise BadInput(
                f"{type(model).__name__} with attn {model.config._attn_implementation!r} lets the "
                "documents of a packed block see each other; expected one that honours position_ids"
            )

    def _train(self) -> Path | None:
        run, done, pending = self.run, 0, None
        bare = self._bare_model()
        if self.resumed:
            manifest = self.resumed.manifest
            done, pending = manifest["step"], manifest["pending"]
            self.skipped, self.skipped_in_a_row = manifest["skipped"]
            if self._in_parts():
                checkpointing.load_parts(self._part(self.resumed.folder), self.optimizer, bare)
            else:
                file = self.resumed.folder / checkpointing.OPTIMIZER
                checkpointing.load_optimizer(file, self.optimizer, bare)
            self.control.load(self.resumed.folder)
            self._say(f"resuming after step {done} of {run.steps}")
        self._lock()
        if self.main:
            checkpointing.write_text(self.folder / resuming.CONFIG, run_config.dump(run))
            checkpointing.remove_unfinished(self.checkpoints)
            checkpointing.set_aside_damaged(self.checkpoints, self.resumed)
            self.log = RunLog(self.folder / "log.jsonl", after=done - bool(pending))
        self.trackers = trackers.Trackers(self.accelerator, run, self.folder, done)

        self.stop = StopSignal()
        try:
            finished = self._steps(done, pending)
        finally:
            self.stop.restore()
            self.trackers.finish()
            if self.log:
                self.log.close()
            if self.lock:
                self.lock.release()
        if not finished:
            return None
        self._refuse_what_is_not_finite(run.steps)
        finished_model.write(self)
        self._say(f"final model in {self.final}")
        return self.final

    def _steps(self, done: int, pending: dict[str, Any] | None) -> bool:
        """Train from step `done` on; False if a signal ended it early, after saving."""
        run = self.run
        bar = tqdm(total=run.steps, initial=done, unit="step", disable=not self.main)
        with bar:
            if pending and not self._finish_step(done, pending, bar):
                return False
            if not done and self.held_out:
                self.before = self._evaluate()
                if self.before is None:
                    self._say("stopped by a signal before the first step")
                    return False
                self._say(f"held out, before training: {brief(self.before)}")
            for step in range(done + 1, run.steps + 1):
                values, stopping = self.step(step)
                if step == 1 and self.held_out:
                    values["before"] = self.before
                if not self._finish_step(step, values, bar, stopping=stopping):
                    return False
        return True

    def _finish_step(
        self, step: int, values: dict[str, Any], bar: tqdm, *, stopping: bool = False
    ) -> bool:
        """Evaluate if it is time, log and save; False if the run is to end after this step."""
        run, last = self.run, step == self.run.steps
        stopping = stopping and not last
        if self.held_out and (step % run.evaluate.every == 0 or last):
            found = None if stopping else self._evaluate()
            if found is None:
                # What was not measured is measured when the run goes on, and logged then.
                self._save(step, pending=values)
                self._say(f"stopped by a signal; step {step} is saved, its evaluation is to come")
                return False
            values |= found
        if run.evaluate.health_every and (step % run.evaluate.health_every == 0 or last):
            values["health"] = self.control.health()
            parallel.reshard(self._bare_model())
        if self.log:
            self.log.write(step=step, **values)
        self.trackers.log(step, values)
        bar.update(step - bar.n)
        bar.set_postfix_str(_line(values))
        if stopping or (run.checkpoint.every and step % run.checkpoint.every == 0):
            self._save(step)
        if stopping:
            self._say(f"stopped by a signal; step {step} is saved")
        return not stopping

    def _evaluate(self) -> dict[str, Any] | None:
        model = self._bare_model()
        found = self.held_out.measure(
            model, rank=self.rank, ranks=self.ranks, total=self._sum,
            autocast=self.accelerator.autocast, asked_to_stop=self._asked_to_stop,
        )  # fmt: skip
        parallel.reshard(model)
        return found

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
            parallel.reshard(self._bare_model())
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

    def _not_finite(self) -> str | None:
        """A weight that a step has ruined, in what this process holds."""
        for name, parameter in self._bare_model().named_parameters():
            if not parallel.local(parameter).isfinite().all():
                return name
        return None

    def _save(self, step: int, pending: dict[str, Any] | None = None, **state: Any) -> None:
        counts = [self.skipped, self.skipped_in_a_row]
        super()._save(
            step, pending=pending, skipped=counts, state=self.run.checkpoint.state, **state
        )

    def _part(self, folder: Path) -> Path:
        return folder / f"part_{self.layout.rank:05d}.safetensors"

    def _write_checkpoint(self, folder: Path) -> None:
        """What every process adds to a checkpoint; weights that are divided are gathered first."""
        bare, everyone = self._bare_model(), self.layout.splits_weights
        control = self.control.state()  # a sum over the processes where weights are divided
        if self.run.checkpoint.state == "sharded":
            checkpointing.save_parts(self._part(folder), self.optimizer, bare)
            if self.main:
                bare.config.save_pretrained(folder / "model")
                self.tokenizer.save_pretrained(folder / "model")
        elif everyone or self.main:
            checkpointing.save_whole(folder / "model", bare, main=self.main)
            tensors = checkpointing.optimizer_tensors(self.optimizer, bare, keep=self.main)
            if self.main:
                self.tokenizer.save_pretrained(folder / "model")
                checkpointing.write_tensors(folder / checkpointing.OPTIMIZER, tensors)
        if self.main:
            self.control.write(folder, control)

    def log_lines(self) -> list[str]:
        return (self.folder / "log.jsonl").read_text(encoding="utf-8").splitlines()

    def _bare_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model)


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


def _line(values: dict[str, Any]) -> str:
    """The values of a step for the progress line, which has the time that is left already."""
    loss, norm = values["loss"], values["grad_norm"]
    parts = [
        "skipped" if loss is None else f"loss {loss:.4f}, norm {norm:.2g}",
        f"{values['tok_s']:,.0f} tok/s",
        f"MFU {values['mfu']:.1%}" if values["mfu"] else f"{values['tflop_s']:.3g} TFLOP/s",
        f"{values['memory_gb']:.1f} GB",
    ]
    return ", ".join([*parts, *filter(None, [brief(values)])])


if __name__ == "__main__":
    errors.run(main)
