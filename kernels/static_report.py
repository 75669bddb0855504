"""What the compilers make of every kernel, without a GPU: `python kernels/static_report.py`.

The real operator runs on CPU tensors while a driver stands in that names a chip and launches
nothing, so signatures, specialisation and tile sizes are those that a GPU of that kind would get.
What was compiled is disassembled and counted; nothing is timed. Causal, windowed, padded and packed
calls run the same compiled kernel (intervals are data), so one row stands for all of them.

Columns, of the whole kernel:

    kernel … D     what was launched; D/V where they differ, `terms`: with every optional argument,
                   `decode`: one query a sequence, `statistics`: with them, `tanh`: with
                   HF_SIGMOID_FORM=tanh, `expanded`: one key head for all. `terms`, `statistics`,
                   fp32 and 256 have no limits but that they compile and fit, and run on sm_80 and
                   sm_120 unless --targets is given
    tile, w, form  BLOCK_M×BLOCK_N, num_warps and the form of σ (flash/tuning.py) of the launch
    regs           registers of a thread (AMD: vector registers)
    spill, local   bytes of registers spilled to and filled from memory (AMD: bytes of scratch), and
                   instructions that touch such memory: LDL, STL, scratch_*
    serial         ptxas's warnings that it made matrix products synchronous (C7510 to C7519)
    smem           shared memory of a program in kB
    atom           atomic additions to global memory: ATOM, RED

and of its hot loop, the innermost loop with the most matrix work, and of equals the shortest, which
is the one without a mask. A score is one element of the tile of q·k.

    ins/s          instructions of a lane per score, and in brackets those that are neither matrix
                   products nor loads of their operands from shared memory, which on chips without
                   asynchronous products (mma.sync) are as many as the arithmetic
    mufu/s, kinds  special-function operations per score: exponential, reciprocal, tanh, …
    shfl … bar     instructions in one pass of the loop: exchanges between lanes, float minima and
                   maxima, loads and stores of shared memory, barriers
    work           matrix work done per matrix work needed: 2.00 says that warps repeat each other.
                   `-` on sm_100, whose instructions do not name their sizes
    ovl            sm_90: share of the special-function instructions issued while an asynchronous
                   matrix product is in flight; an order of issue, not a time
    limits         `ok`, or which of `limits` the row breaks

`--check` exits with 1 if a row breaks a limit, a kernel does not compile, or registers, spills,
instructions or special functions per score have grown by more than 5 % over static_baseline.json,
which `--write-baseline` writes for the installed Triton version.
"""

import argparse
import contextlib
import functools
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from disassembly import count, find_loops, hot_loop, needed_flops, overlap, parse_amdgcn, parse_sass
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import KernelInterface

from hf_sigmoid.kernels.flash import attention

BASELINE = Path(__file__).with_name("static_baseline.json")
TARGETS = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100, 120)},
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Shared memory that one program may use, in kB (CUDA programming guide; CDNA3 ISA).
SHARED_KB = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
# Of each form of σ: special functions per score, and instructions per score of the forward loop,
# those of matrix products (ins/s) left out. A variant of a form (pair_…) has the form's limits.
FORMS = {
    "rsqrt": (2.0, math.inf),
    "pair": (1.5, 7.8),
    "halley": (1.0, math.inf),
    "tanh": (1.0, 5.7),
}
# float16 has not the range for a sum in units of 2^-60: half an instruction more a score. On sm_90
# at dim 128 the products have twice as many operands to address as at 64.
EXCEPTIONS = {"sm_90 forward sigmoid fp16 128": 8.1}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# A case is one call of the operator: function, dtype, D or D/V, and what is special about it.
PLAIN = [f"{dtype} {D}{extra}" for extra in ("", " decode") for D in (64, 128) for dtype in DTYPES]
PLAIN = [case for case in PLAIN if "fp32" not in case] + ["bf16 64 tanh"]
# What must compile and fit into shared memory, whatever it spills.
OTHER = ["bf16 96/40 terms", "fp16 64 terms", "fp32 64 terms", "fp32 128 terms"]
OTHER += ["bf16 256", "fp32 256", "bf16 128 statistics"]
# On sm_90 too, whose copy engine does not read an expanded key.
EXPANDED = "sigmoid bf16 128 expanded"
CASES = [f"{function} {case}" for case in PLAIN + OTHER for function in ("sigmoid", "ssmax")]
QUICK = [  # what the test suite has the time for; the slowest first
    ("gfx942", "sigmoid bf16 64"),
    ("sm_90", "sigmoid bf16 64"),
    ("sm_90", "ssmax bf16 96/40 terms"),
    ("sm_80", "ssmax fp16 128"),
    ("sm_80", "sigmoid bf16 64 decode"),
]


def is_plain(case: str) -> bool:
    return case.split(" ", 1)[1] in PLAIN or case == EXPANDED


# Compiling

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


