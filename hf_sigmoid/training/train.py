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
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed
from safetensors.torch import save_file
from tqdm import tqdm

from hf_sigmoid.files import write_text
from hf_sigmoid.shards import reshard
from hf_sigmoid.training import (
    checkpointing,
    dry_run,
    finished_model,
    opening,
    optimization,
    parallel,
    resuming,
    run_config,
    trackers,
    trained,
    training_plots,
)
from hf_sigmoid.training.held_out import brief
from hf_sigmoid.training.logit_control import LogitControl
from hf_sigmoid.training.loop import GO_ON, leave_group
from hf_sigmoid.training.run_log import RunLog
from hf_sigmoid.training.update import Update


def main(argv: list[str] | None = None) -> Path | None:
    """Train as the command line says; the folder of the final model, None if not finished.

    Raises:
        BadInput: before anything is written.
        FloatingPointError: the run diverged.
        KeyboardInterrupt: Ctrl-C, after what was done is saved; a second one, at once.
    """
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


class Training(Update):
    """One run: `check`, `build`, then `_steps` does the work."""

    def start(self, *, dry: bool = False, plot: bool = False) -> Path | None:
        if plot:
            training_plots.check()
        self.check(fresh=dry)
        if dry:
            return self._describe()
        final = self.final
        if not self._is_finished():
            # PEFT changes the twin, which is a model to ask about; it is not needed afterwards.
            model, self.twin = trained.select(self.twin, self.run), None
            self._open(model)
            self._check_disk(model)
            self.build()
            final = self._train()
        if final and plot and self.main:
            training_plots.draw(self.folder)
        return final

    def _describe(self) -> None:
        run = self.run
        model = trained.select(self.twin, run)
        self._open(model)
        groups = optimization.parameter_groups(model, run, self.query_key_names(model))
        lines = dry_run.describe(
            run, model=model, groups=groups, layout=self.layout, blocks=self.blocks_per_step
        )
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

    def _open(self, model: Any) -> None:
        """The first lines."""
        if not self.main:
            return
        size = {True: 0, False: 0}
        for parameter in model.parameters():
            size[parameter.requires_grad] += parameter.numel()
        kind = f"train.parameters={self.run.parameters}"
        trains = opening.parameters(kind, size[True], sum(size.values()))
        attention = model.config._attn_implementation
        for line in opening.describe(self, model, attention, [trains], self.counted):
            self._say(line)

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
            write_text(self.folder / resuming.CONFIG, run_config.dump(run))
            checkpointing.remove_unfinished(self.checkpoints)
            checkpointing.set_aside_damaged(self.checkpoints, self.resumed)
            self.log = RunLog(self.folder / "log.jsonl", after=done - bool(pending))
        self.trackers = trackers.Trackers(self.accelerator, run, self.folder, done)

        with self.stop:
            try:
                finished = self._steps(done, pending)
            finally:
                self.trackers.finish()
                if self.log:
                    self.log.close()
                if self.lock:
                    self.lock.release()
            if not finished:
                return None
            self._refuse_what_is_not_finite(run.steps)
            # Whoever asks to stop now would lose the last steps: it is written to its end.
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
                    return self._stopped("before the first step: the same command begins anew")
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
                return self._stopped(f"in the evaluation of step {step}, which is saved: {GO_ON}")
            values |= found
        if run.evaluate.health_every and (step % run.evaluate.health_every == 0 or last):
            values["health"] = self.control.health()
            reshard(self._bare_model())
        if self.log:
            self.log.write(step=step, **values)
        self.trackers.log(step, values)
        bar.update(step - bar.n)
        bar.set_postfix_str(_line(values))
        if stopping or (run.checkpoint.every and step % run.checkpoint.every == 0):
            self._save(step)
        if stopping:
            return self._stopped(f"step {step} is saved: {GO_ON}")
        return True

    def _evaluate(self) -> dict[str, Any] | None:
        model = self._bare_model()
        found = self.held_out.measure(
            model, rank=self.rank, ranks=self.ranks, total=self._sum,
            autocast=self.accelerator.autocast, asked_to_stop=self._asked_to_stop,
        )  # fmt: skip
        reshard(model)
        return found

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
                save_file(tensors, folder / checkpointing.OPTIMIZER)
        if self.main:
            self.control.write(folder, control)

    def log_lines(self) -> list[str]:
        return (self.folder / "log.jsonl").read_text(encoding="utf-8").splitlines()


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
