"""Distil a softmax model's attention into its sigmoid (or ssmax) conversion.

    accelerate launch recipes/distil_attention.py --config recipes/sigmoid/distil.yaml \
        model=CONVERTED output_dir=runs/distilled KEY=VALUE …

First layer by layer, every attention module on what it gets in the softmax model, then (optional)
the whole model on the softmax model's next-token distributions. CONVERTED is a folder that
`hf-sigmoid convert` wrote; the softmax model is inside it. What comes out is a checkpoint like
CONVERTED, without any parameter of this recipe. A killed run goes on from its last complete
checkpoint and repeats an uninterrupted one to the last bit.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from safetensors.torch import save_file
from tqdm import tqdm

import hf_sigmoid  # noqa: F401 (registers the attention functions)
from hf_sigmoid import embedded
from hf_sigmoid.checkpoint_files import give_back
from hf_sigmoid.configuration import find_section
from hf_sigmoid.conversions import folding, perplexity, pictures
from hf_sigmoid.conversions.card import card
from hf_sigmoid.conversions.companions import copy_companions
from hf_sigmoid.conversions.models import model_class
from hf_sigmoid.conversions.plan import Plan
from hf_sigmoid.conversions.report import markdown
from hf_sigmoid.conversions.revert import REPORT, check_untrained, hashed
from hf_sigmoid.errors import BadInput
from hf_sigmoid.files import write_text
from hf_sigmoid.loading import check_source, load_model
from hf_sigmoid.rope import RECORD as ROPE
from hf_sigmoid.training import checkpointing, held_out, opening, optimization, resuming, run_config
from hf_sigmoid.training.distillation import Distillation, load_trained, softmax_inside
from hf_sigmoid.training.loop import GO_ON, Loop, leave_group
from hf_sigmoid.training.packing import IGNORED, documents_leak, predicted_tokens, step_batches
from hf_sigmoid.training.run_keys import Distil
from hf_sigmoid.training.run_log import RunLog

TRAINED = "trained.safetensors"


def main(argv: list[str] | None = None) -> Path | None:
    """Distil as the command line says; the folder of the final model, None if not finished.

    Raises:
        BadInput: before anything is written.
        FloatingPointError: the run diverged.
        KeyboardInterrupt: Ctrl-C, after what was done is saved; a second one, at once.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", help="YAML file of the keys of Distil in recipes/run_keys.py")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="win over the file")
    args = parser.parse_intermixed_args(argv)
    run = run_config.load(args.config, args.overrides, Distil)
    try:
        return Run(run).start()
    finally:
        leave_group()


