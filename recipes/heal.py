"""A checkpoint as a healed sigmoid model: convert, distil, let all weights follow, evaluate.

    python recipes/heal.py MODEL OUT --text corpus.jsonl --held-out held_out.txt
    python recipes/heal.py MODEL OUT --set train.precision=bf16 --set train.batch_size=1

Every step is a command that is printed before it runs. What is there already is kept: the same
command goes on after an interruption. `OUT/healed/final` is the model; its `README.md` is a model
card with what was done. On several GPUs run the printed commands, the distillations under
`accelerate launch`.
"""

import argparse
from pathlib import Path

from hf_sigmoid import files
from hf_sigmoid.errors import BadInput
from hf_sigmoid.training import script

with script.loading():
    from stages import Steps

    from hf_sigmoid.training import run_config
    from hf_sigmoid.training.recipe_files import files as recipes
    from hf_sigmoid.training.run_keys import Distil


def main(argv: list[str] | None = None) -> None:
    """Run every step that is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("model", help="softmax checkpoint: a folder, a hub id, or smollm2")
    add("out", type=Path, help="a folder for every step's result")
    add("--text", nargs="+", help="files to calibrate and train on (default: the built-in novel)")
    add("--held-out", nargs="+", help="files to measure perplexity on (default: its last chapters)")
    add("--keep-softmax", metavar="RANKING:K", help="layers that stay softmax, as for convert")
    add("--window", type=int, default=1024, help="tokens of a calibration window")
    add("--windows", type=int, default=24, help="how many")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="keys",
        help="of both distillations, as train.block_size=512; of one: numbers.KEY or healed.KEY",
    )
    add("--lengths", nargs="+", default=["512", "1024"], help="of the prompts of the evaluation")
    args = parser.parse_args(argv)
    files.check_folder(args.out, "out")
    keys = {name: _keys(args.keys, name) for name in ("numbers", "healed")}
    out, stages = args.out, Steps(args.out)
    kept = ["--keep-softmax", args.keep_softmax] if args.keep_softmax else []
    stages.run(
        "converted", "hf-sigmoid", "convert", args.model, "OUT", "--to", "sigmoid",
        "--init", "calibrated-hidden", "--window", str(args.window), "--windows", str(args.windows),
        *(["--calibrate", *args.text] if args.text else []), *kept,
        *(["--evaluate", *args.held_out] if args.held_out else []),
    )  # fmt: skip
    texts = [f"data.path=[{','.join(args.text)}]"] if args.text else []
    texts += [f"evaluate.path=[{','.join(args.held_out)}]" if args.held_out else
              "evaluate.path=builtin"]  # fmt: skip
    for name, recipe, source in (
        ("numbers", "sigmoid/distil", "converted"), ("healed", "sigmoid/heal", "numbers/final"),
    ):  # fmt: skip
        stages.run(
            name, "hf-sigmoid", "distil", str(recipes()[recipe]), f"model={out / source}",
            f"teacher={args.model}", "output_dir=OUT", *texts, *keys[name],
        )  # fmt: skip
    final = str(out / "healed/final")
    stages.run(
        "evaluated", "hf-sigmoid", "eval", "--models", args.model, final, "--lengths",
        *args.lengths, "--out", "OUT",
    )  # fmt: skip
    print(f"{final} is the model, {out / 'evaluated'} what it and {args.model} look up")


def _keys(given: list[str], name: str) -> list[str]:
    """The keys of one distillation, refused before any step if there is no such key."""
    others = {"numbers", "healed"} - {name}
    own = [key.removeprefix(f"{name}.") for key in given if key.split(".")[0] not in others]
    if bad := [key for key in own if key.partition("=")[0] in ("model", "teacher", "output_dir")]:
        raise BadInput(f"--set: expected a key that heal does not give itself, got {bad[0]!r}")
    run_config.load(recipes()["sigmoid/heal"], [*own, "model=MODEL", "output_dir=OUT"], Distil)
    return own


if __name__ == "__main__":
    script.run(main)
