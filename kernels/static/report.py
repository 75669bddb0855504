"""The compilers' output for every kernel, without a GPU: `python kernels/static/report.py`.

The real operator runs on CPU tensors, with a driver that names a chip and launches nothing
(compiled.py). What was compiled is disassembled and counted; nothing is timed. Causal, windowed,
padded and packed calls run the same compiled kernel (intervals are data), so one row stands for all
of them.

Columns, of the whole kernel:

    kernel … D     what was launched; D/V where they differ, `terms`: with every optional argument,
                   `decode`: one query a sequence, `statistics`: with them, `tanh`: with
                   HF_SIGMOID_FORM=tanh, `expanded`: one key head for all. `terms`, `logit_bias`,
                   `mask dropout`, `statistics`, fp32 and 256 have no limits but that they compile
                   and fit; most run on sm_80 and sm_120 only, unless --targets is given
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
    limits         `ok`, or which limit (limits.py) the row breaks

`--check` exits with 1 if a row breaks a limit, a kernel does not compile, or registers, spills,
instructions or special functions per score have grown by more than 5 % over baseline.json,
which `--write-baseline` writes for the installed Triton version.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import re
import sys
import tempfile
import warnings

import triton
from cases import BIASED, CASES, EXPANDED, QUICK, TARGETS, call, is_plain
from compiled import Row, compiling, measure
from limits import broken, grown, read_baselines, write_baseline

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
            if log.getvalue() or "cubin" not in compiled.asm:
                measure(row, compiled, log.getvalue(), folder)
            else:  # compiled for an earlier launch of this call
                rows.pop()
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
        pairs += [("sm_90", EXPANDED), *BIASED]
    jobs = [(*pair, options.only, options.keep) for pair in pairs if pair[0] in targets]
    _, baseline = read_baselines()

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
        write_baseline(rows)
    return int(options.check and (not rows or len(problems) > 0))


if __name__ == "__main__":
    sys.exit(main())
