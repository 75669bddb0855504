"""An evaluation from its settings to its report: asked of every model, resumable, shared out."""

import importlib.metadata
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import hf_sigmoid
from hf_sigmoid.errors import BadInput, ChecksFailed
from hf_sigmoid.evals import report
from hf_sigmoid.evals.attention import Observer
from hf_sigmoid.evals.checks import check, worst
from hf_sigmoid.evals.loss import Losses, losses
from hf_sigmoid.evals.models import EvaluatedModel, attention_names
from hf_sigmoid.evals.plan import How, ModelPlan, builders_of, plan_for, read_haystack
from hf_sigmoid.evals.prefix import NoCache
from hf_sigmoid.evals.scoring import NoNumbers, Scorer
from hf_sigmoid.evals.settings import Settings, Unit
from hf_sigmoid.evals.store import Store
from hf_sigmoid.evals.summary import summarise
from hf_sigmoid.run_lock import RunLock

Record = dict[str, Any]


def evaluate(settings: Settings) -> Record:
    """Score every sample that is not scored yet, write the report, return its summary.

    The first of several processes returns it, the others {}.

    Raises:
        BadInput: a model, text, length or folder that cannot be used: before anything is written,
            but for a model that turns out to have no cache, or not all of its weights.
        ChecksFailed: a model whose scores cannot be believed; what was scored before is reported.
    """
    ranks, grid = processes(), settings.grid
    found = [
        EvaluatedModel.find(model, attn, settings.rope)
        for model in settings.models
        for attn in settings.attn
    ]
    models = list({model.name: model for model in found}.values())
    text = read_haystack(settings, models[0].tokenizer)
    builders = builders_of(models, text.content, **settings.prompting)
    device = settings.device
    if device == "cuda" and ranks.num_processes > 1:
        device = f"cuda:{ranks.local_process_index % torch.cuda.device_count()}"
    how = How(
        settings.score, settings.attention, settings.windows, settings.allow_extrapolation,
        device, strict=settings.checks == "stop",
    )  # fmt: skip
    plans = [plan_for(*each, grid, how) for each in zip(models, builders, strict=True)]
    about = {
        "config": settings.digest(text.sha256), "seed": grid.seed,
        "haystack": text.name + (", repeated" if settings.repeat_haystack else ""),
        "dtype": settings.dtype, "device": torch.device(device).type,
        "scores": list(settings.score),
        "versions": {
            **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
            "hf_sigmoid": hf_sigmoid.__version__,  # a checkout need not be installed
        },
    }  # fmt: skip
    with _alone(settings.out, ranks):
        return _ask_all(plans, settings.out, about, ranks)


def processes() -> Any:
    """accelerate's state of the processes that share an evaluation; alone without a launcher."""
    from accelerate import PartialState

    # They do nothing but wait for each other, for as long as the slowest takes: on the CPU.
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return PartialState(cpu=several, timeout=timedelta(days=7))


@contextmanager
def _alone(folder: Path, ranks: Any) -> Iterator[None]:
    """The only run in a folder, which is gone again if it was made for nothing."""
    lock, made = None, not folder.exists()
    if ranks.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        lock = RunLock(folder, "--out")
    ranks.wait_for_everyone()
    is_over = False
    try:
        yield
        is_over = True
    finally:
        # With several, others may be writing: the lock goes when the launcher has ended all.
        if lock is not None and (is_over or ranks.num_processes == 1):
            lock.release(remove=True)
            if made and not any(folder.iterdir()):
                with suppress(OSError):
                    folder.rmdir()


def _ask_all(plans: Sequence[ModelPlan], out: Path, about: Record, ranks: Any) -> Record:
    """Ask every model; each process does its part of what is missing."""
    weights = {plan.model.name: plan.model.weights for plan in plans}
    store = Store(out, about, weights)
    # Of each: units of which a sample is missing, and run.json's record as it was before.
    held = [(plan.missing(store), store.noted(plan.model)) for plan in plans]
    order = [key for plan in plans for key in plan.order]
    ranks.wait_for_everyone()  # nobody writes before all have read
    if ranks.is_main_process and store.has_parts:
        store.merge(order)
    ranks.wait_for_everyone()  # nor before what earlier processes wrote is safe
    done: list[ModelPlan] = []
    total = len(order) + sum(len(plan.windows) for plan in plans)
    try:
        with tqdm(total=total, unit="sample", disable=not ranks.is_main_process) as bar:
            for plan, (units, known) in zip(plans, held, strict=True):
                _ask(plan, units, known, store, ranks, bar)
                done.append(plan)
    except Exception:
        if done and ranks.num_processes == 1:
            _report(done, store)
        raise
    finally:
        store.close()
    ranks.wait_for_everyone()
    if not ranks.is_main_process:
        return {}
    if ranks.num_processes > 1:
        store = Store(out, about, weights)
        store.merge(order)
    return _report(plans, store)


def _report(plans: Sequence[ModelPlan], store: Store) -> Record:
    models, found = [], {}
    for plan in plans:
        name, written = plan.model.name, _losses_of(plan, store)
        windows = written.known(plan.windows)
        found[name] = written.read(windows)
        checks = store.noted(plan.model)["checks"]
        models.append(_record(plan, checks) | {"windows": windows})
    samples = [store.done[key] for plan in plans for key in plan.order]
    summary = summarise(samples, models, store.about, found)
    report.write(store.folder, summary)
    return summary


