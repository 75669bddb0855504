"""A launch is found again by a short key: arguments of one kind must be one variant to Triton."""

import itertools

import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

from hf_sigmoid.kernels.flash import dbias, decode, dkdv, dq, forward, masked
from hf_sigmoid.kernels.flash.launch import kind
from hf_sigmoid.kernels.flash.tiles import Strided

INTEGERS = {"M", "N", "B", "members", "splits", "seed"}
STRIDES = (0, 1, 2, 8, 15, 16, 17, 48, (1 << 31) - 1, 1 << 31, (1 << 31) + 16)


def of_triton(arg):
    return native_specialize_impl(CUDABackend, arg, False, True, True)


def tensors():
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        memory = torch.empty(64, dtype=dtype)
        for start in (0, 1, 2, 8, 16):
            yield memory[start:]


def arguments():
    yield None
    yield from (0.5, 0.0)
    yield from tensors()
    for tensor, strides in itertools.product(tensors(), itertools.product(STRIDES, repeat=2)):
        yield Strided(tensor, strides)


def test_equal_kinds_are_equal_variants():
    variants = {}
    for arg in arguments():
        expected = variants.setdefault(kind(arg), of_triton(arg))
        assert of_triton(arg) == expected, arg
    assert len(variants) > 100


def test_what_is_not_known_is_not_guessed():
    assert kind(object()) is NotImplemented
    assert kind("text") is NotImplemented


def test_integers_are_not_specialized():
    """So that one variant serves every length."""
    assert native_specialize_impl(CUDABackend, 4096, False, False, True) == ("i32", None)
    kernels = [
        kernel
        for module in (dbias, decode, dkdv, dq, forward, masked)
        for kernel in vars(module).values()
        if "do_not_specialize" in getattr(kernel, "kwargs", {})
    ]
    named = [(kernel, kernel.kwargs["do_not_specialize"]) for kernel in kernels]
    marked = [kernel.fn.__name__ for kernel, names in named if names]
    assert sorted(set(marked)) == [
        "_combine", "_decode", "_forward", "_list_tiles", "backward_dbias", "backward_dkdv",
        "backward_dq", "query_ranges",
    ]  # fmt: skip
    for kernel, names in named:
        if names:
            assert INTEGERS & set(kernel.arg_names) == set(names), kernel.fn
