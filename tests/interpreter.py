"""Makes Triton's interpreter right for bfloat16, for tests only, and twice as fast.

It keeps bfloat16 as its uint16 bits and multiplies those, without an error. Products are taken in
float32 here, as a GPU's are, and any other arithmetic on bfloat16 raises: the kernels are to cast
first. It cuts float32 off to bfloat16; here it rounds to the nearest, as a GPU does. The few PTX
instructions that the kernels write in line are understood too.
"""

from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
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
    builder.create_inline_asm = run_ptx
    cast = builder.cast_impl

    def cast_impl(self, source, target):
        if target.scalar == tl.bfloat16 and source.dtype.scalar == tl.float32:
            return TensorHandle(_round_to_bfloat16(source.data), target.scalar)
        return cast(self, source, target)

    builder.cast_impl = cast_impl
    for name in ("binary_op", "unary_op", "create_fma"):
        setattr(builder, name, _refuse_bfloat16(getattr(builder, name)))

    _read_scalars_of_any_numpy()
    _patch_language_once_a_launch()
    # 2^x of a hidden logit may overflow and inf·0 of an unused factor is NaN: neither is used.
    np.seterr(over="ignore", invalid="ignore", divide="ignore")


def _read_scalars_of_any_numpy() -> None:
    """A loop's bound is an array of one element, which Triton 3.6 gives to int(): not numpy 2.4."""
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor


def _patch_language_once_a_launch() -> None:
    """Half of the interpreter's time is to patch triton.language again at each call of a helper."""
    patch = interpreter._patch_lang
    patched = set()  # modules of this launch: triton.language, or what its own helpers see of it

    def patch_once(fn):
        names = frozenset(n for n, x in fn.__globals__.items() if x is tl or x is tl.core)
        if names in patched:
            return interpreter._LangPatchScope()
        is_launch = not patched
        patched.add(names)
        scope = patch(fn)
        restore = scope.restore

        def restore_all():
            if is_launch:
                patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_once


def run_ptx(self, asm, constraints, values, dtype, is_pure, pack) -> SimpleNamespace:
    """Elementwise inline PTX over groups of `pack` elements, in float32.

    add.sat, mul, rcp and tanh are known.
    """
    (value,) = values
    groups = value.data.reshape(-1, pack)
    registers = {f"${pack + i}": groups[:, i] for i in range(pack)}

    def operand(name):
        if name.startswith("0f"):
            return np.array(int(name[2:], 16), np.uint32).view(np.float32)
        return registers[name]

    one = np.float32(1)
    operations = {
        "add.sat.f32": lambda a, b: np.clip(a + b, 0, one),
        "mul.f32": lambda a, b: a * b,
        "mov.b32": lambda a: a,
        "rcp.approx.ftz.f32": lambda a: one / a,
        "tanh.approx.f32": np.tanh,
    }
    for line in asm.strip().strip("{}").split(";"):
        words = line.replace(",", " ").split()
        if words and words[0] != ".reg":
            registers[words[1]] = operations[words[0]](*map(operand, words[2:]))
    result = np.stack([registers[f"${i}"] for i in range(pack)], 1).astype(np.float32)
    handle = TensorHandle(result.reshape(value.data.shape), tl.float32)
    return SimpleNamespace(get_result=lambda index: handle)


def _is_bfloat16(handle) -> bool:
    return isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.bfloat16


def _to_float32(handle):
    if not _is_bfloat16(handle):
        return handle
    bits = np.ascontiguousarray(handle.data).astype(np.uint32) << 16
    return TensorHandle(bits.view(np.float32), tl.float32)


def _round_to_bfloat16(data: np.ndarray) -> np.ndarray:
    """Bits of float32 numbers rounded to the nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(data, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)


def _refuse_bfloat16(method):
    def checked(self, *args, **kwargs):
        if any(_is_bfloat16(arg) for arg in args):
            raise TypeError(
                "bfloat16 arithmetic is wrong in the interpreter: cast to float32 first"
            )
        return method(self, *args, **kwargs)

    return checked
