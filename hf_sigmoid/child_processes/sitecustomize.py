"""Registers the two functions in every Python process that `python -m hf_sigmoid` starts.

Python imports a module of this name at its start, and `hf_sigmoid/__main__.py` puts this folder
first in PYTHONPATH. The environment's own `sitecustomize`, which this one hides, runs as well.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_here = Path(__file__).resolve().parent
if importlib.util.find_spec("hf_sigmoid") is None:  # a checkout that is not installed
    sys.path.append(str(_here.parent.parent))

import hf_sigmoid  # noqa: E402, F401 (registers)

_others = [each for each in sys.path if Path(each or ".").resolve() != _here]
_hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _hidden is not None:
    _module = importlib.util.module_from_spec(_hidden)
    _hidden.loader.exec_module(_module)