def call(case: str) -> None:
    """Both passes of one call; inside `compiling` the results are garbage."""
    function, dtype, dims, *special = case.split()
    D, V = (int(dims.split("/")[i]) for i in (0, -1))
    B, H, G = 2, 8, 2
    M, N = (1, 4096) if "decode" in special else (512, 512)
    q = torch.zeros(B, H, M, D, dtype=DTYPES[dtype])
    k, v = (q.new_zeros(B, G, N, dim) for dim in (D, V))
    if "expanded" in special:
        k, v = (tensor[:, :1].expand(tensor.shape) for tensor in (k, v))
    q.requires_grad_()
    # As the verbs pass them: numbers of a head expanded over rows, masks over heads.
    row = torch.zeros(H, 1).expand(B, H, M)
    intervals = torch.zeros(B, M, 2, dtype=torch.int32)
    os.environ["HF_SIGMOID_FORM"] = "tanh" if "tanh" in special else "accurate"
    softcap, terms = 0.0, [None] * 4
    if "terms" in special:
        mask = torch.zeros(B, 1, M, N, dtype=torch.bool).expand(B, H, M, N)
        logit_bias = torch.zeros(1, H, M, N, requires_grad=True).expand(B, H, M, N)
        sinks = torch.zeros(H) if function == "ssmax" else None
        terms = [mask, logit_bias, torch.zeros(H).expand(B, H), sinks]
        softcap = 30.0
    arguments = (q, k, v, row, intervals, *terms, function, D**-0.5, softcap, 0.0, 0)
    output, *_ = attention(*arguments, "statistics" in special)
    if "decode" not in special:
        output.backward(torch.zeros_like(output))


# Rows


@dataclass
class Row:
    """What one compiled kernel costs; the module's docstring explains the figures."""

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
            Path(folder, re.sub(r"[ /]", "-", f"{row}.{kind}")).write_text(content)

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


def limits(row: Row) -> Iterator[tuple[str, float, str, float]]:
    """Every limit that a row must keep: figure, value, "at most" or "at least", limit."""
    yield "shared kB", row.shared_bytes / 1024, "at most", SHARED_KB[row.target]
    if not is_plain(row.case):
        return
    yield "spilled bytes", row.spill_bytes, "at most", 0
    yield "local", row.total["local"], "at most", 0
    yield "serialized", row.serialized, "at most", 0
    is_backward = "backward" in row.kernel
    if is_backward:
        yield "atomics", row.total["atom"], "at most", 0
    if row.tile is None or "decode" in row.case:
        return
    is_sigmoid = row.case.startswith("sigmoid")
    form, mufu = row.form.split("_")[0], row.per_score("mufu")
    yield "hot loop", bool(row.loop), "at least", 1
    yield "known form", form in FORMS, "at least", 1
    form_mufu, form_instructions = FORMS.get(form, (0.0, 0.0))
    if row.target.startswith("gfx"):
        # Inline PTX compiles there without an error and is missing from the code.
        yield "mufu/score", mufu, "at least", form_mufu if is_sigmoid else 1.0
    if is_sigmoid and not is_backward:
        yield "shfl", row.loop["shfl"], "at most", 0
        yield "fmnmx", row.loop["fmnmx"], "at most", 0
        if row.target.startswith("sm"):
            yield "mufu/score", mufu, "at most", form_mufu
            if row.case != EXPANDED:
                most = EXCEPTIONS.get(str(row), form_instructions)
                yield "instructions/score", row.arithmetic, "at most", most
    if row.target == "sm_90":
        yield "overlap", row.overlap or 0.0, "at least", 0.5


def broken(row: Row) -> dict[str, str]:
    """A sentence for every limit that a row breaks, by figure."""
    if row.error:
        return {"error": f"{row}: {row.error}"}
    return {
        figure: f"{row}: {figure} is {value:.4g}, {bound} {limit:g} is allowed"
        for figure, value, bound, limit in limits(row)
        if (value > limit + 1e-6 if bound == "at most" else value < limit - 1e-6)
    }


