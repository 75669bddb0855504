"""The configuration of a run: YAML of nested keys plus `key.sub=value` overrides.

Whatever is not declared in `run_keys.py` is an error, so a misspelt key cannot be ignored.
"""

import difflib
import math
import os
import types
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from hf_sigmoid.errors import BadInput
from hf_sigmoid.training.run_keys import BELOW, CHOICES, LEAST, MOST, POSITIVE, Data, Distil, Run


def load(file: str | os.PathLike | None, overrides: list[str], kind: type = Run) -> Any:
    """The `Run` (or `Distil`) that a YAML file and `key.sub=value` overrides describe.

    Overrides win.
    """
    values: dict[str, Any] = {}
    if file is not None:
        values |= _read(Path(file))
    for override in _whole(overrides):
        key, equals, value = override.partition("=")
        if not equals:
            raise BadInput(f"expected KEY=VALUE after the options, got {override!r}")
        values[key] = _parse(value, override)
    run = kind()
    kinds = _kinds(run)
    groups = {f.name for f in fields(run) if is_dataclass(getattr(run, f.name))}
    for key, value in values.items():
        if value is None and key in groups:
            continue  # a group without keys in the file
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1, cutoff=0.0)[0]
            raise BadInput(f"unknown key {key!r}; the nearest known key is {near!r}")
        owner, name = _owner(run, key)
        setattr(owner, name, _checked(key, value, kinds[key]))
    _check(run)
    return run


def _whole(overrides: list[str]) -> list[str]:
    """A shell cuts key=[a, b] at its blank: a list goes on until it is closed."""
    whole: list[str] = []
    for each in overrides:
        if whole and whole[-1].count("[") > whole[-1].count("]"):
            whole[-1] += f" {each}"
        else:
            whole.append(each)
    return whole


def flat(run: Any) -> dict[str, Any]:
    """Every key of a run with its value, by dotted name."""
    return {key: getattr(*_owner(run, key)) for key in _kinds(run)}


def dump(run: Any) -> str:
    """A run as YAML that `load` reads back."""
    nested: dict[str, Any] = {}
    for key, value in flat(run).items():
        *parents, name = key.split(".")
        target = nested
        for parent in parents:
            target = target.setdefault(parent, {})
        target[name] = value
    return yaml.safe_dump(nested, sort_keys=False)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise BadInput(f"no such configuration file: {path}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not YAML: {error}") from None
    if not isinstance(content or {}, dict):
        raise BadInput(f"{path}: expected keys and values, got {type(content).__name__}")
    return _flatten(content or {})


def _flatten(nested: dict, prefix: str = "") -> dict[str, Any]:
    result = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        result |= _flatten(value, name + ".") if isinstance(value, dict) else {name: value}
    return result


def _parse(value: str, override: str) -> Any:
    try:
        return yaml.safe_load(value) if value.strip() else value
    except yaml.YAMLError:
        raise BadInput(f"the value of {override!r} is not YAML") from None


