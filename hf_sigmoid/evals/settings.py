"""The settings of an evaluation, from the command line's words, and the presets."""

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals import run_file
from hf_sigmoid.evals.grid import Grid
from hf_sigmoid.evals.specs import parse

SCORES = ("teacher", "generate")  # see `scoring.py`
DTYPES = ("float32", "bfloat16", "float16")
FORMAT = 1  # of samples.jsonl; another one never goes on with a folder of this one

FIVE = (0.0, 0.25, 0.5, 0.75, 1.0)
DEFAULTS: dict[str, Any] = {
    "tasks": ["single"],
    "lengths": None,
    "depths": [0.0, 0.5, 1.0],
    "samples": 10,
    "decoys": 8,
    "attention": 0,
    "loss": 0,
    "loss_length": None,
    "repeat_haystack": False,
}
PRESETS: dict[str, dict[str, Any]] = {
    # Two cores, a model of 135M parameters under two functions: minutes. 25 questions of a task
    # and length: with fewer no length could keep 85 %.
    "cpu": {
        "tasks": ["single", "multikey:16", "cwe:1x8x2"],
        "lengths": [512, 1024, 2048],
        "depths": FIVE,
        "samples": 5,
        "decoys": 4,
        "attention": 1,
        "loss": 4,
    },
    "quick": {
        "tasks": ["single", "multikey:16", "vt:1x2", "cwe:3x8x2"],
        "lengths": [1024, 4096],
        "depths": FIVE,
        "samples": 5,
        "attention": 1,
        "loss": 8,
    },
    "full": {
        "tasks": [
            "passkey", "single", "single:uuid", "multikey:2", "multikey:4", "multikey:8",
            "multikey:16", "multikey:32", "multivalue:4", "multiquery:4", "vt:1x4", "cwe", "fwe",
            "nolap:3", "babi:2",
        ],
        "lengths": [4096, 8192, 16384, 32768, 65536, 131072],
        "depths": [i / 10 for i in range(11)],
        "samples": 10,
        "attention": 1,
        "loss": 8,
        "loss_length": 8192,  # of the built-in novel; a text of your own can have longer windows
        "repeat_haystack": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """One evaluation."""

    models: tuple[str, ...]
    attn: tuple[str | None, ...]
    grid: Grid
    scores: tuple[str, ...]
    out: Path
    prompt: str = "auto"
    decoys: int = 8
    attention: int = 0  # samples of each cell whose attention on the needle is recorded
    loss: int = 0  # windows of the loss by position
    loss_length: int | None = None
    haystack: tuple[str, ...] | None = None
    repeat_haystack: bool = False
    rope: str | None = None
    allow_extrapolation: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    checks: str = "stop"
    template: tuple[tuple[str, Any], ...] = ()

    def digest(self, haystack_sha256: str) -> str:
        """Of everything that makes a score what it is, but the model and the grid."""
        import torch

        parts = (
            FORMAT, haystack_sha256, self.grid.seed, self.dtype, self.prompt, self.decoys,
            sorted(self.scores), self.attention, self.grid.batch, self.template,
            torch.device(self.device).type, self.repeat_haystack,
        )  # fmt: skip
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def add_arguments(parser: argparse.ArgumentParser, *, models: bool = True) -> None:
    """Of the grid and the prompts; of models too, unless samples are only built."""
    add = parser.add_argument
    if models:
        add("--models", nargs="+", required=True, metavar="PATH[@ATTN]",
            help="ATTN forces an attention function; smollm2 is the embedded model")  # fmt: skip
        add("--attn", nargs="+", default=[None], metavar="ATTN",
            help="run every model under each of these (sdpa, ssmax, sigmoid, …)")  # fmt: skip
    add("--preset", choices=PRESETS, help="cpu: 2 cores, minutes; quick; full: 4k to 128k, a GPU")
    add("--tasks", nargs="+", metavar="TASK", help="single, multikey:8, vt, … (default: single)")
    add(
        "--lengths", nargs="+", type=_length, metavar="L", help="of the prompt, in tokens; 4k: 4096"
    )
    add("--depths", nargs="+", type=float, metavar="D", help="0 start, 1 end (default: 0 0.5 1)")
    add("--samples", type=int, help="a cell (default: 10)")
    add("--seed", type=int, default=0)
    add("--prompt", choices=("auto", "base", "chat"), default="auto",
        help="auto: chat if the tokenizer has a template")  # fmt: skip
    add("--template", nargs="+", type=_option, default=[], metavar="KEY=VALUE",
        help="options of the chat template, as enable_thinking=false")  # fmt: skip
    add("--decoys", type=int, help="wrong answers to rank the right one among (default: 8)")
    add("--haystack", nargs="+", metavar="TEXT",
        help="files, folders or dataset:NAME…, instead of the built-in novel")  # fmt: skip
    add("--repeat-haystack", action="store_true", default=None,
        help="a text that is too short for a prompt is repeated")  # fmt: skip
    add("--no-shared", dest="shared", action="store_false",
        help="a haystack for every question of multikey, too")  # fmt: skip
    add("--out", required=True, metavar="DIR")
    if not models:
        return
    add("--score", nargs="+", choices=SCORES, default=["teacher"])
    add("--attention", type=int, metavar="N",
        help="samples a cell whose attention on the needle is recorded (default: 0)")  # fmt: skip
    add("--loss", type=int, metavar="N", help="windows of the loss by position (default: 0)")
    add("--loss-length", type=_length, metavar="L", help="of them (default: the longest prompt)")
    add("--allow-extrapolation", action="store_true", help="lengths beyond the model's positions")
    add("--rope", metavar="CHANGE", help="run with theta:F, ntk:F or yarn:F, to F times as many")
    add("--batch-size", type=int, default=4)
    add("--dtype", choices=DTYPES, default="float32")
    add("--device", metavar="DEVICE", help="default: a GPU if there is one")
    add("--checks", choices=("stop", "record"), default="stop",
        help="a model that fails a check ends the run, or is marked in the report")  # fmt: skip


def read(args: argparse.Namespace) -> Settings:
    """The settings that the words mean.

    Raises:
        BadInput: numbers out of range, an unknown task, no lengths, an unusable folder or device.
    """
    given = {**DEFAULTS, **PRESETS.get(args.preset, {})}
    given |= {name: vars(args)[name] for name in given if vars(args).get(name) is not None}
    if not given["lengths"]:
        raise BadInput("--lengths: expected at least one, in tokens, or a --preset")
    least = {"samples": 1, "decoys": 1, "attention": 0, "loss": 0, "batch_size": 1}
    for name, low in least.items():
        value = given.get(name, vars(args).get(name, low))
        if value < low:
            raise BadInput(f"--{name.replace('_', '-')}: expected at least {low}, got {value}")
    for depth in given["depths"]:
        if not 0 <= depth <= 1:
            raise BadInput(f"--depths: expected 0 to 1, got {depth:g}")
    try:
        specs = tuple(dict.fromkeys(map(parse, given["tasks"])))
    except ValueError as error:
        raise BadInput(f"--tasks: {error}") from None
    run_file.check_folder(Path(args.out))
    if "device" in args:
        args.device = _device(args.device)
    grid = Grid(
        specs,
        tuple(sorted(set(given["lengths"]))),
        tuple(sorted(set(given["depths"]))),
        given["samples"],
        args.seed,
        batch=vars(args).get("batch_size", 1),
        shared=args.shared,
    )
    same = ("prompt", "rope", "allow_extrapolation", "dtype", "device", "checks")
    preset = ("decoys", "attention", "loss", "loss_length", "repeat_haystack")
    return Settings(
        models=tuple(dict.fromkeys(vars(args).get("models", ()))),
        attn=tuple(dict.fromkeys(vars(args).get("attn", ()))),
        grid=grid,
        scores=tuple(each for each in SCORES if each in vars(args).get("score", ())),
        out=Path(args.out),
        haystack=tuple(args.haystack) if args.haystack else None,
        template=tuple(args.template),
        **{name: given[name] for name in preset},
        **{name: vars(args)[name] for name in same if name in args},
    )


def _length(text: str) -> int:
    """ "4k" -> 4096"""
    digits, thousand = text.removesuffix("k"), text.endswith("k")
    if not digits.isdigit() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"expected tokens, as 4096 or 4k, got {text!r}")
    return int(digits) * (1024 if thousand else 1)


def _option(text: str) -> tuple[str, Any]:
    """ "enable_thinking=false" -> ("enable_thinking", False)"""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, {"true": True, "false": False}.get(value.lower(), value)


def _device(asked: str | None) -> str:
    import torch

    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise BadInput(
            f"--device: expected one that torch can compute on here, got {device!r}: {error}"
        ) from error
    return device
