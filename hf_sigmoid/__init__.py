"""Sigmoid attention and SSMax for any Hugging Face Transformers model.

    import hf_sigmoid
    AutoModelForCausalLM.from_pretrained(path, attn_implementation="sigmoid")   # or "ssmax"

The import itself takes milliseconds and loads neither torch nor Triton: the two names are
registered at the moment transformers loads its model classes, or at once if it already has.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from hf_sigmoid.after_import import install

if TYPE_CHECKING:
    from hf_sigmoid.configuration import configure
    from hf_sigmoid.functional import sigmoid_attention, ssmax_attention
    from hf_sigmoid.support import Unsupported

# A checkout that is not installed: conversions/ lies beside this folder.
if (Path(__file__).parents[1] / "conversions" / "convert.py").is_file():
    __path__.append(str(Path(__file__).parents[1]))

__version__ = "0.1.0"
__all__ = ["Unsupported", "configure", "sigmoid_attention", "ssmax_attention"]

_HOME = {
    "Unsupported": "hf_sigmoid.support",
    "configure": "hf_sigmoid.configuration",
    "sigmoid_attention": "hf_sigmoid.functional",
    "ssmax_attention": "hf_sigmoid.functional",
}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'hf_sigmoid' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


install()
