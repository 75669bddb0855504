"""The largest tensor that a piece of code makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """While entered, `elements` is the size of the largest result of any operation."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            # Views of one element for many, as of an expanded mask, hold no memory.
            if isinstance(each, torch.Tensor) and each.untyped_storage().nbytes() >= each.numel():
                self.elements = max(self.elements, each.numel())
        return made
