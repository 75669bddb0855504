"""Makes Triton's interpreter right for bfloat16, for tests only.

It keeps bfloat16 as its uint16 bits and multiplies those, without an error. Products are taken in float32
here, as a GPU's are, and any other arithmetic on bfloat16 raises: the kernels are to cast first.
"""

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def install() -> None:
    """Patch the interpreter; once, however often it is called."""
    builder = InterpreterBuilder
    if getattr(builder, "is_right_for_bfloat16", False):
        return
    builder.is_right_for_bfloat16 = True

    multiply = builder.create_dot

    def create_dot(self, a, b, acc, *options):
        return multiply(self, _to_float32(a), _to_float32(b), acc, *options)

    builder.create_dot = create_dot
    for name in ("binary_op", "unary_op", "create_fma"):
        setattr(builder, name, _refuse_bfloat16(getattr(builder, name)))

    # 2^x of a hidden logit may overflow, and inf·0 of an unused factor is NaN: both are selected away.
    np.seterr(over="ignore", invalid="ignore", divide="ignore")


def _is_bfloat16(handle) -> bool:
    return isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.bfloat16


def _to_float32(handle):
    if not _is_bfloat16(handle):
        return handle
    bits = np.ascontiguousarray(handle.data).astype(np.uint32) << 16
    return TensorHandle(bits.view(np.float32), tl.float32)


def _refuse_bfloat16(method):
    def checked(self, *args, **kwargs):
        if any(_is_bfloat16(arg) for arg in args):
            raise TypeError("arithmetic on bfloat16 is wrong in the interpreter: cast to float32 first")
        return method(self, *args, **kwargs)

    return checked
