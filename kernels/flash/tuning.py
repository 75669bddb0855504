"""Tile sizes and the form of σ, chosen without a measurement at run time.

A table and not an autotuner: nothing is timed at import or at the first call, the same inputs take
the same kernel on every run, and a launch never waits for the GPU. For 16-bit inputs with head dim
64 or 128 and no optional term the sizes compile for sm_90 without spilling a register, and for
sm_80 with at most 80 bytes of spills (`python tests/aot.py` prints all). None has been timed yet.
"""

import os
import warnings
from typing import NamedTuple

import torch
import triton
from packaging.version import Version
from triton import knobs
from triton.runtime.driver import driver


class Tile(NamedTuple):
    """Queries and keys of a tile of scores, warps of a program, stages of its pipelined loop."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By the larger head dim, up to and including the key. 16-bit operands go through tensor cores;
# their accumulators for [block_m, dim] are what fills the registers. float32 ones do not (no tf32),
# and their operands fill the registers twice as fast. At head dim 256 shared memory binds.
HALF = {
    "forward": {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
    "dq": {64: Tile(128, 64, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 1)},
    "dkdv": {64: Tile(64, 64, 8, 2), 128: Tile(32, 64, 8, 2), 256: Tile(32, 32, 8, 1)},
}
# With all optional terms staged in shared memory HALF's largest tiles do not fit the 99 kB of
# sm_86, 89 and 120: every GPU but sm_80 and sm_90 takes these.
SMALL = {
    "forward": {**HALF["forward"], 128: Tile(64, 64, 8, 2)},
    "dq": {**HALF["dq"], 64: Tile(64, 64, 8, 2)},
    "dkdv": HALF["dkdv"],
}
FLOAT = {
    "forward": {64: Tile(64, 32, 8, 2), 128: Tile(32, 32, 8, 2), 256: Tile(16, 32, 8, 1)},
    "dq": {64: Tile(32, 32, 8, 2), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)},
    "dkdv": {64: Tile(32, 32, 8, 2), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)},
}


def tile(kernel: str, dtype: torch.dtype, dim: int) -> Tile:
    """The tile of one kernel ("forward", "dq" or "dkdv") for `dtype` and head dims up to `dim`."""
    half = HALF if _target() in (("cuda", 80), ("cuda", 90)) else SMALL
    table = (half if dtype.itemsize == 2 else FLOAT)[kernel]
    return next(sizes for limit, sizes in table.items() if dim <= limit)


def form(dtype: torch.dtype) -> str:
    """The form of σ: "pair" (inline PTX) for 16-bit inputs on NVIDIA GPUs, "rsqrt" elsewhere.

    On AMD inline PTX compiles without an error and is missing from the code; the interpreter has
    none. With float32 inputs the pair form's error of 1.3e-6 would show, and its speed would not.
    """
    return "pair" if dtype.itemsize == 2 and _target()[0] == "cuda" else "rsqrt"


def warn_of_assembler() -> None:
    """On Hopper, say that the assembler in Triton before 3.9 may corrupt results.

    Its ptxas is older than 13.3 and can reuse the registers of a warp-group matrix product
    before they are read (triton-lang/triton issue 11781); every attention kernel has some.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return
    if Version(triton.__version__) < Version("3.9") and "TRITON_PTXAS_PATH" not in os.environ:
        warnings.warn(
            f"Triton {triton.__version__} assembles for Hopper with a ptxas that is known to "
            "miscompile matrix products: install triton>=3.9, or set TRITON_PTXAS_PATH to a ptxas "
            "of CUDA 13.3 or newer, and compare with backend='reference' before you trust a result",
            stacklevel=2,
        )


def _target() -> tuple[str, int | str]:
    """Backend and architecture of the current device."""
    if knobs.runtime.interpret:
        return "interpreter", 0
    target = driver.active.get_current_target()
    return target.backend, target.arch
