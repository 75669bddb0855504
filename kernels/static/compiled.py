"""A launch compiled for a GPU that is not here, and what that code costs.

The real launchers run on CPU tensors while a driver stands in that names a chip and launches
nothing, so signatures, specialisation and tile sizes are those that a GPU of that kind would get.
"""

import contextlib
import functools
import itertools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import triton
from disassembly import count, find_loops, hot_loop, needed_flops, overlap, parse_amdgcn, parse_sass
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import KernelInterface

# Kernels are cached by device number: a number for every stand-in.
DEVICES = itertools.count(1000)


def compile_only_driver(target: GPUTarget) -> SimpleNamespace:
    """As much of a Triton driver as `kernel.warmup` asks for."""
    device = next(DEVICES)
    return SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: device,
        get_current_stream=lambda device=None: 0,
    )


@contextlib.contextmanager
def compiling(target: GPUTarget, launch: Callable) -> Iterator[None]:
    """Within it `kernel[grid](...)` for `target` is `launch(kernel, grid, ...)`."""

    def launcher(kernel, grid):
        return functools.partial(launch, kernel, grid)

    knobs = triton.knobs
    active, getitem = driver._active, KernelInterface.__getitem__
    driver._active, KernelInterface.__getitem__ = compile_only_driver(target), launcher
    try:
        with knobs.compilation.scope(), knobs.nvidia.scope():
            # ptxas tells spills and synchronous products in its log, which a cached kernel lacks.
            knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
            yield
    finally:
        driver._active, KernelInterface.__getitem__ = active, getitem


@dataclass
class Row:
    """The cost of one compiled kernel; report.py explains the figures."""

    target: str
    kernel: str
    case: str
    error: str = ""
    form: str = ""
    tile: tuple[int, int] | None = None
    warps: int = 0
    registers: int = 0
    spill_bytes: int = 0
    serialized: int = 0
    shared_bytes: int = 0
    work: float | None = None
    overlap: float | None = None
    total: Counter = field(default_factory=Counter)
    loop: Counter = field(default_factory=Counter)
    lanes_per_score: float = 0.0
    loops: dict[tuple[int, int], Counter] = field(default_factory=dict)

    def __str__(self):
        return f"{self.target} {self.kernel} {self.case}"

    def per_score(self, kind: str) -> float:
        return self.loop[kind] * self.lanes_per_score

    @property
    def arithmetic(self) -> float:
        """Instructions per score that are neither matrix products nor loads of their operands."""
        return self.per_score("instructions") - self.per_score("mma") - self.per_score("lds")


def measure(row: Row, kernel: triton.compiler.CompiledKernel, log: str, folder: str | None) -> None:
    """Fill in a row from what was compiled."""
    asm, names = kernel.asm, kernel.src.fn.arg_names
    constants = {names[path[0]]: value for path, value in kernel.src.constants.items()}
    row.form, row.shared_bytes = constants.get("FORM", ""), kernel.metadata.shared
    if "cubin" in asm:
        text, lanes = disassemble(asm["cubin"]), 32
        instructions = parse_sass(text)
        row.registers = int(re.search(r"Used (\d+) registers", log)[1])
        row.spill_bytes = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log)))
        row.serialized = len(re.findall(r"wgmma\S* instructions are serialized", log))
    else:
        text, lanes = asm["amdgcn"], 64
        instructions = parse_amdgcn(text)
        used = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", text))
        row.registers = int(used["vgpr_count"])
        row.spill_bytes = int(used["private_segment_fixed_size"])
    if folder:
        files = {"asm": text, "log": log, "ttgir": asm["ttgir"], "ptx": asm.get("ptx", "")}
        for kind, content in files.items():
            Path(folder, re.sub(r"[ /]", "-", f"{row}.{kind}")).write_text(
                content, encoding="utf-8"
            )

    row.total, row.loops = count(instructions), find_loops(instructions)
    if {"BLOCK_M", "BLOCK_N"} <= constants.keys():
        row.tile = constants["BLOCK_M"], constants["BLOCK_N"]
    hot = hot_loop(row.loops)
    if hot is None or row.tile is None:
        return
    row.loop = row.loops[hot]
    warps, needed = row.warps, needed_flops(asm["ttir"])
    if needed and row.loop["flops"]:
        row.work = row.loop["flops"] * warps / needed
        # Less than all of it: specialisation has added warps, which share the loop's work.
        warps /= min(1.0, row.work)
    row.lanes_per_score = lanes * warps / (row.tile[0] * row.tile[1])
    if row.target == "sm_90":
        row.overlap = overlap(instructions[hot[0] : hot[1] + 1])


def disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
