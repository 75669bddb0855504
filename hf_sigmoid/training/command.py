"""The command lines of `hf-sigmoid train` and `hf-sigmoid distil`; no torch is loaded for them."""

import argparse
from collections.abc import Sequence

from hf_sigmoid.terminal import show
from hf_sigmoid.training import run_config
from hf_sigmoid.training.run_config import Model


def read(
    kind: type[Model], name: str, about: str, argv: Sequence[str] | None, **flags: str
) -> tuple[Model | None, argparse.Namespace]:
    """The run that a command line describes, and its options; no run if it asks for the keys.

    Args:
        flags: further options without a value, and their help.
    """
    parser = argparse.ArgumentParser(
        prog=f"hf-sigmoid {name}", description=about.split("\n")[0],
        usage=f"hf-sigmoid {name} [options] [CONFIG] KEY=VALUE …",
    )  # fmt: skip
    parser.add_argument("--config", help="YAML file of keys; CONFIG says the same")
    parser.add_argument("--keys", action="store_true", help="print every key and end")
    for flag, said in flags.items():
        parser.add_argument(f"--{flag.replace('_', '-')}", action="store_true", help=said)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="win over the file")
    # Intermixed: keys may stand before, between and after the options.
    args = parser.parse_intermixed_args(argv)
    if args.keys:
        show(run_config.describe(kind))
        return None, args
    file, words = args.config, args.words
    if file is None and words and "=" not in words[0]:
        file, *words = words
    return run_config.load(file, words, kind), args