def ratchet(row: Row) -> dict[str, float]:
    """The figures that a baseline keeps. Registers as a chip hands them out: eight at a time."""
    scores = {kind: round(row.per_score(kind), 4) for kind in ("instructions", "mufu")}
    return {"registers": -(-row.registers // 8) * 8, "spill_bytes": row.spill_bytes, **scores}


def read_baselines() -> tuple[dict, dict]:
    """The baselines of all Triton versions, and the installed one's, which may be empty."""
    baselines = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    return baselines, baselines.get(triton.__version__, {})


def grown(row: Row, baseline: dict[str, dict[str, float]]) -> list[str]:
    """What a row has more of than 5 % over its baseline."""
    before = baseline.get(str(row), {})
    return [
        f"{row}: {figure} was {before[figure]:g}, is {value:g}"
        for figure, value in ratchet(row).items()
        if figure in before and value > 1.05 * before[figure]
    ]


TABLE = (
    "{target:6} {kernel:13} {function:8} {dtype:5} {D:11} {tile:7} {w:>2} {form:11} {regs:>4} "
    "{spill:>5} {local:>5} {serial:>6} {smem:>4} {atom:>4} {ins/s:>13} {mufu/s:>6} {kinds:18} "
    "{shfl:>4} {fmnmx:>5} {lds:>4} {sts:>4} {bar:>3} {work:>4} {ovl:>4} {limits}"
)
HEAD = TABLE.format(**{name: name for name in re.findall(r"{([^:}]+)", TABLE)})


def line(row: Row) -> str:
    """A row of the table."""
    function, dtype, dims = row.case.split(" ", 2)
    decimals = {
        "mufu/s": row.per_score("mufu") or None,
        "work": row.work,
        "ovl": row.overlap,
    }
    kinds = [f"{k[5:]} {row.per_score(k):.2f}" for k in row.loop if k.startswith("MUFU.")]
    return TABLE.format(
        target=row.target, kernel=row.kernel, function=function, dtype=dtype, D=dims,
        tile="{}×{}".format(*row.tile) if row.tile else "-", w=row.warps, form=row.form or "-",
        regs=row.registers, spill=row.spill_bytes, local=row.total["local"], serial=row.serialized,
        **{"ins/s": f"{row.per_score('instructions'):.2f} ({row.arithmetic:.2f})"},
        smem=f"{row.shared_bytes / 1024:.0f}", atom=row.total["atom"], kinds=" ".join(kinds) or "-",
        **{name: "-" if value is None else f"{value:.2f}" for name, value in decimals.items()},
        **{kind: row.loop[kind] for kind in ("shfl", "fmnmx", "lds", "sts", "bar")},
        limits="BROKEN: " + ", ".join(broken(row)) if broken(row) else "ok",
    )  # fmt: skip


def report(job: tuple[str, str, list[str], str | None]) -> list[Row]:
    """Compile and measure what one case launches on one target."""
    target, case, only, folder = job
    rows = []

    def launch(kernel, grid, *args, **options):
        row, log = Row(target, kernel.__name__.strip("_"), case), io.StringIO()
        if not all(part in str(row) for part in only):
            return
        rows.append(row)
        row.warps = options.get("num_warps", 4)
        try:
            with contextlib.redirect_stdout(log):
                compiled = kernel.warmup(*args, grid=grid, **options)
            measure(row, compiled, log.getvalue(), folder)
        except Exception as error:
            row.error = f"{type(error).__name__}: {error}".splitlines()[0]

    with warnings.catch_warnings(), compiling(TARGETS[target], launch):
        warnings.simplefilter("ignore")
        try:
            call(case)
        except Exception as error:
            rows.append(Row(target, "call", case, f"{type(error).__name__}: {error}"))
    return rows


def silence() -> None:
    """A compiler that fails prints its whole module to standard error: not from a worker."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a few cases, in less than a minute")
    add("--targets", nargs="+", choices=TARGETS, metavar="TARGET", help=" ".join(TARGETS))
    add("--only", nargs="+", default=[], metavar="SUBSTR",
        help="rows whose name, as in 'sm_90 forward sigmoid bf16 64', contains all")  # fmt: skip
    add("--jobs", type=int, default=2, help="processes")
    add(
        "--check",
        action="store_true",
        help="exit with 1 on any problem, or if nothing was compiled",
    )
    add("--write-baseline", action="store_true")
    add("--loops", action="store_true", help="print the counts of every loop")
    add("--keep", metavar="DIR", help="write ttgir, ptx, assembly and ptxas's log there")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.exit(2, "TRITON_INTERPRET is set: interpreted kernels cannot be compiled\n")
    if options.keep:
        os.makedirs(options.keep, exist_ok=True)
    targets, pairs = options.targets or TARGETS, QUICK
    if not options.quick:
        # The others have more shared memory or slow compilers: there only if --targets names them.
        skipped = set() if options.targets else TARGETS.keys() - {"sm_80", "sm_120"}
        pairs = [(name, case) for case in CASES for name in targets]
        pairs = [(name, case) for name, case in pairs if is_plain(case) or name not in skipped]
        pairs.append(("sm_90", EXPANDED))
    jobs = [(*pair, options.only, options.keep) for pair in pairs if pair[0] in targets]
    baselines, baseline = read_baselines()

    print(HEAD)
    rows, problems = [], []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with multiprocessing.get_context("spawn").Pool(options.jobs, silence) as pool:
            for row in (row for found in pool.imap(report, jobs) for row in found):
                rows.append(row)
                problems += [*broken(row).values(), *grown(row, baseline)]
                print(line(row), flush=True)
                for (a, b), counts in row.loops.items() if options.loops else ():
                    print(f"  loop {a}-{b}:", *(f"{k} {n}" for k, n in counts.items() if n))
    for sentence in problems:
        print(sentence)
    new = sum(str(row) not in baseline for row in rows)
    print(f"{len(rows)} kernels, {len(problems)} problems; {new} without a baseline for Triton "
          f"{triton.__version__}, held to the limits only")  # fmt: skip
    if options.write_baseline:
        baselines[triton.__version__] = baseline | {str(row): ratchet(row) for row in rows}
        BASELINE.write_text(json.dumps(baselines, indent=1, sort_keys=True) + "\n")
    return int(options.check and (not rows or len(problems) > 0))


if __name__ == "__main__":
    sys.exit(main())
