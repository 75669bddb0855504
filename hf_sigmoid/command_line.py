"""The command `hf-sigmoid`: it parses the command line; what is asked for is loaded then."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

import hf_sigmoid
from hf_sigmoid.interrupts import STATUS, while_loading
from hf_sigmoid.terminal import show_anything

# Modules of hf_sigmoid/training whose `main` is a command.
TRAINING = {
    "train": ("train", "continue pretraining on packed documents, under any attention"),
    "distil": ("distil", "let a conversion's attention follow the softmax model's"),
    "recipes": ("recipe_files", "the YAML files to start a run from"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run it, print the result; an error is one line and exit status 2."""
    show_anything()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["eval"]:
        from hf_sigmoid.evals.commands import run

        return run(arguments[1:])
    if arguments[:1] and arguments[0] in TRAINING:
        return _train(*arguments)
    options = _parser().parse_args(arguments)
    stopped = f"hf-sigmoid {options.command}: stopped, nothing was written"
    try:
        with while_loading(stopped):
            from hf_sigmoid.conversions import commands

        result, sentence = getattr(commands, options.command)(options)
    except (ValueError, OSError, ImportError) as error:
        print(f"hf-sigmoid: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{stopped}", file=sys.stderr)
        return STATUS
    print(json.dumps(result, indent=2) if options.json else sentence)
    return 0


def _train(command: str, *arguments: str) -> int:
    """A command of `hf_sigmoid/training`, which ends as its scripts do."""
    try:
        with while_loading(f"hf-sigmoid {command}: stopped, nothing was written"):
            from hf_sigmoid.training import script

            module = importlib.import_module(f"hf_sigmoid.training.{TRAINING[command][0]}")
        script.run(lambda: module.main(arguments))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("hf_sigmoid"):
            raise
        print(
            f"hf-sigmoid {command} needs the package {error.name}: "
            "pip install 'hf-sigmoid[recipes]'",
            file=sys.stderr,
        )
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-sigmoid",
        description="Sigmoid attention and SSMax: convert, train and evaluate checkpoints.",
    )
    parser.add_argument(
        "--version", action="version", version=f"hf-sigmoid {hf_sigmoid.__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    model = "checkpoint folder, hub id, or smollm2 for the embedded one"
    out = "folder to write; must be new or empty"

    inspect = commands.add_parser("inspect", help="what a model is, and what could be changed")
    inspect.add_argument("model", help=model)

    convert = commands.add_parser(
        "convert", help="write a converted copy of a model that reads text"
    )
    convert.add_argument("model", help=model)
    convert.add_argument("out", nargs="?", help=out)
    convert.add_argument("--to", required=True, choices=["ssmax", "sigmoid"], dest="function")
    convert.add_argument(
        "--init", metavar="START",
        help="ssmax: identity (default), paper, anchored:L; sigmoid: calibrated-hidden, "
        "calibrated-query, calibrated (default: the best of them on held-out text), minus-log-n",
    )  # fmt: skip
    convert.add_argument(
        "--layers", metavar="LAYERS", help="layers to convert, as 0-15,not:3 (default: all)"
    )
    convert.add_argument(
        "--part", metavar="CONFIG",
        help="of a composite model: the part to convert, as text_config (default: the part that "
        "reads and writes text)",
    )  # fmt: skip
    convert.add_argument(
        "--device-map", metavar="auto",
        help="where the weights are meanwhile: auto, balanced, cpu, cuda:0 … (default: a GPU that "
        "holds them, else the CPU)",
    )  # fmt: skip
    convert.add_argument(
        "--keep-softmax", default=0, metavar="RANKING:K",
        help="sigmoid: K layers stay softmax, those that it would change most (auto:4), or that "
        "give back most of the answers to needles (needle:4, needle:90%%) or of the text (kl:4)",
    )  # fmt: skip
    convert.add_argument(
        "--rope", metavar="CHANGE",
        help="ssmax: also change the RoPE by theta:F, ntk:F or yarn:F, to F times the positions",
    )  # fmt: skip
    text = "files or folders of text or rows, or dataset:NAME[:CONFIG[:SPLIT[:FIELD]]]"
    convert.add_argument(
        "--calibrate", metavar="TEXT", nargs="+",
        help=f"text to fit sigmoid's query biases on: {text}",
    )  # fmt: skip
    convert.add_argument(
        "--evaluate", metavar="TEXT", nargs="+",
        help=f"text for perplexities and needles: {text}; builtin, or none to measure nothing",
    )  # fmt: skip
    convert.add_argument(
        "--stats", metavar="FILE", help="stats.safetensors of an earlier conversion of this model"
    )
    convert.add_argument(
        "--window", type=int, default=512, metavar="TOKENS", help="of a window (default 512)"
    )
    convert.add_argument(
        "--windows", type=int, default=32, metavar="N", help="windows of each text (default 32)"
    )
    convert.add_argument(
        "--seed",
        type=int,
        help="choose windows and documents at random (default: evenly)",
    )
    convert.add_argument(
        "--lengths", type=int, nargs="+", metavar="TOKENS",
        help="lengths to report figures of (default: powers of two up to the window)",
    )  # fmt: skip
    convert.add_argument(
        "--needle", type=int, nargs="?", const=4, default=0, metavar="N",
        help="also look for N needles (4) at each of three depths for every length",
    )  # fmt: skip
    convert.add_argument(
        "--push-to-hub", metavar="USER/NAME", help="also upload what was written, when it is done"
    )
    convert.add_argument(
        "--private", action="store_true", help="with --push-to-hub: to a private repository"
    )
    convert.add_argument(
        "--base", metavar="MODEL",
        help="the model whose training MODEL, a folder of accelerate's save_state, comes from",
    )  # fmt: skip
    convert.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")

    verify = commands.add_parser("verify", help="compare a converted model with its original")
    verify.add_argument("model", help="the converted checkpoint")
    verify.add_argument("--against", required=True, metavar="MODEL", help=model)
    verify.add_argument(
        "--text", nargs="+", help=f"{text} (default: the built-in novel's held-out chapters)"
    )
    verify.add_argument("--lengths", type=int, nargs="+", default=[128, 512], metavar="TOKENS")

    revert = commands.add_parser("revert", help="write a converted checkpoint back as softmax")
    revert.add_argument("model", help="the converted checkpoint")
    revert.add_argument("out", help=out)
    revert.add_argument(
        "--approximate", action="store_true", help="also if its weights were trained since"
    )
    revert.add_argument("--device-map", metavar="auto", help="as for convert")

    merge = commands.add_parser("merge", help="write a PEFT adapter and its base as one checkpoint")
    merge.add_argument("adapter", help="folder of the adapter")
    merge.add_argument("out", help=out)
    merge.add_argument("--base", required=True, metavar="MODEL", help=model)

    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print the result as JSON")
    # With options of their own, which `main` hands on.
    commands.add_parser("eval", help="long-context tasks, models side by side", add_help=False)
    for name, (_, said) in TRAINING.items():
        commands.add_parser(name, help=said, add_help=False)
    return parser
