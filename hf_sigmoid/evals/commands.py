"""`hf-sigmoid eval`, and `recipes/needle.py`, which is the same command.

hf-sigmoid eval --models A B@sdpa --preset cpu --out runs/eval
hf-sigmoid eval report runs/a runs/b --out runs/both
hf-sigmoid eval build --tokenizer A --tasks single multikey:8 --lengths 4k --out samples
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hf_sigmoid  # noqa: F401 (registers the attention functions)
from hf_sigmoid.errors import BadInput, ChecksFailed
from hf_sigmoid.evals import store
from hf_sigmoid.evals.prompts import PROMPTS
from hf_sigmoid.evals.settings import PRESETS, SCORES, Grid, Settings
from hf_sigmoid.evals.templates import parse
from hf_sigmoid.interrupts import STATUS, while_loading
from hf_sigmoid.terminal import show_anything

STOPPED = "stopped: the same command goes on from here"
NEEDED = ("accelerate", "pandas", "scipy")  # of the extra `eval`, for any report
DTYPES = ("float32", "bfloat16", "float16")

# What computes is imported behind the command line: --help takes none of it.


def run(arguments: Sequence[str] | None = None) -> int:
    """`main`; what it can explain is one line and a status: 2 bad input, 1 a failed check."""
    show_anything()
    try:
        main(arguments)
    except (BadInput, ChecksFailed, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, ChecksFailed) else 2
    except KeyboardInterrupt:
        print(f"\n{STOPPED}", file=sys.stderr)
        return STATUS
    return 0


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Do what the command line says; the summary, or what was built.

    Raises:
        BadInput: before anything is written.
        ChecksFailed: a model whose scores cannot be believed.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    verbs = {"report": _report, "build": _build}
    if arguments and arguments[0] in verbs:
        return verbs[arguments[0]](arguments[1:])
    return _evaluate(arguments)


def _evaluate(arguments: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="hf-sigmoid eval",
        description="Long-context tasks: models and attention functions side by side, on the same "
        "prompts of exactly L tokens. Also: `eval report DIR…`, `eval build` (--help of each).",
    )
    add_arguments(parser)
    asked = read(parser, arguments)[0]
    _check_packages()
    with while_loading(STOPPED):
        from hf_sigmoid.evals.run import evaluate

    summary = evaluate(asked)
    if summary:  # of the first process
        _show(asked.out, summary)
    return summary


def _report(arguments: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="hf-sigmoid eval report", description="One report of the samples of some folders."
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: the only folder given")
    args = parser.parse_args(arguments)
    if args.out is None and len(args.folders) > 1:
        raise BadInput("--out: expected a folder for the report of several")
    out = args.out or args.folders[0]
    if args.out is not None:
        store.check_folder(out)
    _check_packages()
    from hf_sigmoid.evals import report
    from hf_sigmoid.evals.summary import merged

    summary = merged(args.folders)
    report.write(out, summary)
    _show(out, summary)
    return summary


def _build(arguments: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="hf-sigmoid eval build",
        description="Save the samples as a `datasets` dataset, to be scored elsewhere.",
    )
    parser.add_argument("--tokenizer", required=True, metavar="PATH", help="of the model")
    add_arguments(parser, models=False)
    asked, args = read(parser, arguments)
    if asked.out.exists() and (not asked.out.is_dir() or any(asked.out.iterdir())):
        raise BadInput(f"--out {asked.out}: expected a new or empty folder")
    from hf_sigmoid.embedded import checkpoint
    from hf_sigmoid.evals.export import save, to_dataset
    from hf_sigmoid.evals.plan import builder_of, read_haystack
    from hf_sigmoid.loading import load_tokenizer

    tokenizer = load_tokenizer(checkpoint(args.tokenizer))
    text = read_haystack(asked, tokenizer)
    builder = builder_of(tokenizer, text.content, **asked.prompting)
    about = {
        "tokenizer": args.tokenizer, "haystack": text.name, "seed": asked.grid.seed,
        "prompt": "chat" if builder.frame else "base", "round_trips": builder.round_trips,
    }  # fmt: skip
    made = to_dataset(asked.grid.samples_of(builder), tokenizer)
    save(asked.out, made, about)
    print(f"{len(made)} samples in {asked.out}")
    return about | {"samples": len(made)}


def _check_packages() -> None:
    """Before hours of work, the end of which needs them."""
    if lacking := [name for name in NEEDED if find_spec(name) is None]:
        raise ImportError(f"evaluations need {', '.join(lacking)}: pip install 'hf-sigmoid[eval]'")


def _show(out: Path, summary: dict[str, Any]) -> None:
    from hf_sigmoid.evals import report

    for model in summary["models"]:
        if not model["round_trips"]:
            print(
                f"{model['name']}: decoding its prompts does not give the text back; ids are used"
            )
    print(report.table(summary))
    print(f"report: {out / 'report.html'}")


def add_arguments(parser: argparse.ArgumentParser, *, models: bool = True) -> None:
    """Those of the grid and the prompts; of models too, unless samples are only built."""
    add = parser.add_argument
    if models:
        add("--models", nargs="+", required=True, metavar="PATH[@ATTN]",
            help="ATTN forces an attention function; smollm2 is the embedded model")  # fmt: skip
        add("--attn", nargs="+", default=[None], metavar="ATTN",
            help="run every model under each of these (sdpa, ssmax, sigmoid, …)")  # fmt: skip
    add("--preset", choices=PRESETS, help="cpu: 2 cores, minutes; quick; full: 4k to 128k, a GPU")
    add("--tasks", nargs="+", default=["single"], metavar="TASK",
        help="single, multikey:8, vt, … (default: single)")  # fmt: skip
    add("--lengths", nargs="+", type=_length, metavar="L",
        help="of the prompt, in tokens; 4k: 4096")  # fmt: skip
    add("--depths", nargs="+", type=float, default=[0.0, 0.5, 1.0], metavar="D",
        help="0 start, 1 end (default: 0 0.5 1)")  # fmt: skip
    add("--samples", type=int, default=10, metavar="N",
        help="questions at each task, length and depth (default: 10)")  # fmt: skip
    add("--seed", type=int, default=0, help="of the samples (default: 0)")
    add("--prompt", choices=PROMPTS, default="auto",
        help="auto: chat if the tokenizer has a template")  # fmt: skip
    add("--template", nargs="+", type=_option, default=[], metavar="KEY=VALUE",
        help="options of the chat template, as enable_thinking=false")  # fmt: skip
    add("--decoys", type=int, default=8,
        help="wrong answers to rank the right one among (default: 8)")  # fmt: skip
    add("--haystack", nargs="+", metavar="TEXT",
        help="files, folders or dataset:NAME…, instead of the built-in novel")  # fmt: skip
    add("--repeat-haystack", action="store_true",
        help="a text that is too short for a prompt is repeated")  # fmt: skip
    add("--no-shared", dest="shared", action="store_false",
        help="a haystack for every question of multikey, too")  # fmt: skip
    add("--out", required=True, type=Path, metavar="DIR",
        help="folder of the results; one that is there is gone on with")  # fmt: skip
    if not models:
        return
    add("--score", nargs="+", choices=SCORES, default=["teacher"],
        help="teacher (default): the answer is given; generate: the model writes it")  # fmt: skip
    add("--attention", type=int, default=0, metavar="N",
        help="samples a depth whose attention on the needle is recorded (default: 0)")  # fmt: skip
    add("--loss", type=int, default=0, metavar="N",
        help="windows of the loss by position (default: 0)")  # fmt: skip
    add(
        "--loss-length",
        type=_length,
        metavar="L",
        help="tokens of such a window (default: the longest prompt)",
    )
    add("--allow-extrapolation", action="store_true", help="lengths beyond the model's positions")
    add("--rope", metavar="CHANGE", help="run with theta:F, ntk:F or yarn:F: F times the positions")
    add("--batch-size", type=int, default=4, help="prompts a forward pass (default: 4)")
    add("--dtype", choices=DTYPES, default="float32", help="of the model (default: float32)")
    add("--device", metavar="DEVICE", help="default: a GPU if there is one")
    add("--checks", choices=("stop", "record"), default="stop",
        help="a model that fails a check ends the run, or is marked in the report")  # fmt: skip


def read(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[Settings, argparse.Namespace]:
    """The settings that the words mean, and the words.

    Raises:
        BadInput: numbers out of range, an unknown task, no lengths, an unusable folder or device.
    """
    args = parser.parse_args(arguments)
    if args.preset:
        parser.set_defaults(**PRESETS[args.preset])
        args = parser.parse_args(arguments)
    given = vars(args)
    if not args.lengths:
        raise BadInput("--lengths: expected at least one, in tokens, or a --preset")
    least = {"samples": 1, "decoys": 1, "attention": 0, "loss": 0, "batch_size": 1}
    for name, low in least.items():
        if given.get(name, low) < low:
            raise BadInput(
                f"--{name.replace('_', '-')}: expected at least {low}, got {given[name]}"
            )
    for depth in args.depths:
        if not 0 <= depth <= 1:
            raise BadInput(f"--depths: expected 0 to 1, got {depth:g}")
    try:
        specs = tuple(dict.fromkeys(map(parse, args.tasks)))
    except ValueError as error:
        raise BadInput(f"--tasks: {error}") from None
    store.check_folder(args.out)
    if "device" in args:
        args.device = _device(args.device)
    if "score" in args:
        args.score = [each for each in SCORES if each in args.score]
    lengths, depths = (tuple(sorted(set(each))) for each in (args.lengths, args.depths))
    rows = given.get("batch_size", 1)
    grid = Grid(specs, lengths, depths, args.samples, args.seed, batch=rows, shared=args.shared)
    own = {field.name for field in fields(Settings)}
    values = {name: value for name, value in given.items() if name in own}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    lists |= {name: tuple(dict.fromkeys(given.get(name, ()))) for name in ("models", "attn")}
    return Settings(grid=grid, **values | lists), args


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
