"""Fills a folder with the compiled kernels of `make gpu`, on a machine without a GPU or with one.

    python kernels/prewarm.py FOLDER --arch 90              # compile
    python kernels/gpu.py --cache FOLDER                    # use them, wherever the folder now lies

Triton finds a kernel in its cache only if all of these are equal on both machines:

- the build of Triton: its Python files and libtriton.so, which differs by Python's minor version;
- the version of the ptxas that it takes for the chip, the chip itself, and libdevice;
- the source of the kernel and of all that it calls, and the numbers of their first lines;
- the arguments' types, their alignment to 16, and which are 1; constants and the launch's options;
- the environment variables that it compiles by: TRITON_DEFAULT_FP_FUSION, DISABLE_LLVM_OPT, …

The folder and the checkout's place are not among them, but Triton writes the folder's path into it:
`relocate` mends that. A C compiler is still needed beside the GPU, for Triton's driver module;
releases that build another for each signature of arguments (3.6 does) find those in the folder.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent, HERE.parent / "tests", HERE):
    sys.path.insert(0, str(folder))

CHECKS = 120  # of gpu_checks.ordered: more than four minutes last for
PARTS = ("correctness", "sweep", "benchmark")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", type=int, default=90, help="80, 90, 100 or 120")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=int, help="the first jobs of each part only")
    options = parser.parse_args()
    relocate(options.folder)
    jobs = names(options.arch, options.limit)
    start, failed = time.monotonic(), 0
    for done, row in enumerate(fill(jobs, options.folder, options.arch, options.processes), 1):
        failed += "reason" in row
        print(f"{done}/{len(jobs)} {row['key']}: {row.get('reason', row['compiled'])}", flush=True)
    print(f"{len(jobs)} jobs in {time.monotonic() - start:.0f} s, {failed} of them refused")


def relocate(folder: Path) -> int:
    """Let a cache that was moved name its own files; how many kernels it holds."""
    groups = list(folder.glob("*/__grp__*.json"))
    for group in groups:
        content = json.loads(group.read_text(encoding="utf-8"))
        paths = {name: str(group.parent.resolve() / name) for name in content["child_paths"]}
        if paths != content["child_paths"]:
            group.write_text(json.dumps({"child_paths": paths}), encoding="utf-8")
    return len(groups)


def names(arch: int, limit: int | None = None) -> list[str]:
    """Jobs of all parts, "part: name", in turns, so that a part cut short has some of each."""
    with _pool(arch, 1, None) as pool:
        by_part = pool.apply(_names)
    by_part = [part[:limit] for part in by_part]
    longest = max(map(len, by_part))
    return [part[i] for i in range(longest) for part in by_part if i < len(part)]


def fill(jobs: list[str], folder: Path, arch: int, processes: int) -> Iterator[dict]:
    """Compile what the jobs launch; a row of each as it is done."""
    with _pool(arch, processes, folder) as pool:
        yield from pool.imap_unordered(_compile, jobs, chunksize=1)


def launches() -> dict[str, dict[str, Callable]]:
    """{part: {name: the launches of a job, to be called on CPU tensors}}."""
    from functools import partial

    import benchmark
    import gpu_checks
    import gpu_shapes
    import sweep

    checks = list(gpu_checks.ordered().items())[:CHECKS]
    tiles = {}  # lengths compile nothing new
    for name, job in sweep.jobs().items():
        kernel, function, (_, H, G, _, _, D), tile = job.args
        tiles.setdefault(
            (kernel, function, H, G, D, tile), (name, partial(sweep.launch, *job.args))
        )
    return {
        "correctness": {name: partial(_launch_check, check) for name, check in checks},
        "sweep": dict(tiles.values()),
        "benchmark": {
            name: partial(benchmark.launch, shape) for name, shape in gpu_shapes.shapes().items()
        },
    }


def _launch_check(check: Callable) -> None:
    import gpu_checks

    # Nothing is computed that could be right.
    with gpu_checks.launched_only(), contextlib.suppress(AssertionError):
        check(device="cpu")


def _pool(arch: int, processes: int, folder: Path | None):
    return multiprocessing.get_context("spawn").Pool(processes, _begin, (arch, folder))


def _begin(arch: int, folder: Path | None) -> None:
    global _launches, _compiled
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_STORE_BINARY_ONLY"] = "1"  # what is read again; a fifth of the bytes
    if folder is not None:
        os.environ["TRITON_CACHE_DIR"] = str(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a compiler that fails prints its whole module
    import stub_cuda
    import torch

    torch.set_num_threads(1)
    stub_cuda.compile_only(arch)
    _compiled = stub_cuda.count_compilations()
    _launches = launches()


def _names() -> list[list[str]]:
    return [[f"{part}: {name}" for name in jobs] for part, jobs in _launches.items()]


def _compile(key: str) -> dict:
    part, name = key.split(": ", 1)
    start, before = time.monotonic(), len(_compiled)
    row = {"key": key}
    try:
        _launches[part][name]()
    except Exception as error:  # a candidate that the compiler refuses is a row of the sweep
        row["reason"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return {**row, "compiled": _compiled[before:], "seconds": round(time.monotonic() - start, 2)}


if __name__ == "__main__":
    main()
