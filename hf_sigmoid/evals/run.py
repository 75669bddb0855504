"""An evaluation from its settings to its report: asked of every model, resumable, shared out."""

import importlib.metadata
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hf_sigmoid.errors import BadInput, ChecksFailed
from hf_sigmoid.evals import report, run_file
from hf_sigmoid.evals.checks import Checks, check
from hf_sigmoid.evals.grid import Unit
from hf_sigmoid.evals.loss import Losses, losses
from hf_sigmoid.evals.needle_attention import Observer
from hf_sigmoid.evals.plan import Plan, haystack, plans
from hf_sigmoid.evals.prefix import NoCache
from hf_sigmoid.evals.samples import Sample
from hf_sigmoid.evals.scoring import NoNumbers, Scorer
from hf_sigmoid.evals.settings import Settings
from hf_sigmoid.evals.store import Store
from hf_sigmoid.evals.subjects import Subject, attention_names
from hf_sigmoid.evals.summary import summarise
from hf_sigmoid.evals.world import World
from hf_sigmoid.run_lock import RunLock

PACKAGES = ("torch", "transformers", "hf-sigmoid")


def evaluate(settings: Settings) -> dict[str, Any]:
    """Score every sample that is not scored yet, write the report, return its summary.

    Raises:
        BadInput: a model, text, length or folder that cannot be used: before anything is written,
            but for a model that turns out to have no cache, or not all of its weights.
        ChecksFailed: a model whose scores cannot be believed; what was scored before is reported.
    """
    world = World.find()
    subjects = [
        Subject.find(model, attn, settings.rope)
        for model in settings.models
        for attn in settings.attn
    ]
    subjects = list({subject.name: subject for subject in subjects}.values())
    text = haystack(settings, subjects[0].tokenizer)
    asked = plans(settings, subjects, text.content)
    with _alone(settings.out, world):
        return _Run(settings, world, asked, text).go()


@contextmanager
def _alone(folder: Path, world: World) -> Iterator[None]:
    """The only run in a folder, which is gone again if it was made for nothing."""
    lock, made = None, not folder.exists()
    if world.is_first:
        folder.mkdir(parents=True, exist_ok=True)
        lock = RunLock(folder, "--out")
    world.wait()
    try:
        yield
    except BaseException:
        if world.size > 1:
            raise  # others may be writing: the lock goes when the launcher has ended all
        _release(lock, folder, made)
        raise
    _release(lock, folder, made)


def _release(lock: RunLock | None, folder: Path, made: bool) -> None:
    if lock is not None:
        lock.release(remove=True)
        if made and not any(folder.iterdir()):
            with suppress(OSError):
                folder.rmdir()