def _losses_of(plan: ModelPlan, store: Store) -> Losses:
    return Losses(store.folder, [plan.model.name, plan.model.weights, store.config])


def _ask(
    plan: ModelPlan, units: Sequence[Unit], known: Record | None, store: Store, ranks: Any, bar: Any
) -> None:
    """Score a model's missing samples, read its missing windows."""
    name, rank, size = plan.model.name, ranks.process_index, ranks.num_processes
    written = _losses_of(plan, store)
    unread = plan.windows.keys() - written.known(plan.windows)
    # By their number, since other processes may be writing already.
    mine = [window for window in list(plan.windows)[rank::size] if window in unread]
    bar.update(sum(key in store.done for key in plan.order) + len(plan.windows) - len(unread))
    checks = (known or {}).get("checks")
    model = None
    try:
        if units or unread or checks is None:
            bar.set_description(name[-30:])
            model = plan.model.load(getattr(torch, store.about["dtype"]), plan.how.device)
            if checks is None or units:
                checks = _checked(model, plan)
        if ranks.is_main_process:
            _note(plan, checks, known, store)
        if model is None:
            return
        part = rank if size > 1 else None
        for lines in _scored(model, plan, units[rank::size], store, ranks.is_main_process):
            bar.update(store.append(lines, part=part))
        for window in mine:
            found = losses(model, plan.windows[window])
            if not found.isfinite().all():
                raise NoNumbers("a loss is not a number")
            written.write(window, found)
            bar.update()
    except NoCache as error:
        raise BadInput(f"{name}: {error}: it cannot be evaluated") from None
    except NoNumbers as error:
        raise ChecksFailed(f"{name}: {error}") from None


def _checked(model: Any, plan: ModelPlan) -> Record:
    """Checks at the shortest and the longest prompts of the first task, each beside another."""
    grid = plan.grid
    spec = grid.specs[0]
    depth = grid.depths[len(grid.depths) // 2] if spec.has_depth else None
    found = []
    for length in dict.fromkeys([grid.lengths[0], grid.lengths[-1]]):
        about = {"length": length, "depth": depth, "seed": grid.seed}
        probe, other = (plan.builder.build(spec, index=index, **about) for index in range(2))
        found.append(check(model, probe, other, brief=bool(found)))
    checks = worst(found)
    if any(map(math.isnan, checks.failed.values())):
        raise ChecksFailed(f"{plan.model.name}: its log-probabilities are not numbers")
    if checks.failed and plan.how.strict:
        raise ChecksFailed(
            f"{plan.model.name}: an answer read at once and one read otherwise differ, "
            + ", ".join(f"{name} by {value:.3g}" for name, value in checks.failed.items())
            + f" nats, expected at most {checks.tolerance:g}: its scores cannot be believed; "
            "--checks record evaluates it all the same"
        )
    return checks.record()


def _note(plan: ModelPlan, checks: Record | None, known: Record | None, store: Store) -> None:
    """Write the model into run.json, with what earlier runs found of it."""
    model = _record(plan, checks)
    if known:
        model["extrapolates"] |= known["extrapolates"]
        model["windows"] = model["windows"] or known["windows"]
        if known["checks"] and not known["checks"]["passed"]:
            model["checks"] = known["checks"]
    store.note(model)


def _record(plan: ModelPlan, checks: Record | None) -> Record:
    model = plan.model
    return {
        "name": model.name, "model": model.path, "attn": model.runs,
        "weights": model.weights, "rope": model.rope, "positions": model.positions,
        "extrapolates": bool(model.positions and plan.longest > model.positions),
        "prompt": "chat" if plan.builder.frame else "base",
        "round_trips": plan.builder.round_trips, "checks": checks, "windows": list(plan.windows),
    }  # fmt: skip


def _scored(
    model: Any, plan: ModelPlan, units: Sequence[Unit], store: Store, is_first: bool
) -> Iterator[list[Record]]:
    """The lines of each unit's samples."""
    own, observer = plan.model, None
    scorer = Scorer(model, own.tokenizer, plan.how.scores)
    try:
        observer = Observer(model) if plan.how.attention else None
    except ValueError as error:
        if is_first:
            tqdm.write(f"{own.name}: no attention on the needle: {error}", sys.stderr)
    asked = {
        "name": own.name, "model": own.path, "attn": attention_names(model),
        "weights": own.weights, "rope": own.rope, "config": store.config,
        "versions": store.about["versions"],
    }  # fmt: skip
    for unit in units:
        samples = plan.grid.build(plan.builder, unit)
        watched = [sample.index < plan.how.attention for sample in samples]
        results = scorer.score(samples, observer=observer if any(watched) else None)
        lines = []
        for sample, result, seen in zip(samples, results, watched, strict=True):
            if not seen:
                result.pop("attention", None)
            judged = result.get("teacher") or result["generate"]
            verdict = {"correct": judged["correct"], "logprob": judged.get("logprob")}
            lines.append({**asked, **sample.record(), **verdict, **result})
        yield lines
