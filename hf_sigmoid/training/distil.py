"""Distil a softmax model's attention into its sigmoid (or ssmax) conversion.

    hf-sigmoid distil recipes/sigmoid/distil.yaml model=CONVERTED output_dir=runs/distilled …

First layer by layer, every attention module on what it gets in the softmax model, then (optional)
the whole model on the softmax model's next-token distributions. CONVERTED is a folder that
`hf-sigmoid convert` wrote; the softmax model is inside it. What comes out is a checkpoint like
CONVERTED, without any parameter of distillation. A killed run goes on from its last complete
checkpoint and repeats an uninterrupted one to the last bit. Under a launcher:
`accelerate launch -m hf_sigmoid.training.distil …`.
"""

from collections.abc import Sequence
from pathlib import Path

from hf_sigmoid.training import command, script
from hf_sigmoid.training.run_keys import Distil


def main(argv: Sequence[str] | None = None) -> Path | None:
    """Distil as the command line says; the folder of the final model, None if not finished.

    Raises:
        BadInput: before anything is written.
        FloatingPointError: the run diverged.
        KeyboardInterrupt: Ctrl-C, after what was done is saved; a second one, at once.
    """
    run, _ = command.read(Distil, "distil", __doc__, argv)
    if run is None:
        return None
    with script.loading():
        from hf_sigmoid.training import distilling, processes
    try:
        return distilling.distil(run)
    finally:
        processes.leave_group()


if __name__ == "__main__":
    script.run(main)
