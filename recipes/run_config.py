"""The configuration of a run: every key, its type, its default, and how it is read.

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
    qk_tau: float | None = None  # logit control (`hf_sigmoid.optim`): τ; null: none
    qk_rule: str = "quack"  # or "constant": τ times the rate for all of W_Q and W_K


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
    def steps(self) -> int:
        return self.train.steps

    @property
    def warmup_steps(self) -> int:
        asked = self.optim.warmup_steps
        return min(100, self.train.steps // 10) if asked is None else asked


@dataclass
class Layerwise:
    """Every converted attention module alone, on what it gets in the softmax model."""

    steps: int = 120
    train: str = "numbers"  # row numbers, gains, temperatures; "projections": and q, k, v, o;
    # "lora": and low-rank changes of q, k, v, o
    lr: float = 1e-4  # of the projections
    numbers_lr: float = 5e-3  # of row numbers (`log_length`), gains and temperatures


@dataclass
class EndToEnd:
    """The whole model on the softmax model's next-token distributions."""

    steps: int = 0
    train: str = "numbers"  # "numbers", "projections", "lora" as above, or "all" weights
    lr: float = 1e-4  # of everything but the numbers
    # Of the numbers: w·q sums over the head dim, and what one layer changes all later ones see.
    numbers_lr: float = 5e-4
    kl: float = 1.0  # weight of KL(softmax model ‖ this one); the rest is the text's cross entropy
    blend: float = 0.0  # the part of the steps over which softmax fades out; 0: sigmoid at once


@dataclass
class Evaluate:
    """Perplexity of the student on held-out text, in the log beside the losses."""

    path: str | list[str] | None = None  # .txt files; null: none
    every: int = 50  # steps; and at the end
    windows: int = 8  # of train.block_size tokens, spread over each file


@dataclass
class Batch:
    block_size: int = 512  # tokens a row
    batch_size: int = 1  # rows of one micro-batch on one process
    grad_accumulation: int = 1  # micro-batches of one step
    precision: str = "fp32"  # fp32, or bf16 autocast over fp32 weights


@dataclass
class DistilOptim:
    min_lr_ratio: float = 0.1  # where the cosine of each stage ends, as a part of its peak
    warmup: float = 0.1  # the part of a stage's steps that warms up
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0  # of the gradient norm: of each module alone, then of the model; 0: none
    lora_rank: int = 16


@dataclass
class Distil:
    """`distil_attention.py`."""

    model: str = ""  # a converted checkpoint's folder
    teacher: str | None = None  # softmax checkpoint; null: what `model` was converted from
    output_dir: str = ""
    seed: int = 0
    resume: str = "auto"  # "auto": go on from the last complete checkpoint; "none": a fresh folder
    data: Data = field(default_factory=Data)
    train: Batch = field(default_factory=Batch)
    layerwise: Layerwise = field(default_factory=Layerwise)
    end_to_end: EndToEnd = field(default_factory=EndToEnd)
    optim: DistilOptim = field(default_factory=DistilOptim)
    evaluate: Evaluate = field(default_factory=Evaluate)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    @property
    def steps(self) -> int:
        return self.layerwise.steps + self.end_to_end.steps


TRAINED = ("numbers", "projections", "lora")
_CHOICES = {
    "resume": ("auto", "none"),
    "train.precision": ("fp32", "bf16"),
    "layerwise.train": TRAINED,
    "optim.qk_rule": ("quack", "constant"),
    "end_to_end.train": (*TRAINED, "all"),
}
_LEAST = {  # inclusive
    **{
        f"{stage}.{k}": 0
        for stage in ("layerwise", "end_to_end")
        for k in ("steps", "lr", "numbers_lr")
    },
    **{f"end_to_end.{k}": 0 for k in ("kl", "blend")},
    "optim.warmup": 0,
    "optim.lora_rank": 1,
    "evaluate.every": 1,
    "evaluate.windows": 1,
    **{f"train.{k}": 1 for k in ("steps", "batch_size", "grad_accumulation")},
    "train.block_size": 2,  # one token to read and one to predict
    **{f"optim.{k}": 0 for k in ("lr", "log_length_lr", "min_lr_ratio", "warmup_steps")},
    **{f"optim.{k}": 0 for k in ("weight_decay", "beta1", "beta2", "eps", "clip")},
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "seed": 0,
}
_BELOW = {"optim.beta1": 1, "optim.beta2": 1}
_MOST = {"end_to_end.kl": 1, "end_to_end.blend": 1, "optim.warmup": 1}


def load(file: str | os.PathLike | None, overrides: list[str], kind: type = Run) -> Any:
    """The `Run` (or `Distil`) that a YAML file and `key.sub=value` overrides describe.

    Overrides win.
    """
    values: dict[str, Any] = {}
    if file is not None:
        values |= _read(Path(file))
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise BadInput(f"expected KEY=VALUE after the options, got {override!r}")
        values[key] = _parse(value, override)
    run = kind()
    kinds = _kinds(run)
    for key, value in values.items():
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1, cutoff=0.0)[0]
            raise BadInput(f"unknown key {key!r}; the nearest known key is {near!r}")
        owner, name = _owner(run, key)
        setattr(owner, name, _checked(key, value, kinds[key]))
    _check(run)
    return run


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
            if isinstance(value, list) and all(isinstance(item, str) for item in value):
                return value
        elif type(value) is each:
            return value
    names = " or ".join("null" if a is type(None) else getattr(a, "__name__", "") for a in allowed)
    raise BadInput(f"{key}: expected {names}, got {value!r}")


def _check(run: Any) -> None:
    values = flat(run)
    for key in ("model", "output_dir"):
        if not values[key]:
            raise BadInput(f"{key} is missing: give {key}=… on the command line or in the YAML")
    for key, choices in _CHOICES.items():
        if key in values and values[key] not in choices:
            raise BadInput(f"{key}: expected one of {', '.join(choices)}, got {values[key]!r}")
    for key, least in _LEAST.items():
        # Written so that nan fails too.
        if values.get(key) is not None and not values[key] >= least:
            raise BadInput(f"{key}: expected at least {least}, got {values[key]}")
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise BadInput(f"{key}: expected a finite number, got {value}")
    for key, bound in _BELOW.items():
        if values[key] >= bound:
            raise BadInput(f"{key}: expected a number below {bound}, got {values[key]}")
    for key, most in _MOST.items():
        if key in values and values[key] > most:
            raise BadInput(f"{key}: expected at most {most}, got {values[key]}")
    if isinstance(run, Distil):
        if run.layerwise.steps + run.end_to_end.steps < 1:
            raise BadInput(
                "layerwise.steps and end_to_end.steps: expected at least one step, got 0"
            )
        return
    if run.optim.qk_tau is not None and not run.optim.qk_tau > 0:
        raise BadInput(f"optim.qk_tau: expected a positive number or null, got {run.optim.qk_tau}")
    if run.warmup_steps > run.train.steps:
        raise BadInput(
            f"optim.warmup_steps: expected at most train.steps = {run.train.steps}, "
            f"got {run.warmup_steps}"
        )
