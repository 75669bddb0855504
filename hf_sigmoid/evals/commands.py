"""`hf-sigmoid eval`, and `recipes/needle.py`, which is the same command.

hf-sigmoid eval --models A B@sdpa --preset cpu --out runs/eval
hf-sigmoid eval report runs/a runs/b --out runs/both
hf-sigmoid eval build --tokenizer A --tasks single multikey:8 --lengths 4k --out samples
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hf_sigmoid  # noqa: F401 (registers the attention functions)
from hf_sigmoid.errors import BadInput, ChecksFailed
from hf_sigmoid.evals import run_file, settings
from hf_sigmoid.interrupts import STATUS, while_loading
from hf_sigmoid.terminal import show_anything

STOPPED = "stopped: the same command goes on from here"

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
    settings.add_arguments(parser)
    asked = settings.read(parser.parse_args(arguments))
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
        run_file.check_folder(out)
    from hf_sigmoid.evals import report
    from hf_sigmoid.evals.merging import merged

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
    settings.add_arguments(parser, models=False)
    args = parser.parse_args(arguments)
    asked = settings.read(args)
    if asked.out.exists() and (not asked.out.is_dir() or any(asked.out.iterdir())):
        raise BadInput(f"--out {asked.out}: expected a new or empty folder")
    from hf_sigmoid.embedded import checkpoint
    from hf_sigmoid.evals.export import save, to_dataset
    from hf_sigmoid.evals.plan import builder_of, haystack
    from hf_sigmoid.loading import load_tokenizer

    tokenizer = load_tokenizer(checkpoint(args.tokenizer))
    text = haystack(asked, tokenizer)
    builder = builder_of(asked, tokenizer, text.content)
    about = {
        "tokenizer": args.tokenizer, "haystack": text.name, "seed": asked.grid.seed,
        "prompt": "chat" if builder.frame else "base", "round_trips": builder.round_trips,
    }  # fmt: skip
    made = to_dataset(asked.grid.samples_of(builder), tokenizer)
    save(asked.out, made, about)
    print(f"{len(made)} samples in {asked.out}")
    return about | {"samples": len(made)}


def _show(out: Path, summary: dict[str, Any]) -> None:
    from hf_sigmoid.evals import report

    for model in summary["models"]:
        if not model["round_trips"]:
            print(
                f"{model['name']}: decoding its prompts does not give the text back; ids are used"
            )
    print(report.table(summary))
    print(f"report: {out / 'report.html'}")