def _kinds(node: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> its declared type."""
    result = {}
    hints = typing.get_type_hints(type(node))
    for f in fields(node):
        child = getattr(node, f.name)
        name = prefix + f.name
        result |= _kinds(child, name + ".") if is_dataclass(child) else {name: hints[f.name]}
    return result


def _owner(run: Any, key: str) -> tuple[Any, str]:
    *parents, name = key.split(".")
    owner: Any = run
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def _checked(key: str, value: Any, kind: Any) -> Any:
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and type(None) in allowed:
        return None
    if float in allowed and not isinstance(value, bool):
        # YAML 1.1 reads 1e-4, without a point, as text.
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    if int in allowed and isinstance(value, float) and value.is_integer():
        return int(value)
    for each in allowed:
        if each is str and isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)  # a folder may be called 7
        if typing.get_origin(each) is list:
            of = typing.get_origin(item := typing.get_args(each)[0]) or item
            if str not in allowed:
                value = _listed(value, of)
            if isinstance(value, list) and all(type(entry) is of for entry in value):
                return value
        elif type(value) is each:
            return value
    names = " or ".join("null" if a is type(None) else _kind_name(a) for a in allowed)
    raise BadInput(f"{key}: expected {names}, got {value!r}")


def _listed(value: Any, of: type) -> Any:
    """One value, or several as 512,1024, where only a list is possible."""
    if isinstance(value, str) and of in (int, str):
        parts = [part.strip() for part in value.split(",")]
        whole = of is str or all(part.isdigit() for part in parts)
        return [of(part) for part in parts] if whole else value
    return [value] if type(value) is of else value


def _kind_name(kind: Any) -> str:
    if typing.get_origin(kind) is list:
        item = typing.get_args(kind)[0]
        return f"a list of {(typing.get_origin(item) or item).__name__}"
    return kind.__name__


def _check(run: Any) -> None:
    values = flat(run)
    for key in ("model", "output_dir"):
        if not values[key]:
            raise BadInput(f"{key} is missing: give {key}=… on the command line or in the YAML")
    given = {key: value for key, value in values.items() if value is not None}
    for key, choices in CHOICES.items():
        if key in given and given[key] not in choices:
            raise BadInput(f"{key}: expected one of {', '.join(choices)}, got {given[key]!r}")
    for key, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise BadInput(f"{key}: expected a finite number, got {value}")
    for key, least in LEAST.items():
        if key in given and given[key] < least:
            raise BadInput(f"{key}: expected at least {least}, got {given[key]}")
    for key in POSITIVE:
        if key in given and given[key] <= 0:
            raise BadInput(f"{key}: expected a positive number or null, got {given[key]}")
    for key, bound in BELOW.items():
        if key in given and given[key] >= bound:
            raise BadInput(f"{key}: expected a number below {bound}, got {given[key]}")
    for key, most in MOST.items():
        if key in given and given[key] > most:
            raise BadInput(f"{key}: expected at most {most}, got {given[key]}")
    _check_data(run.data)
    if isinstance(run, Distil):
        if run.steps < 1:
            raise BadInput(
                "layerwise.steps and end_to_end.steps: expected at least one step, got 0"
            )
        return
    _check_training(run)


def _check_data(data: Data) -> None:
    """Sources that say two things at once."""
    sources = [key for key in ("path", "dataset", "mixture") if getattr(data, key) is not None]
    if len(sources) > 1:
        raise BadInput(f"data: expected one source, got {' and '.join(sources)}")


def _check_training(run: Run) -> None:
    """Keys that contradict each other."""
    train, optim = run.train, run.optim
    _refuse_what_has_no_effect(run)
    if train.epochs is not None:
        if train.steps is not None:
            raise BadInput(
                f"train.steps and train.epochs: expected one of them, got {train.steps} and "
                f"{train.epochs}"
            )
        mixed = run.data.mixture or []
        if run.data.streaming or any(source.get("streaming") for source in mixed):
            raise BadInput(
                "train.epochs: expected train.steps with data.streaming, which has no known length"
            )
        if mixed:
            raise BadInput(
                "train.epochs: expected train.steps with data.mixture, whose sources end at "
                "different steps"
            )
    elif optim.warmup_steps is not None and optim.warmup_steps > run.steps:
        raise BadInput(
            f"optim.warmup_steps: expected at most train.steps = {run.steps}, "
            f"got {optim.warmup_steps}"
        )
    if run.lora.rank is not None and run.parameters != "lora":
        raise BadInput(
            f"train.parameters: expected lora (or null) with lora.rank, got {train.parameters}"
        )
    if run.parameters == "lora" and run.lora.rank is None:
        raise BadInput("lora.rank: expected a number with train.parameters=lora, got null")
    control = [k for k in ("qk_tau", "qk_clip") if getattr(optim, k) is not None]
    if run.parameters in ("lora", "log_length") and control:
        raise BadInput(
            f"optim.{control[0]}: expected train.parameters all or attention, got "
            f"{run.parameters}: it controls W_Q and W_K, which do not train"
        )
    if run.evaluate.needle and min(run.evaluate.needle) < 1:
        raise BadInput(f"evaluate.needle: expected lengths in tokens, got {run.evaluate.needle}")
    known = ("tensorboard", "wandb", "trackio")
    for tracker in run.log.trackers or []:
        if tracker not in known:
            raise BadInput(f"log.trackers: expected some of {', '.join(known)}, got {tracker!r}")


def _refuse_what_has_no_effect(run: Run) -> None:
    """A key that says what nothing would do is a mistake somewhere else."""
    watched, optim = run.evaluate, run.optim
    needs = {
        "lora.alpha": ("lora.rank", run.lora.rank),
        "lora.dropout": ("lora.rank", run.lora.rank),
        "lora.targets": ("lora.rank", run.lora.rank),
        "optim.qk_rule": ("optim.qk_tau", optim.qk_tau),
        "optim.min_lr_ratio": ("a schedule that falls", optim.schedule != "constant" or None),
        "evaluate.windows": ("evaluate.path", watched.path),
        "evaluate.every": ("evaluate.path or needle", watched.path or watched.needle or None),
        "evaluate.needle_samples": ("evaluate.needle", watched.needle),
        "log.project": ("log.trackers", run.log.trackers or None),
    }
    values, default = flat(run), flat(type(run)())
    for key, (what, given) in needs.items():
        if given is None and values[key] != default[key]:
            raise BadInput(f"{key} {values[key]}: expected {what} beside it, got none")
    if run.parameters == "log_length":
        for key in ("optim.optimizer", "optim.qk_lr_scale"):
            if values[key] != default[key]:
                raise BadInput(
                    f"{key} {values[key]}: expected its default with train.parameters=log_length, "
                    "which has optim.log_length_lr alone"
                )
