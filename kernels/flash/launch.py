"""Launches a kernel; one that was launched before is found by a short key.

Triton binds the arguments of every launch anew to find the compiled variant, which costs more of
the host's time than all else of a decoding step. A variant depends on the constants and, of every
other argument, on what `kind` tells.
"""

from typing import Any

from torch import Tensor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from hf_sigmoid.kernels.flash.tiles import Strided

_compiled: dict[tuple, tuple[Any, tuple]] = {}


def launch(kernel: Any, grid: tuple, *args: Any, num_warps: int = 4, num_stages: int = 2,
           **constants: Any) -> None:  # fmt: skip
    """`kernel[grid](*args, **constants)`, with num_warps and num_stages as Triton's.

    Numbers among `args` are floats, or integers below 2^31 that the kernel does not specialize.
    """
    options = {"num_warps": num_warps, "num_stages": num_stages}
    kinds = tuple(map(kind, args)) if isinstance(kernel, JITFunction) else (NotImplemented,)
    if NotImplemented in kinds:  # the interpreter, or a descriptor
        kernel[grid](*args, **constants, **options)
        return
    device = driver.active.get_current_device()
    # By identity: a kernel's hash is of its source.
    key = (id(kernel), device, num_warps, num_stages, *constants.values(), kinds)
    if key in _compiled:
        compiled, ordered = _compiled[key]
        compiled[(*grid, 1, 1)[:3]](*args, *ordered)
        return
    compiled = kernel[grid](*args, **constants, **options)
    if getattr(compiled, "module", None) is not None:  # it was launched, and not only compiled
        ordered = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        _compiled[key] = compiled, ordered


def kind(arg: Any) -> Any:
    """What Triton specializes an argument on: equal kinds take the same variant.

    Of tensors the dtype and whether the address is a multiple of 16; of a stride whether it is 1, a
    multiple of 16, and more than 31 bits. NotImplemented for what is not known here.
    """
    if arg is None or isinstance(arg, float):
        return arg is None
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, Strided):
        ptr, strides = arg
        kinds = [s if s == 1 else (s % 16 == 0, s >= 1 << 31) for s in strides]
        return ptr.dtype, ptr.data_ptr() % 16 == 0, *kinds
    return int if isinstance(arg, int) else NotImplemented
