"""Change a checkpoint's attention function: `hf-sigmoid convert MODEL OUT --to …`."""

from hf_sigmoid.conversions.calibrate import calibrate
from hf_sigmoid.conversions.compare import perplexity, token_windows
from hf_sigmoid.conversions.convert import convert
from hf_sigmoid.conversions.plan import Plan, apply, plan
from hf_sigmoid.conversions.revert import revert
from hf_sigmoid.conversions.training import convert_training
from hf_sigmoid.embedded import checkpoint

__all__ = [
    "Plan", "apply", "calibrate", "checkpoint", "convert", "convert_training",
    "perplexity", "plan", "revert",
    "token_windows",
]  # fmt: skip
