"""Change a checkpoint's attention function: `hf-sigmoid convert MODEL OUT --to …`."""

from hf_sigmoid.conversions.calibrate import calibrate
from hf_sigmoid.conversions.compare import perplexity, token_windows
from hf_sigmoid.conversions.convert import convert
from hf_sigmoid.conversions.embedded import checkpoint

__all__ = ["calibrate", "checkpoint", "convert", "perplexity", "token_windows"]