class _Run:
    """What the processes do: each its part of the units that are missing."""

    def __init__(self, settings: Settings, world: World, asked: Sequence[Plan], text: Any):
        self.settings, self.world, self.asked = settings, world, asked
        self.config = settings.digest(text.sha256)
        self.weights = {plan.subject.name: plan.subject.weights for plan in asked}
        self.kept = Store(settings.out, self.config, self.weights)
        for plan in asked:
            plan.agree(self.kept)
        self.known = run_file.read(settings.out)
        self.versions = {
            name.replace("-", "_"): importlib.metadata.version(name) for name in PACKAGES
        }
        self.about = {
            "config": self.config, "seed": settings.grid.seed,
            "haystack": text.name + (", repeated" if settings.repeat_haystack else ""),
            "dtype": settings.dtype, "device": torch.device(settings.device).type,
            "scores": list(settings.scores), "versions": self.versions,
        }  # fmt: skip

    def go(self) -> dict[str, Any]:
        """Ask every model; the first process returns the summary, the others {}."""
        order = [key for plan in self.asked for key in plan.order]
        self.world.wait()  # nobody writes before all have read
        if self.world.is_first and self.kept.has_parts:
            self.kept.merge(order)
        self.world.wait()  # nor before what earlier processes wrote is safe
        done: list[Plan] = []
        total = len(order) + sum(len(plan.windows) for plan in self.asked)
        try:
            with tqdm(total=total, unit="sample", disable=not self.world.is_first) as bar:
                for plan in self.asked:
                    self._ask(plan, bar)
                    done.append(plan)
        except Exception:
            if done and self.world.size == 1:
                self._report(done)
            raise
        finally:
            self.kept.close()
        self.world.wait()
        if not self.world.is_first:
            return {}
        if self.world.size > 1:
            self.kept = Store(self.settings.out, self.config, self.weights)
            self.kept.merge(order)
        return self._report(self.asked)

    def _report(self, asked: Sequence[Plan]) -> dict[str, Any]:
        known = {model["name"]: model for model in run_file.read(self.settings.out)["models"]}
        models, found = [], {}
        for plan in asked:
            name, written = plan.subject.name, self._losses(plan.subject)
            own = self._about(plan, known[name]["checks"])
            own["windows"] = written.known(own["windows"])
            found[name] = written.read(own["windows"])
            models.append(own)
        samples = [self.kept.done[key] for plan in asked for key in plan.order]
        summary = summarise(samples, models, self.about, found)
        report.write(self.settings.out, summary)
        return summary

    def _losses(self, subject: Subject) -> Losses:
        return Losses(self.settings.out, [subject.name, subject.weights, self.config])

    def _ask(self, plan: Plan, bar: tqdm) -> None:
        """Score a model's missing samples, read its missing windows."""
        subject, rank, size = plan.subject, self.world.rank, self.world.size
        units, written = plan.missing(self.kept), self._losses(subject)
        unread = plan.windows.keys() - written.known(plan.windows)
        # By their number, since other processes may be writing already.
        mine = [window for window in list(plan.windows)[rank::size] if window in unread]
        done = sum(key in self.kept.done for key in plan.order)
        bar.update(done + len(plan.windows) - len(unread))
        checks = (self._known(subject) or {}).get("checks")
        if not (units or unread or checks is None):
            self._note(plan, checks)
            return
        bar.set_description(subject.name[-30:])
        dtype = getattr(torch, self.settings.dtype)
        model = subject.load(dtype, self.world.device(self.settings.device))
        try:
            if checks is None or units:
                checks = self._check(model, plan)
            self._note(plan, checks)
            self._score(model, plan, units[rank::size], bar)
            for window in mine:
                found = losses(model, plan.windows[window])
                if not found.isfinite().all():
                    raise NoNumbers("a loss is not a number")
                written.write(window, found)
                bar.update()
        except NoCache as error:
            raise BadInput(f"{subject.name}: {error}: it cannot be evaluated") from None
        except NoNumbers as error:
            raise ChecksFailed(f"{subject.name}: {error}") from None

    def _check(self, model: Any, plan: Plan) -> dict[str, Any]:
        """At the shortest and the longest prompts of the first task, each beside another."""
        grid = plan.grid
        spec, depth = grid.specs[0], grid.depths[len(grid.depths) // 2]
        found = []
        for length in dict.fromkeys([grid.lengths[0], grid.lengths[-1]]):
            probe, other = (
                plan.builder.build(
                    spec, length=length, depth=depth if spec.has_depth else None,
                    seed=grid.seed, index=index,
                )
                for index in range(2)
            )  # fmt: skip
            found.append(check(model, probe, other, brief=bool(found)))
        checks = Checks.worst(found)
        if any(map(math.isnan, checks.failed.values())):
            raise ChecksFailed(f"{plan.subject.name}: its log-probabilities are not numbers")
        if checks.failed and self.settings.checks == "stop":
            raise ChecksFailed(
                f"{plan.subject.name}: an answer read at once and one read otherwise differ, "
                + ", ".join(f"{name} by {value:.3g}" for name, value in checks.failed.items())
                + f" nats, expected at most {checks.tolerance:g}: its scores cannot be believed; "
                "--checks record evaluates it all the same"
            )
        return checks.record()

    def _note(self, plan: Plan, checks: dict[str, Any] | None) -> None:
        """The model in run.json, with what earlier runs found of it."""
        if not self.world.is_first:
            return
        model, known = self._about(plan, checks), self._known(plan.subject)
        if known:
            model["extrapolates"] |= known["extrapolates"]
            model["windows"] = model["windows"] or known["windows"]
            if known["checks"] and not known["checks"]["passed"]:
                model["checks"] = known["checks"]
        run_file.write(self.settings.out, self.about, [model])

    def _about(self, plan: Plan, checks: dict[str, Any] | None) -> dict[str, Any]:
        subject = plan.subject
        return {
            "name": subject.name, "model": subject.path, "attn": subject.runs,
            "weights": subject.weights, "rope": subject.rope, "positions": subject.positions,
            "extrapolates": bool(subject.positions and plan.longest > subject.positions),
            "prompt": "chat" if plan.builder.frame else "base",
            "round_trips": plan.builder.round_trips, "checks": checks,
            "windows": list(plan.windows),
        }  # fmt: skip

    def _score(self, model: Any, plan: Plan, units: Sequence[Unit], bar: tqdm) -> None:
        subject, settings = plan.subject, self.settings
        scorer = Scorer(model, subject.tokenizer, settings.scores)
        observer = self._observer(model, subject) if settings.attention else None
        part = self.world.rank if self.world.size > 1 else None
        for unit in units:
            samples = plan.grid.build(plan.builder, unit)
            watched = [sample.index < settings.attention for sample in samples]
            results = scorer.score(samples, observer=observer if any(watched) else None)
            lines = []
            for sample, result, seen in zip(samples, results, watched, strict=True):
                if not seen:
                    result.pop("attention", None)
                lines.append(self._line(subject, model, sample, result))
            bar.update(self.kept.append(lines, part=part))

    def _observer(self, model: Any, subject: Subject) -> Observer | None:
        """None, and a line of it, of a model that cannot be observed."""
        try:
            return Observer(model)
        except ValueError as error:
            if self.world.is_first:
                tqdm.write(f"{subject.name}: no attention on the needle: {error}", sys.stderr)
            return None

    def _line(self, subject: Subject, model: Any, sample: Sample, result: dict) -> dict[str, Any]:
        judged = result.get("teacher") or result["generate"]
        return {
            "name": subject.name,
            "model": subject.path,
            "attn": attention_names(model),
            "weights": subject.weights,
            "rope": subject.rope,
            "config": self.config,
            "versions": self.versions,
            **sample.record(),
            "correct": judged["correct"],
            "logprob": judged.get("logprob"),
            **result,
        }

    def _known(self, subject: Subject) -> dict[str, Any] | None:
        """What run.json says of these weights."""
        if self.known is None or self.known["config"] != self.config:
            return None
        for model in self.known["models"]:
            if model["name"] == subject.name and model["weights"] == subject.weights:
                return model
        return None
