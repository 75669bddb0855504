"""Installation at the right moment: when a package that we plug into has been loaded, not earlier.

`import transformers` is lazy and takes half a second; its model classes bring torch and Triton and
take two more. A plugin that imported them to register itself would make every script that mentions
it pay for that. The same goes for PEFT and accelerate, where mistakes of theirs are refused.
"""

import importlib
import importlib.abc
import importlib.util
import sys

# What is called after which module is loaded.
HOOKS = {
    "transformers.configuration_utils": ("hf_sigmoid.layer_types", "register"),
    "transformers.modeling_utils": ("hf_sigmoid.registration", "register"),
    "peft.tuners.tuners_utils": ("hf_sigmoid.guards", "guard_peft"),
    "peft.peft_model": ("hf_sigmoid.guards", "guard_peft_model"),
    "accelerate.accelerator": ("hf_sigmoid.guards", "guard_accelerate"),
    "transformers.generation.continuous_batching.continuous_api": (
        "hf_sigmoid.guards",
        "guard_continuous_batching",
    ),
}


def install() -> None:
    """Install what waits for no module, and wait for the others. Idempotent."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    for name in HOOKS:
        # A package that is only half loaded, because it is what imports us, is not there yet.
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is not None and not getattr(spec, "_initializing", False):
            finder.call(name)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the imports through and calls what waits for them, once for each that succeeds."""

    def __init__(self):
        self.waiting = set(HOOKS)
        self.looking = False  # its own search for a module comes by here again

    def find_spec(self, name, path, target=None):
        if name not in self.waiting or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.call(name)

        spec.loader.exec_module = exec_module
        return spec

    def call(self, name: str) -> None:
        if name not in self.waiting:
            return
        self.waiting.discard(name)
        if name.startswith("transformers."):  # first: of an old one our modules import too much
            importlib.import_module("hf_sigmoid.compat").check_transformers()
        module, function = HOOKS[name]
        install = getattr(importlib.import_module(module), function, None)
        if install is not None:  # else that import is itself what loaded `name`, and goes on
            install()
