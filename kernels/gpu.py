"""`make gpu`: is this checkout right on this GPU, and how fast? One command, at most ten minutes.

    python3 kernels/gpu.py                      # rows in kernels/results/gpu-run
    python3 kernels/gpu.py --cache FOLDER       # with kernels compiled before: prewarm.py
    python3 kernels/gpu.py --dry-run --limit 2  # without a GPU: launches on the stub driver

It needs Python, torch, Triton, transformers and a C compiler, and installs nothing. Parts, in turn,
each with its share of the time:

    compile      every kernel of the other parts, in as many processes as there are cores
    correctness  checks of tests/gpu_checks.py, in an order that has every pair of features first
    sweep        the tile table against its neighbours (sweep.py)
    benchmark    the main rows (gpu_shapes.py), by the device's clock

A part's rows are written as they are made. A second run of the same commit goes on where the first
ended; a job in which the process died or hung is a failure and is not repeated. It exits with 1 if
a check failed or none ran, and prints failures first.
"""

import argparse
import faulthandler
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import prewarm  # puts the checkout's folders on the path

HERE = Path(__file__).resolve().parent
# Seconds of each part; 565 in all, and processes have to start.
SECONDS = {"compile": 100, "correctness": 240, "sweep": 105, "benchmark": 120}
ONE_JOB = 60  # seconds after which a job hangs
LOST = 3  # exit status of a part whose GPU context is lost: it goes on in another process
DIED = "the process died or hung in it"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="results/gpu-run, or gpu-dry-run, if not given")
    parser.add_argument("--cache", type=Path, help="Triton's cache; in --out if not given")
    parser.add_argument("--parts", nargs="+", choices=SECONDS, default=list(SECONDS))
    parser.add_argument("--scale", type=float, default=1.0, help="of the time of every part")
    parser.add_argument("--dry-run", action="store_true", help="on the stub driver, as sm_90")
    parser.add_argument("--limit", type=int, help="the first jobs of each part only")
    parser.add_argument("--part", choices=SECONDS, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    name = "gpu-dry-run" if options.dry_run else "gpu-run"
    options.out = (options.out or HERE / "results" / name).resolve()
    options.cache = (options.cache or options.out / "triton-cache").resolve()
    if options.part:
        return work(options)
    options.out.mkdir(parents=True, exist_ok=True)
    options.cache.mkdir(parents=True, exist_ok=True)
    machine = describe(options.dry_run)
    print(*(f"{name}: {value}" for name, value in machine.items()), sep="\n", flush=True)
    if "missing" in machine:
        return 2
    if other := differs(options.out / "machine.jsonl", machine):
        print(f"the rows in {options.out} are of another {other}: go on with another --out")
        return 2
    append(options.out / "machine.jsonl", machine)
    print(f"kernels in the cache: {prewarm.relocate(options.cache)}", flush=True)
    for part in options.parts:
        start = time.time()
        supervise(part, options, start + SECONDS[part] * options.scale)
        rows = read(options.out / f"{part}.jsonl")
        print(f"{part}: {len(rows)} rows, {time.time() - start:.0f} s", flush=True)
    return summarize(options)


def describe(dry: bool) -> dict:
    """What this machine has; `missing` says what it lacks."""
    found = {"python": platform.python_version(), "commit": commit()}
    missing = []
    for name in ("torch", "triton", "transformers"):
        try:
            found[name] = __import__(name).__version__
        except ImportError as error:
            missing.append(f"{name} ({error})")
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        missing.append("a C compiler, which Triton launches with (gcc, clang, or CC)")
    if not missing and not dry:
        import timing
        import torch

        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
            found["gpu"] = torch.cuda.get_device_name(device)
            found["arch"] = "{}{}".format(*torch.cuda.get_device_capability(device))
            found |= timing.toolchain(device) | {"clocks_mhz": timing.clocks(device)}
        else:
            missing.append("a GPU that torch sees")
    return found | ({"missing": ", ".join(missing)} if missing else {})


def differs(path: Path, machine: dict) -> str | None:
    """What an earlier run's rows depend on that is not the same now."""
    for row in read(path)[-1:]:
        for name in ("commit", "gpu", "python", "torch", "triton", "driver"):
            if row.get(name) != machine.get(name):
                return f"{name} ({row.get(name)}, now {machine.get(name)})"
    return None


def commit() -> str | None:
    command = ["git", "-C", HERE, "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def supervise(part: str, options: argparse.Namespace, until: float) -> None:
    """Run a part in processes of its own, another one wherever one dies, until it is done."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(options.cache)}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--until", str(until)]
    while time.time() < until:
        try:
            # A process that does not even end by itself is ended here.
            limit = until - time.time() + ONE_JOB + 20
            status = subprocess.run(command, env=environment, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            status = None
        close(options.out / f"{part}.jsonl")
        if status == 0 or part == "compile":
            break
        print(f"{part}: a process ended with {status}; another one goes on", flush=True)


def close(path: Path) -> None:
    """A job that was begun and has no result is one in which the process died."""
    for key, row in latest(path).items():
        if row["status"] == "begun":
            append(path, {"key": key, "status": "failed", "reason": DIED})


def work(options: argparse.Namespace) -> int:
    """One part, in this process."""
    path = options.out / f"{options.part}.jsonl"
    if options.part == "compile":
        return compile_all(options, path)
    import torch

    if options.dry_run:
        import stub_cuda

        stub_cuda.activate(90)
        stub_cuda.count_variants()
        return do(jobs(options.part, options.limit), path, "cpu", options.until, dry=True)
    with torch.cuda.stream(torch.cuda.Stream()):  # a backward pass is captured on its own stream
        return do(jobs(options.part, options.limit), path, "cuda", options.until, dry=False)


def jobs(part: str, limit: int | None = None) -> dict[str, Callable]:
    """Jobs by name, to be called with the device's name."""
    if part == "correctness":
        import gpu_checks

        found = gpu_checks.ordered()
    elif part == "sweep":
        import sweep

        found = sweep.jobs()
    else:
        import gpu_shapes

        found = {name: benchmark_job(shape) for name, shape in gpu_shapes.shapes().items()}
    return dict(list(found.items())[:limit])


def benchmark_job(shape: dict) -> Callable:
    def job(device: str) -> dict:
        import benchmark
        import torch

        fields = {name: v for name, v in shape.items() if name not in ("contenders", "rounds")}
        place = torch.device(device)
        if device == "cpu":  # on the stub: the real launches, then a small shape for the rest
            benchmark.launch(shape)
            fields |= {"M": min(shape["M"], 64), "N": min(shape["N"], 64)}
        rows = benchmark.measure(shape["contenders"], fields, place, shape["rounds"])
        return {"rows": [{**benchmark.describe(place), **row} for row in rows]}

    return job


def do(found: dict[str, Callable], path: Path, device: str, until: float, *, dry: bool) -> int:
    """Do the jobs that have no row yet, and write a row of each; the exit status of the process."""
    done = latest(path)
    for key, job in found.items():
        if key in done:
            continue
        if time.time() > until:
            break
        append(path, {"key": key, "status": "begun"})
        faulthandler.dump_traceback_later(ONE_JOB, exit=True)
        row, start = {"key": key, "status": "ok"}, time.monotonic()
        try:
            result = job(device=device) or {}
            row |= {"status": "dry"} if dry else result
        except Exception as error:
            # On the stub nothing is right: only what is no comparison counts.
            compared = isinstance(error, AssertionError | ArithmeticError)
            row["status"] = "dry" if dry and compared else "failed"
            row["reason"] = f"{type(error).__name__}: {error}".strip()[:300]
        faulthandler.cancel_dump_traceback_later()
        append(path, {**row, "seconds": round(time.monotonic() - start, 3)})
        if row["status"] == "failed" and not usable(device):
            return LOST
    return 0


def usable(device: str) -> bool:
    """Does the GPU still answer? After an illegal access no call of the process does."""
    import torch

    try:
        torch.zeros(1, device=device).add_(1).item()
    except RuntimeError:
        return False
    return True


def compile_all(options: argparse.Namespace, path: Path) -> int:
    arch = 90 if options.dry_run else int(read(options.out / "machine.jsonl")[-1]["arch"])
    done = latest(path)
    names = [name for name in prewarm.names(arch, options.limit) if name not in done]
    for row in prewarm.fill(names, options.cache, arch, os.cpu_count()):
        append(path, {"status": "refused" if "reason" in row else "ok", **row})
        if time.time() > options.until:
            break
    return 0


def summarize(options: argparse.Namespace) -> int:
    """Print what fell short, failures first; the exit status."""
    import benchmark_report
    import sweep

    found = {part: latest(options.out / f"{part}.jsonl") for part in SECONDS}
    failures = {
        part: {key: row["reason"] for key, row in rows.items() if row["status"] == "failed"}
        for part, rows in found.items()
    }
    checks, wrong = found["correctness"], failures["correctness"]
    print("\n=== correctness")
    for key, reason in wrong.items():
        print(f"  FAILED {key}: {reason}")
    total = len(jobs("correctness", options.limit))
    what = "launched" if options.dry_run else "right"
    print(f"  {len(checks) - len(wrong)} {what}, {len(wrong)} wrong, {total - len(checks)} not run")
    for part in ("sweep", "benchmark"):
        print(f"\n=== {part}: {len(found[part])} jobs, {len(failures[part])} without a time")
        for key, reason in failures[part].items():
            print(f"  {key}: {reason}")
    if options.dry_run:
        return int(any(failures.values()) or not all(found[part] for part in options.parts))
    print(sweep.summary(list(found["sweep"].values())))
    timed = [row for job in found["benchmark"].values() for row in job.get("rows", ())]
    print(benchmark_report.table(timed))
    print(benchmark_report.summary(timed))
    print(f"\nrows: {options.out}")
    return int(bool(wrong) or not checks)


def append(path: Path, row: dict) -> None:
    # A line that a killed process left half must not swallow the next.
    torn = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * torn + json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict]:
    """The rows of a file; a last line that a killed process left half is none."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def latest(path: Path) -> dict[str, dict]:
    """The last row of every job."""
    return {row["key"]: row for row in read(path)}


if __name__ == "__main__":
    sys.exit(main())
