"""Needles and other long-context tasks: `hf-sigmoid eval` from a checkout.

    python recipes/needle.py --models A B@sdpa --lengths 256 512 1024 --depths 0 0.5 1 \
        --samples 10 --out runs/needle
    python recipes/needle.py --models smollm2 --attn sdpa ssmax --preset cpu --out runs/eval
    accelerate launch recipes/needle.py --models A --preset full --out runs/full

Every model sees the same prompts of exactly L tokens. What is asked and measured:
docs/evaluation.md.
"""

import sys

from hf_sigmoid.training import stop_signal  # noqa: F401 (Ctrl-C is one line from here)

# isort: split
from hf_sigmoid.evals.commands import main, run

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(run())
