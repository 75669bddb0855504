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
import json
import math
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import checkpointing
import errors
import optimization
import resuming
import run_config
import torch
from accelerate.utils import set_seed
from errors import BadInput
from loading import load_model
from loop import Loop, leave_group
from packing import IGNORED, documents_leak, predicted_tokens, step_batches
from run_log import RunLog
from safetensors.torch import load_file, save_file
from stop_signal import StopSignal
from tqdm import tqdm

import hf_sigmoid  # noqa: F401 (registers the attention functions)
from hf_sigmoid.conversions.embedded import checkpoint as resolve
from hf_sigmoid.conversions.folding import FILE
from hf_sigmoid.conversions.revert import REPORT
from hf_sigmoid.optim import QuacK

CONTROL = "logit_control.safetensors"  # in a checkpoint


def main(argv: list[str] | None = None) -> Path | None:
    """Train as the command line says; the folder of the final model, None if not finished."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", help="YAML file of the keys in recipes/run_config.py")
    parser.add_argument("--dry-run", action="store_true", help="print the parameter groups only")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="win over the file")
    # Intermixed: keys may stand before, between and after the options.
    args = parser.parse_intermixed_args(argv)
    run = run_config.load(args.config, args.overrides)
    try:
        return Training(run).start(dry_run=args.dry_run)
    finally:
        leave_group()


class Training(Loop):
    """One run: what it needs is checked and loaded by `start`, then `_steps` does the work."""

    def start(self, *, dry_run: bool) -> Path | None:
        run = self.run
        self._begin(fresh=dry_run)
        if not dry_run and self._is_finished():
            return self.final
        with self.accelerator.local_main_process_first():
            source = resolve(run.model)
        self._pack(source)

        model = self._load_model(source)
        groups = optimization.parameter_groups(model, run)
        if dry_run:
            self._say(optimization.describe(groups))
            tokens = self.blocks_per_step * run.train.block_size
            self._say(f"{tokens:,} tokens a step, {tokens * run.train.steps:,} in all")
            return None
        if not groups:
            raise BadInput(f"{run.model} has no parameter that trains")
        self.model = self.accelerator.prepare(model)
        self.optimizer = torch.optim.AdamW(
            groups, betas=(run.optim.beta1, run.optim.beta2), eps=run.optim.eps
        )
        return self._train()

    def _load_model(self, source: str) -> torch.nn.Module:
        run = self.run
        # Weights stay in fp32: precision=bf16 is autocast, and small updates are not rounded away.
        folder = str(self.resumed.folder / "model") if self.resumed else source
        model = load_model(folder, dtype=torch.float32, attn=run.attn)
        # Where it will run: another device is another attention path.
        model.to(self.accelerator.device)
        if documents_leak(model):
            raise BadInput(
                f"{type(model).__name__} with attn {model.config._attn_implementation!r} lets the "
                "documents of a packed block see each other; expected one that honours position_ids"
            )
        if run.train.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        return model.train()

    def _train(self) -> Path | None:
        run, done = self.run, 0
        self.control = self._logit_control()
        if self.resumed:
            done = self.resumed.step
            self.packer.load_state(self.resumed.manifest["packer"])
            checkpointing.load_optimizer(
                self.resumed.folder / checkpointing.OPTIMIZER, self.optimizer, self._bare_model()
            )
            if self.control:
                self.control.load_state_dict(load_file(self.resumed.folder / CONTROL))
            self._say(f"resuming after step {done} of {run.train.steps}")
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            checkpointing.write_text(self.folder / resuming.CONFIG, run_config.dump(run))
            checkpointing.remove_unfinished(self.checkpoints)
            self.log = RunLog(self.folder / "log.jsonl", after=done)

        stop = StopSignal()
        try:
            finished = self._steps(done, stop)
        finally:
            stop.restore()
            if self.log:
                self.log.close()
        if not finished:
            return None
        self._check_finite(run.train.steps)
        if self.accelerator.is_main_process:
            checkpointing.publish(self.final, self._write_final)
        self.accelerator.wait_for_everyone()
        self._say(f"final model in {self.final}")
        return self.final

    def _logit_control(self) -> QuacK | None:
        optim = self.run.optim
        if optim.qk_tau is None:
            return None
        probe = torch.arange(8)[None] % self.tokenizer.vocab_size
        try:
            return QuacK(
                self.optimizer, self._bare_model(), probe, tau=optim.qk_tau, rule=optim.qk_rule
            )
        except ValueError as error:
            raise BadInput(f"optim.qk_tau: {error}") from error

    def _write_final(self, folder: Path) -> None:
        checkpointing.save_model(folder, self._bare_model(), self.tokenizer)
        for name in (REPORT, FILE):  # what `hf-sigmoid revert` needs of a converted model
            if (Path(self.run.model) / name).is_file():
                shutil.copy2(Path(self.run.model) / name, folder / name)
        record = {"step": self.run.train.steps, **run_config.flat(self.run)}
        (folder / resuming.RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def _steps(self, done: int, stop: StopSignal) -> bool:
        """Train from step `done` on; False if a signal ended it early, after saving."""
        run = self.run
        bar = tqdm(
            total=run.train.steps,
            initial=done,
            unit="step",
            disable=not self.accelerator.is_main_process,
        )
        with bar:
            for step in range(done + 1, run.train.steps + 1):
                started = time.perf_counter()
                values, stopping = self._step(step, stop)
                tokens_per_step = self.blocks_per_step * run.train.block_size
                values |= {
                    "tokens": step * tokens_per_step,
                    "tok_s": tokens_per_step / (time.perf_counter() - started),
                }
                if self.log:
                    self.log.write(step=step, **values)
                bar.update()
                bar.set_postfix_str(f"loss {values['loss']:.4f}, {values['tok_s']:,.0f} tok/s")
                last = step == run.train.steps
                every = run.checkpoint.every
                if (stopping and not last) or (every and step % every == 0):
                    self._save(step)
                if stopping and not last:
                    self._say(f"stopped by a signal; step {step} is saved")
                    return False
        return True

    def _step(self, step: int, stop: StopSignal) -> tuple[dict[str, Any], bool]:
        """One update. The values to log, and whether any process was asked to stop."""
        run, accelerator = self.run, self.accelerator
        # Dropout's numbers follow from the step, so there is no generator state to save.
        set_seed(((run.seed * 1_000_003 + step) * 4099 + self.rank) % 2**32)
        batches = step_batches(
            self.packer,
            rank=self.rank,
            ranks=self.ranks,
            batch_size=run.train.batch_size,
            grad_accumulation=run.train.grad_accumulation,
        )
        predicted = max(1, int(self._sum(predicted_tokens(batches))[0]))
        total = 0.0
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            with nullcontext() if last else accelerator.no_sync(self.model):
                loss = _summed_cross_entropy(self.model, batch, accelerator.device)
                # DDP averages gradients over the processes; this loss is their sum.
                accelerator.backward(loss * (self.ranks / predicted))
            total += loss.item()
        total, stopping = self._sum(total, float(stop.asked))
        loss = total / predicted
        grad_norm = accelerator.clip_grad_norm_(
            [p for group in self.optimizer.param_groups for p in group["params"]],
            run.optim.clip or math.inf,
        ).item()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise FloatingPointError(
                f"step {step}: loss {loss}, gradient norm {grad_norm}; it changed no weight. "
                + self._last_checkpoint(step - 1)
            )
        factor = optimization.lr_factor(
            step,
            steps=run.train.steps,
            warmup_steps=run.warmup_steps,
            min_ratio=run.optim.min_lr_ratio,
        )
        optimization.set_lr(self.optimizer, factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        values = {"loss": loss, "lr": run.optim.lr * factor, "grad_norm": grad_norm}
        if self.control:
            values["qk_lr"] = [factor * run.optim.lr * m for m in self.control.range]
        return values, bool(stopping)

    def _check_finite(self, step: int) -> None:
        """Refuse to write what a step has ruined."""
        for name, parameter in self._bare_model().named_parameters():
            if not parameter.isfinite().all():
                raise FloatingPointError(
                    f"step {step}: {name} is not finite any more, and nothing was written. "
                    + self._last_checkpoint(step)
                )

    def _last_checkpoint(self, done: int) -> str:
        """Where to go back to, for weights after `done` steps that cannot go on."""
        last = checkpointing.latest(self.checkpoints)
        if last is None:
            return f"There is no checkpoint in {self.checkpoints}"
        same = ", and holds the very weights that this step began with" if last.step == done else ""
        return f"The last checkpoint is {last.folder}{same}"

    def _write_checkpoint(self, folder: Path) -> None:
        checkpointing.save_model(folder / "model", self._bare_model(), self.tokenizer)
        checkpointing.save_optimizer(folder, self.optimizer, self._bare_model())
        if self.control:
            save_file(self.control.state_dict(), folder / CONTROL)

    def _bare_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model)


def _summed_cross_entropy(
    model: Any, batch: dict[str, torch.Tensor], device: torch.device
) -> torch.Tensor:
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    # Without a mask and a cache, transformers reads the documents off position_ids.
    logits = model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        attention_mask=None,
        use_cache=False,
    ).logits
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1),
        batch["labels"].flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )


if __name__ == "__main__":
    errors.run(main)
