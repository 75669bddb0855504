"""Continue pretraining a causal language model on packed documents.

    hf-sigmoid train recipes/ssmax/continue.yaml model=MODEL output_dir=runs/ssmax KEY=VALUE …

The same under a launcher: `accelerate launch -m hf_sigmoid.training.train …`, or the script
recipes/continue_pretrain.py of a checkout.
"""

from collections.abc import Sequence
from pathlib import Path

from hf_sigmoid.training import command, script
from hf_sigmoid.training.run_keys import Run


def main(argv: Sequence[str] | None = None) -> Path | None:
    """Train as the command line says; the folder of the final model, None if not finished.

    Raises:
        BadInput: before anything is written.
        FloatingPointError: the run diverged.
        KeyboardInterrupt: Ctrl-C, after what was done is saved; a second one, at once.
    """
    run, args = command.read(
        Run, "train", __doc__, argv, dry_run="say what would be done; one step of two layers",
        plot="draw the log as PNG files at the end",
    )  # fmt: skip
    if run is None:
        return None
    with script.loading():
        from hf_sigmoid.training import prepare, processes
    try:
        return prepare.train(run, dry=args.dry_run, plot=args.plot)
    finally:
        processes.leave_group()


if __name__ == "__main__":
    script.run(main)
