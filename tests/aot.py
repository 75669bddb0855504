"""Compiles every kernel for GPUs that are not here: `python tests/aot.py [quick] [TARGET …]`.

The real launchers run on CPU tensors while a driver stands in that names a target and launches
nothing, so signatures, specialisation and tile sizes are those that a GPU of that kind would get.
It needs a process without TRITON_INTERPRET: an interpreted kernel cannot be compiled.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import KernelInterface

from hf_sigmoid.kernels.flash.backward import backward
from hf_sigmoid.kernels.flash.forward import forward

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Shared memory that one program may use, in bytes (CUDA programming guide; CDNA3 ISA).
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_120": 99 << 10, "gfx942": 64 << 10}

# function, dtype, D, V, every optional argument at once
CASES = [
    (function, dtype, *dims, every_term)
    for function in ("sigmoid", "ssmax")
    for dtype, dims, every_term in (
        (torch.bfloat16, (64, 64), False),
        (torch.bfloat16, (128, 128), False),
        (torch.bfloat16, (96, 40), True),
        (torch.float32, (64, 64), True),
        (torch.float16, (64, 64), True),
        (torch.float32, (128, 128), True),
        (torch.bfloat16, (256, 256), False),
        (torch.float32, (256, 256), False),
    )
]
QUICK = [*CASES[:4], *CASES[8:12]]  # what the test suite has the time for


class CompileOnlyDriver:
    """As much of a Triton driver as `kernel.warmup` asks for."""

    devices = 1000  # kernels are cached by device number, so every driver gets its own

    def __init__(self, target: GPUTarget):
        self.target = target
        CompileOnlyDriver.devices += 1
        self.device = CompileOnlyDriver.devices

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device=None):
        return 0


@contextlib.contextmanager
def compiling(target: GPUTarget):
    """Within it `kernel[grid](...)` compiles instead of launching; yields what it compiled."""
    compiled = []

    def launcher(kernel, grid):
        return lambda *args, **kwargs: compiled.append(kernel.warmup(*args, grid=grid, **kwargs))

    active, getitem = driver._active, KernelInterface.__getitem__
    driver._active, KernelInterface.__getitem__ = CompileOnlyDriver(target), launcher
    try:
        yield compiled
    finally:
        driver._active, KernelInterface.__getitem__ = active, getitem


def launch(function: str, dtype: torch.dtype, D: int, V: int, every_term: bool) -> None:
    """Call both launchers; inside `compiling` their results are garbage."""
    B, H, G, M, N = 2, 4, 2, 512, 512
    query, key, value = (
        torch.zeros(B, heads, M, dim, dtype=dtype) for heads, dim in ((H, D), (G, D), (G, V))
    )
    # As the verbs pass them: numbers of a head expanded over rows, masks over heads.
    row = torch.zeros(H, 1).expand(B, H, M)
    intervals = torch.zeros(B, M, 2, dtype=torch.int32)
    mask = logit_bias = alibi_slopes = sinks = None
    if every_term:
        mask = torch.zeros(B, 1, M, N, dtype=torch.bool).expand(B, H, M, N)
        logit_bias = torch.zeros(1, H, M, N).expand(B, H, M, N)
        alibi_slopes = torch.zeros(H).expand(B, H)
        sinks = torch.zeros(H) if function == "ssmax" else None
    arguments = (query, key, value, row, intervals, mask, logit_bias, alibi_slopes, sinks, function,
                 D**-0.5, 30.0 if every_term else 0.0, 0.0, 0)  # fmt: skip
    output, log_sum_exp = forward(*arguments)
    backward(torch.zeros_like(output), output, log_sum_exp, True, *arguments)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes of local memory (spilled registers) of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return {
        "registers": int(found["REG"]),
        "local_bytes": int(found["STACK"]) + int(found["LOCAL"]),
    }


def main(names: list[str], cases: list[tuple]) -> None:
    """Compile the cases for the named targets; any error ends it."""
    if triton.knobs.runtime.interpret:
        raise SystemExit("TRITON_INTERPRET is set: the kernels of this process cannot be compiled")
    print(
        "target  kernel          function dtype      D   V terms  registers  local bytes shared kB"
    )
    for name in names:
        for case in cases:
            with compiling(TARGETS[name]) as compiled:
                launch(*case)
            kernels = {kernel.hash: kernel for kernel in compiled}.values()
            assert len(kernels) == 4, f"expected four kernels, got {len(kernels)}"
            for kernel in kernels:
                shared, title = kernel.metadata.shared, kernel.metadata.name
                assert shared <= SHARED_BYTES[name], (
                    f"{title} {case} wants {shared} bytes of shared memory"
                )
                used = {"registers": 0, "local_bytes": 0}
                if "cubin" in kernel.asm:
                    used = resources(kernel.asm["cubin"])
                function, dtype, D, V, every_term = case
                print(
                    f"{name:7} {title:15} {function:8} {str(dtype)[6:]:8} {D:3} {V:3} "
                    f"{'all' if every_term else 'none':>5} {used['registers']:10} "
                    f"{used['local_bytes']:12} {shared / 1024:9.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
    chosen = [name for name in sys.argv[1:] if name != "quick"]
    # gfx942 only by name: Triton 3.9 fails on the dense mask there (kernels/README.md).
    main(
        chosen or [name for name in TARGETS if name.startswith("sm_")],
        QUICK if "quick" in sys.argv else CASES,
    )