class Run(Loop):
    """One run: what it needs is checked and loaded by `start`, then `_steps` does the work."""

    def start(self) -> Path | None:
        run = self.run
        check_source(run.model)
        self._begin()
        self._tokenize(run.model)
        self._find_checkpoint()
        if self._is_finished():
            return self.final
        self.held_out = self._held_out()
        self._load()
        return self._distil()

    def _held_out(self) -> dict[str, torch.Tensor]:
        """Windows `[windows, block_size]` of each file to evaluate on, by its name."""
        asked = self.run.evaluate
        return held_out.windows(
            held_out.read_texts(asked.path),
            asked.windows,
            self.tokenizer,
            self.run.train.block_size,
        )

    def _load(self) -> None:
        run, resumed = self.run, self.resumed
        # As it was saved, so that the softmax model inside can be told by its hash.
        student = load_model(run.model)
        if getattr(student, "is_quantized", False):
            raise BadInput(
                f"model {run.model}: expected weights that can be trained, got quantised ones"
            )
        if (cls := model_class(student.config)) is not type(student):
            raise BadInput(
                f"model {run.model}: expected a causal language model, got a {cls.__name__}"
            )
        section = getattr(student.config, "hf_sigmoid", None)
        if not section and find_section(student.config):
            raise BadInput(
                f"model {run.model}: expected a plain language model, got a {cls.__name__}, of "
                "which a part is converted"
            )
        if not section:
            raise BadInput(
                f"model {run.model}: expected a converted checkpoint, got one that runs softmax: "
                "hf-sigmoid convert makes one"
            )
        if not section["learn"]:
            raise BadInput(f"model {run.model}: its row numbers are constants, none can be trained")
        if run.layerwise.steps and hasattr(student.config, ROPE):
            raise BadInput(
                f"layerwise.steps: expected 0 for {run.model}, whose RoPE was changed: its softmax "
                "model's inputs are rotated otherwise"
            )
        try:
            self.folded = folding.Folded.load(run.model)
        except ValueError as error:
            raise BadInput(str(error)) from None
        if self.folded is not None and not self.folded.untouched(student):
            if run.teacher is None:
                raise BadInput(
                    f"model {run.model}: its projections were trained since it was distilled: give "
                    "teacher=SOFTMAX_CHECKPOINT"
                )
            self.folded.originals.clear()  # they are not those of these weights
        stages = [s.train for s in (run.layerwise, run.end_to_end) if s.steps]
        if run.teacher is None:
            teacher = softmax_inside(student, self.folded, set(stages))
            self._check_source(teacher)
        else:
            teacher = self._load_teacher(student)
        self._check_disk(student, set(stages))
        self.weights = {
            name: hashed(model) for name, model in (("model", student), ("teacher", teacher))
        }
        if resumed and resumed.manifest["weights"] != self.weights:
            raise BadInput(f"model or teacher is not what {resumed.folder} was distilled from")
        device = self.accelerator.device
        student.to(device)
        teacher.to(device)
        if documents_leak(student):
            raise BadInput(
                f"{type(student).__name__} lets the documents of a packed block see each other; "
                "expected a model that honours position_ids"
            )
        self.probe = torch.tensor([self.tokenizer("The attention of every head")["input_ids"]])
        self.probe = self.probe.to(device)
        set_seed(run.seed)  # the start of low-rank changes
        rank = run.optim.lora_rank if "lora" in stages else None
        attention = student.config._attn_implementation  # before it is that of this recipe
        self.distillation = Distillation(student, teacher, lora_rank=rank, probe=self.probe)
        self.named, trains, total = {}, [], sum(p.numel() for p in student.parameters())
        for name in ("layerwise", "end_to_end"):
            if (stage := getattr(run, name)).steps:
                chosen = self.distillation.select(stage.train)
                self.named |= chosen
                number = sum(p.numel() for p in chosen.values())
                what = f"{name}, {stage.steps:,} steps, {stage.train}"
                trains.append(opening.parameters(what, number, total))
        for line in opening.describe(self, student, attention, trains) if self.main else ():
            self._say(line)
        if resumed:
            load_trained(resumed.folder / TRAINED, self.named)
            self.packer.load_state(resumed.manifest["packer"])
            self._say(f"resuming after step {resumed.step} of {run.steps}")

    def _load_teacher(self, student: Any) -> Any:
        source = self.run.teacher
        with self.accelerator.local_main_process_first():
            path = embedded.checkpoint(source)
        teacher = load_model(path)
        if getattr(teacher.config, "hf_sigmoid", None):
            raise BadInput(f"teacher {source}: expected a softmax model, got a converted one")
        for key in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers"):
            expected, given = (getattr(m.config, key, None) for m in (student, teacher))
            if given != expected:
                raise BadInput(f"teacher {source}: expected {key} {expected}, got {given}")
        return teacher

    def _check_disk(self, student: Any, trains: set[str]) -> None:
        """Room for the final model and for checkpoints of what trains, before the work."""
        run = self.run
        sizes = {name: p.numel() * 4 for name, p in student.named_parameters()}
        inside = {
            "all": sizes.values(),
            "projections": [size for name, size in sizes.items() if "attn" in name],
        }
        trained = max((sum(inside[name]) for name in trains & inside.keys()), default=0)
        # Each checkpoint holds what trains and Adam's two moments of it; one more while written.
        checkpoints = run.checkpoint.keep + 1 if run.checkpoint.every else 1
        self._check_room(sum(sizes.values()) + 3 * trained * checkpoints)

    def _check_source(self, teacher: Any) -> None:
        """The softmax model inside the checkpoint must be the one that it was converted from."""
        run = self.run
        try:
            same = check_untrained(teacher, run.model)
        except ValueError as error:
            raise BadInput(f"model {run.model}: {error}; give teacher=SOFTMAX_CHECKPOINT") from None
        if not same:
            raise BadInput(
                f"model {run.model} was trained since it was converted, so that it holds no "
                "softmax model to distil: give teacher=SOFTMAX_CHECKPOINT"
            )

    def _distil(self) -> Path | None:
        run, done = self.run, self.resumed.step if self.resumed else 0
        self.errors: list[dict[str, float]] = [{}, {}]  # of the first and last layer-wise step
        self.perplexity: dict[str, float] = {}  # when it was last measured
        self.seconds = 0.0  # of all steps, also of earlier sessions
        self._lock()
        if self.main:
            write_text(self.folder / resuming.CONFIG, run_config.dump(run))
            checkpointing.remove_unfinished(self.checkpoints)
            checkpointing.set_aside_damaged(self.checkpoints, self.resumed)
            self.log = RunLog(self.folder / "log.jsonl", after=done)
            for line in self.log.kept:
                self._note(line)
        with self.stop:
            try:
                finished = self._steps(done)
            finally:
                if self.log:
                    self.log.close()
                if self.lock:
                    self.lock.release()
            if not finished:
                return None
            self._refuse_what_is_not_finite(run.steps)
            # Whoever asks to stop now would lose the last steps: it is written to its end.
            self._finish()
        self._say(f"final model in {self.final}")
        return self.final

    def _finish(self) -> None:
        """The final model, without what this recipe added to it."""
        run = self.run
        # The source's tensors make `revert` exact, as long as nothing but numbers was trained.
        numbers_only = {
            stage.train for stage in (run.layerwise, run.end_to_end) if stage.steps
        } == {"numbers"}
        folded = self.distillation.finish(self.probe, keep_originals=numbers_only)
        if self.folded is not None:
            kept = numbers_only and bool(self.folded.originals)
            folded = self.folded.and_then(folded, keep_originals=kept)
        checkpointing.publish(
            self.final,
            lambda to: self._write_final(to, folded) if self.main else None,
            main=self.main,
            wait=self.accelerator.wait_for_everyone,
        )
        self.accelerator.wait_for_everyone()

    def _write_final(self, folder: Path, folded: folding.Folded) -> None:
        run = self.run
        checkpointing.save_model(folder, self.distillation.student, self.tokenizer)
        give_back(folder, run.model)
        copy_companions(run.model, folder)
        if folded.factors:
            folded.save(folder, self.distillation.student, run.model)
        record = {"step": run.steps, "seconds": round(self.seconds, 1), **run_config.flat(run)}
        (folder / resuming.RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        source = Path(run.model) / REPORT
        if source.is_file():
            self._write_reports(folder, json.loads(source.read_text(encoding="utf-8")), record)

    def _write_reports(self, folder: Path, report: dict, record: dict) -> None:
        """The conversion's report and card, with what was done here."""
        tokens = self.run.steps * self.blocks_per_step * self.run.train.block_size
        first, last = self.errors
        # Names, not places: the report goes where the model goes.
        places = ("model", "teacher", "output_dir", "data.path", "evaluate.path")
        kept = {key: value for key, value in record.items() if key not in places}
        done = {
            **kept, "tokens": tokens, "perplexity": self.perplexity,
            "output_errors_before": first, "output_errors": last,
        }  # fmt: skip
        report.setdefault("distillations", []).append(done)
        plan = Plan.from_json(json.dumps(report["plan"]))
        report["pictures"] = pictures.draw(folder, self.distillation.student, report)
        (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        for name, text in (
            ("report.md", markdown(report, plan)),
            ("README.md", card(report, plan, folder.name.removesuffix(".tmp"))),
        ):
            (folder / name).write_text(text, encoding="utf-8")

    def _steps(self, done: int) -> bool:
        """Train from step `done` on; False if a signal ended it early, after saving."""
        run, distillation = self.run, self.distillation
        bar = tqdm(total=run.steps, initial=done, unit="step", disable=not self.main)
        with bar:
            for step in range(done + 1, run.steps + 1):
                first = step in (done + 1, run.layerwise.steps + 1)
                stage = run.layerwise if step <= run.layerwise.steps else run.end_to_end
                if first:
                    self.trained = distillation.select(stage.train)
                    self.optimizer = self._optimizer(stage)
                    # A stage begins with an optimiser of its own.
                    if self.resumed and step == done + 1 and step != run.layerwise.steps + 1:
                        checkpointing.load_optimizer(
                            self.resumed.folder / checkpointing.OPTIMIZER,
                            self.optimizer,
                            distillation.student,
                        )
                started = time.perf_counter()
                values, stopping = self._step(step, stage)
                tokens = self.blocks_per_step * run.train.block_size
                values |= {
                    "tokens": step * tokens,
                    "tok_s": tokens / (time.perf_counter() - started),
                }
                last = step == run.steps
                if self.held_out and (step % run.evaluate.every == 0 or last):
                    distillation.blend(1.0)  # the model that comes out, not the mixture
                    values["perplexity"] = {
                        name: perplexity(distillation.student, windows, progress=False)
                        for name, windows in self.held_out.items()
                    }
                    stopping = self._asked_to_stop()  # it may have come in so long a time
                self._note(values)
                if self.log:
                    self.log.write(step=step, **values)
                bar.update()
                bar.set_postfix_str(f"loss {values['loss']:.4f}, {values['tok_s']:,.0f} tok/s")
                every = run.checkpoint.every
                if (stopping and not last) or (every and step % every == 0):
                    self._save(step, weights=self.weights)
                if stopping and not last:
                    return self._stopped(f"step {step} is saved: {GO_ON}")
        return True

    def _note(self, line: dict[str, Any]) -> None:
        """What the final report tells of a step."""
        if layers := line.get("layers"):
            last = dict(zip(self.distillation.modules, layers, strict=True))
            self.errors = [self.errors[0] or last, last]
        self.perplexity = line.get("perplexity", self.perplexity)
        self.seconds += self.blocks_per_step * self.run.train.block_size / line["tok_s"]

    def _optimizer(self, stage: Any) -> torch.optim.Optimizer:
        optim = self.run.optim
        numbers = {
            name: p
            for name, p in self.trained.items()
            if {"log_length", "head_scales"} & {*name.split(".")}
        }
        rest = [p for name, p in self.trained.items() if name not in numbers]
        groups = [
            {"params": list(numbers.values()), "peak_lr": stage.numbers_lr},
            {"params": rest, "peak_lr": stage.lr},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=0.0,
        )  # fmt: skip

    def _step(self, step: int, stage: Any) -> tuple[dict[str, Any], bool]:
        """One update. The values to log, and whether any process was asked to stop."""
        run, distillation, device = self.run, self.distillation, self.accelerator.device
        layerwise = stage is run.layerwise
        within = step if layerwise else step - run.layerwise.steps
        batches = step_batches(
            self.packer,
            rank=self.rank,
            ranks=self.ranks,
            batch_size=run.train.batch_size,
            grad_accumulation=run.train.grad_accumulation,
        )
        if not layerwise:
            fade = run.end_to_end.blend * stage.steps
            distillation.blend(min(1.0, within / fade) if fade else 1.0)
        predicted = max(1, int(self._sum(predicted_tokens(batches))[0]))
        total, errors = 0.0, []
        for batch in batches:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with self.accelerator.autocast():
                if layerwise:
                    share = 1 / (len(batches) * self.ranks)
                    errors.append(distillation.layerwise(batch, scale=share))
                    continue
                loss = distillation.end_to_end(batch, kl=run.end_to_end.kl, ignored=IGNORED)
            (loss / predicted).backward()
            total += loss.item()
        values = [total, float(self.stop.asked)]
        if layerwise:
            names = list(distillation.modules)
            values += [sum(e[name] for e in errors) / (len(errors) * self.ranks) for name in names]
        total, stopping, *rest = self._sum(*values)
        if layerwise:
            loss, extra = sum(rest) / len(rest), {"layers": [round(e, 5) for e in rest]}
        else:
            loss, extra = total / predicted, {}
        self._reduce_gradients()
        norm = self._clip(layerwise)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(f"step {step}: loss {loss}, gradient norm {norm}")
        factor = optimization.lr_factor(
            within,
            steps=stage.steps,
            warmup_steps=max(1, int(run.optim.warmup * stage.steps)),
            min_ratio=run.optim.min_lr_ratio,
        )
        optimization.set_lr(self.optimizer, factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        name = "layerwise" if layerwise else "end_to_end"
        return {"stage": name, "loss": loss, "grad_norm": norm, **extra}, bool(stopping)

    def _reduce_gradients(self) -> None:
        """Sum over the processes: hooks run backward module by module, which DDP cannot wrap."""
        if self.ranks == 1:
            return
        for parameter in self.trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = self.accelerator.reduce(parameter.grad, "sum")

    def _clip(self, layerwise: bool) -> float:
        """Clip each module's gradients alone where they are independent; the largest norm."""
        limit = self.run.optim.clip or math.inf
        groups = [list(self.trained.values())]
        if layerwise:
            groups = [
                [p for name, p in self.trained.items() if name.startswith(f"{module}.")]
                for module in self.distillation.modules
            ]
        norms = [torch.nn.utils.clip_grad_norm_(group, limit).item() for group in groups if group]
        return max(norms) if all(map(math.isfinite, norms)) else math.inf

    def _not_finite(self) -> str | None:
        return next((name for name, p in self.named.items() if not p.isfinite().all()), None)

    def _write_checkpoint(self, folder: Path) -> None:
        if not self.main:
            return
        trained = {name: p.detach().cpu().contiguous() for name, p in self.named.items()}
        save_file(trained, folder / TRAINED)
        checkpointing.save_optimizer(folder, self.optimizer, self.distillation.student)
