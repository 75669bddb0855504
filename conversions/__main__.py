"""The command `hf-sigmoid`, a thin layer over `convert.py`."""

import argparse
import json
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run it, print the result; an error is one line and exit status 2."""
    parser = argparse.ArgumentParser(
        prog="hf-sigmoid", description="Change the attention of a checkpoint."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "convert", help="write a converted copy of a causal language model"
    )
    command.add_argument("model", help="checkpoint folder, hub id, or smollm2 for the embedded one")
    command.add_argument("out", help="folder to write; must be new or empty")
    command.add_argument("--to", required=True, choices=["ssmax", "sigmoid"], dest="function")
    command.add_argument(
        "--calibrate", metavar="TEXT", help="text file to fit sigmoid's row numbers on"
    )
    command.add_argument("--evaluate", metavar="TEXT", help="text file for the perplexities")
    command.add_argument(
        "--query", action="store_true", help="sigmoid: also fit a term linear in the query"
    )
    command.add_argument(
        "--layers", type=_layers, help="layers to convert, as 0-15,20 (default: all)"
    )
    command.add_argument("--window", type=int, default=512, help="tokens a window (default 512)")
    command.add_argument(
        "--windows", type=int, default=32, help="windows of each text (default 32)"
    )
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)

    import hf_sigmoid  # noqa: F401  registers the two names
    from hf_sigmoid.conversions.convert import convert

    try:
        report = convert(
            options.model, options.out, options.function, calibration=options.calibrate,
            evaluation=options.evaluate, query=options.query, layers=options.layers,
            window=options.window, windows=options.windows,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        print(f"hf-sigmoid: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print(
            f"{options.model} -> {options.out} ({options.function}): perplexity "
            f"{report['perplexity_before']:.2f} before, {report['perplexity_after']:.2f} after"
        )
    return 0


def _layers(given: str) -> list[int]:
    """ "0-15,20" -> [0, …, 15, 20]"""
    layers = []
    for part in given.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise argparse.ArgumentTypeError(
                f"expected numbers and ranges as 0-15,20, got {given!r}"
            )
        if last and int(last) < int(first):
            raise argparse.ArgumentTypeError(f"expected ranges that rise, got {part!r}")
        layers += range(int(first), int(last or first) + 1)
    return layers


if __name__ == "__main__":
    sys.exit(main())
