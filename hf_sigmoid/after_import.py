"""Registration at the right moment: when transformers has loaded `modeling_utils`, not earlier.

`import transformers` is lazy and takes half a second; its model classes bring torch and Triton and
take two more. A plugin that imported them to register itself would make every script that mentions
it pay for that.
"""

import importlib
import importlib.abc
import importlib.util
import sys

MODULE = "transformers.modeling_utils"


def register_with_transformers() -> None:
    """Register as soon as transformers' model classes are loaded, maybe now. Idempotent."""
    if MODULE in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    # Importing it registers. Where that import is itself what loaded transformers, it goes on by
    # itself.
    importlib.import_module("hf_sigmoid.registration")


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the one import through, registers after it, and is gone."""

    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _register()

        spec.loader.exec_module = exec_module
        return spec
