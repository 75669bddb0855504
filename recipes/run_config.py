"""The configuration of a training run: every key, its type, its default, and how it is read.

A run is a YAML file of nested keys plus `key.sub=value` overrides. Whatever is not declared here
is an error, so a misspelt key cannot be ignored.
"""

import difflib
import math
import os
import types
import typing
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from errors import BadInput


@dataclass
class Data:
    path: str | list[str] = "builtin"  # .txt (a document each), .jsonl (a document a line), folders
    field: str = "text"  # the key of the text in a line of .jsonl
    append_eos: bool = True  # end every document with the tokenizer's end-of-text token


@dataclass
class Train:
    steps: int = 100
    block_size: int = 512  # tokens a row
    batch_size: int = 1  # rows of one micro-batch on one process
    grad_accumulation: int = 1  # micro-batches of one step
    precision: str = "fp32"  # fp32, or bf16 autocast over fp32 weights
    gradient_checkpointing: bool = False


@dataclass
class Optim:
    lr: float = 1e-4
    log_length_lr: float = 1e-3  # the attention row numbers (`log_length` offset, slope, query)
    min_lr_ratio: float = 0.1  # where the cosine ends, as a part of the peak
    warmup_steps: int | None = None  # null: a tenth of the steps, at most 100
    weight_decay: float = 0.1
    decay_embeddings: bool = False
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0  # of the global gradient norm; 0 measures it only


@dataclass
class Checkpoint:
    every: int = 50  # steps; 0 saves on SIGTERM only
    keep: int = 2


@dataclass
class Run:
    model: str = ""  # a folder, a hub id, or "smollm2"
    output_dir: str = ""
    attn: str | None = None  # attn_implementation; null: what the checkpoint says
    seed: int = 0
    resume: str = "auto"  # "auto": go on from the last complete checkpoint; "none": a fresh folder
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    optim: Optim = field(default_factory=Optim)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    @property
    def warmup_steps(self) -> int:
        asked = self.optim.warmup_steps
        return min(100, self.train.steps // 10) if asked is None else asked


_CHOICES = {"resume": ("auto", "none"), "train.precision": ("fp32", "bf16")}
_LEAST = {  # inclusive
    **{f"train.{k}": 1 for k in ("steps", "batch_size", "grad_accumulation")},
    "train.block_size": 2,  # one token to read and one to predict
    **{f"optim.{k}": 0 for k in ("lr", "log_length_lr", "min_lr_ratio", "warmup_steps")},
    **{f"optim.{k}": 0 for k in ("weight_decay", "beta1", "beta2", "eps", "clip")},
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "seed": 0,
}
_BELOW = {"optim.beta1": 1, "optim.beta2": 1}


def load(file: str | os.PathLike | None, overrides: list[str]) -> Run:
    """The run that a YAML file and `key.sub=value` overrides describe; overrides win."""
    values: dict[str, Any] = {}
    if file is not None:
        values |= _read(Path(file))
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise BadInput(f"expected KEY=VALUE after the options, got {override!r}")
        values[key] = _parse(value, override)
    run = Run()
    kinds = _kinds(run)
    for key, value in values.items():
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1, cutoff=0.0)[0]
            raise BadInput(f"unknown key {key!r}; the nearest known key is {near!r}")
        owner, name = _owner(run, key)
        setattr(owner, name, _checked(key, value, kinds[key]))
    _check(run)
    return run


def flat(run: Run) -> dict[str, Any]:
    """Every key of a run with its value, by dotted name."""
    return {key: getattr(*_owner(run, key)) for key in _kinds(run)}


def dump(run: Run) -> str:
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


def _owner(run: Run, key: str) -> tuple[Any, str]:
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
            if isinstance(value, list) and all(isinstance(item, str) for item in value):
                return value
        elif type(value) is each:
            return value
    names = " or ".join("null" if a is type(None) else getattr(a, "__name__", "") for a in allowed)
    raise BadInput(f"{key}: expected {names}, got {value!r}")


def _check(run: Run) -> None:
    values = flat(run)
    for key in ("model", "output_dir"):
        if not values[key]:
            raise BadInput(f"{key} is missing: give {key}=… on the command line or in the YAML")
    for key, choices in _CHOICES.items():
        if values[key] not in choices:
            raise BadInput(f"{key}: expected one of {', '.join(choices)}, got {values[key]!r}")
    for key, least in _LEAST.items():
        # Written so that nan fails too.
        if values[key] is not None and not values[key] >= least:
            raise BadInput(f"{key}: expected at least {least}, got {values[key]}")
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise BadInput(f"{key}: expected a finite number, got {value}")
    for key, bound in _BELOW.items():
        if values[key] >= bound:
            raise BadInput(f"{key}: expected a number below {bound}, got {values[key]}")
    if run.warmup_steps > run.train.steps:
        raise BadInput(
            f"optim.warmup_steps: expected at most train.steps = {run.train.steps}, "
            f"got {run.warmup_steps}"
        )
