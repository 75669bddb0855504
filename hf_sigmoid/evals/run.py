"""An evaluation from its settings to its report: asked of every model, resumable, shared out."""

import importlib.metadata
import math
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals import loss, report, run_file, store
from hf_sigmoid.evals.checks import check
from hf_sigmoid.evals.grid import Unit
from hf_sigmoid.evals.needle_attention import Observer
from hf_sigmoid.evals.plan import Plan, haystack, plans
from hf_sigmoid.evals.prefix import NoCache
from hf_sigmoid.evals.samples import Sample
from hf_sigmoid.evals.scoring import Scorer
from hf_sigmoid.evals.settings import Settings
from hf_sigmoid.evals.subjects import Subject
from hf_sigmoid.evals.summary import summarise
from hf_sigmoid.evals.world import World
from hf_sigmoid.loading import twin


class ChecksFailed(RuntimeError):
    """A model gives one answer this way and another that way."""


def evaluate(settings: Settings) -> dict[str, Any]:
    """Score every sample that is not scored yet, write the report, return its summary.

    Raises:
        BadInput: before anything is written: a model, text, length or folder that cannot be used.
        ChecksFailed: a model whose scores cannot be believed.
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
    config = settings.digest(text.sha256)
    weights = {subject.name: subject.weights for subject in subjects}
    kept = store.Store(settings.out, config, weights)
    order = [(plan.subject.name, key) for plan in asked for key in plan.check(kept, settings)]
    run = _Run(settings, world, kept, config, {"haystack": text.name})
    known = run_file.read(settings.out)
    world.wait()  # nobody writes before all have read
    if world.is_first and kept.has_parts:
        kept.merge(order)
    world.wait()  # nor before what earlier processes wrote is safe
    total = len(order) + settings.loss * len(asked)
    with tqdm(total=total, unit="sample", disable=not world.is_first) as bar:
        for plan in asked:
            run.ask(plan, known, bar)
    kept.close()
    world.wait()
    if not world.is_first:
        world.wait()
        return {}
    if world.size > 1:
        kept = store.Store(settings.out, config, weights)
        kept.merge(order)
    summary = summarise(
        [kept.done[key] for key in order],
        [model for model in run_file.read(settings.out)["models"] if model["name"] in weights],
        run.about,
        {plan.subject.name: run.losses.read(plan.losses, settings.loss) for plan in asked},
    )
    report.write(settings.out, summary)
    world.wait()
    return summary


class _Run:
    """What the processes do: each its part of the units that are missing."""

    def __init__(
        self, settings: Settings, world: World, kept: store.Store, config: str, about: dict
    ):
        self.settings, self.world, self.kept = settings, world, kept
        self.losses = loss.Losses(settings.out, config)
        self.about = {
            "config": config, "seed": settings.grid.seed, **about, "dtype": settings.dtype,
            "scores": list(settings.scores),
            "versions": {
                name.replace("-", "_"): importlib.metadata.version(name)
                for name in ("torch", "transformers", "hf-sigmoid")
            },
        }  # fmt: skip

    def ask(self, plan: Plan, known: dict | None, bar: tqdm) -> None:
        """Score a model's missing samples, read its missing windows."""
        settings, subject = self.settings, plan.subject
        units, scored = [], 0
        for unit in plan.grid.units:
            keys = [s.key for s in plan.grid.build(plan.builder, unit)]
            missing = [key for key in keys if (subject.name, key) not in self.kept.done]
            scored += len(keys) - len(missing)
            if missing:
                units.append(unit)
        unread = [n for n in range(len(plan.windows)) if not self.losses.has(plan.losses, n)]
        bar.update(scored + len(plan.windows) - len(unread))
        checks = _checked(known, subject)
        if not (units or unread or checks is None):
            self._note(plan, checks)
            return
        bar.set_description(subject.name[-30:])
        dtype = getattr(torch, settings.dtype)
        model = subject.load(dtype, self.world.device(settings.device))
        try:
            if checks is None or units:
                checks = self._check(model, plan)
            self._note(plan, checks)
            self._score(model, plan, units[self.world.rank :: self.world.size], bar)
            for number in unread[self.world.rank :: self.world.size]:
                found = loss.losses(model, plan.windows[number])
                self.losses.write(plan.losses, number, found, subject.weights)
                bar.update()
        except NoCache as error:
            raise BadInput(f"{subject.name}: {error}: it cannot be evaluated") from None

    def _check(self, model: Any, plan: Plan) -> dict[str, Any]:
        """Of the first cell's sample, beside another."""
        grid = plan.grid
        spec, length = grid.specs[0], grid.lengths[0]
        depth = grid.depths[len(grid.depths) // 2] if spec.has_depth else None
        probe, other = (
            plan.builder.build(spec, length=length, depth=depth, seed=grid.seed, index=index)
            for index in range(2)
        )
        checks = check(model, probe, other)
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

    def _note(self, plan: Plan, checks: dict[str, Any]) -> None:
        """The model in run.json."""
        if not self.world.is_first:
            return
        subject = plan.subject
        model = {
            "name": subject.name, "model": subject.path,
            "attn": subject.attn or _own_attention(subject), "weights": subject.weights,
            "rope": subject.rope, "positions": subject.positions,
            "extrapolates": bool(subject.positions and plan.longest > subject.positions),
            "prompt": "chat" if plan.builder.frame else "base",
            "round_trips": plan.builder.round_trips, "checks": checks,
            "loss": {"key": plan.losses, "windows": len(plan.windows)},
        }  # fmt: skip
        run_file.write(self.settings.out, self.about, [model])

    def _score(self, model: Any, plan: Plan, units: Sequence[Unit], bar: tqdm) -> None:
        subject, settings = plan.subject, self.settings
        scorer = Scorer(model, subject.tokenizer, settings.scores)
        observer = Observer(model) if settings.attention else None
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
            new = sum((subject.name, line["key"]) not in self.kept.done for line in lines)
            self.kept.append(lines, part=part)
            bar.update(new)

    def _line(self, subject: Subject, model: Any, sample: Sample, result: dict) -> dict[str, Any]:
        judged = result.get("teacher") or result["generate"]
        return {
            "name": subject.name,
            "model": subject.path,
            "attn": model.config._attn_implementation,
            "weights": subject.weights,
            "rope": subject.rope,
            "config": self.kept.config,
            **sample.record(),
            "correct": judged["correct"],
            "logprob": judged.get("logprob"),
            **result,
        }


def _own_attention(subject: Subject) -> str:
    return twin(subject.source, subject.attn).config._attn_implementation


def _checked(known: dict | None, subject: Subject) -> dict[str, Any] | None:
    """What an earlier run in the folder found of these weights."""
    for model in (known or {"models": []})["models"]:
        if model["name"] == subject.name and model["weights"] == subject.weights:
            return model["checks"]
    return None
