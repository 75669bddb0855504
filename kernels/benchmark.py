"""Time and memory of both attention functions beside their rivals, on a GPU or a CPU.

    python kernels/benchmark.py                                    # sizes that suit this machine
    python kernels/benchmark.py --lengths 2048 8192 --dims 128 --out rows.jsonl --plot rows.png

Contenders of a shape are timed in turn, one call each a round, so that a change of the machine's
speed hits all of them. Ours is first compared with the float64 reference on a slice of the shape,
and a wrong kernel is not timed. A rival that is missing or raises gets a row with the reason.
On a GPU the device is timed, not Python: `timed` says how (timing.py), `clocks_mhz` at what clocks.
TFLOP/s count 4·B·H·M·N·D forward, half of it if causal, and 2.5 times that backward.
"""

import argparse
import importlib.metadata
import json
import platform
import statistics
import subprocess
from collections import defaultdict
from datetime import date
from pathlib import Path

import timing
import torch
from benchmark_report import plot, shape_of, summary, table
from contenders import DECODING, DTYPES, LENGTH_FIRST, OURS, PACKAGES, prepare, verify
from tqdm import tqdm

from hf_sigmoid.files import write_text

HERE = Path(__file__).resolve().parent


def main(arguments: list[str] | None = None) -> list[dict]:
    options = parse(arguments)
    device = torch.device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    if device.type == "cuda":
        from hf_sigmoid.kernels.flash import tuning

        tuning.warn_of_assembler()
    machine = describe(device)
    shapes = list_shapes(options)
    rows = read(options.out) if options.out else []
    done = {(row["name"], shape_of(row)) for row in rows if row["device"] == machine["device"]}
    for shape in tqdm(shapes, desc="shapes", disable=None):
        names = [n for n in options.contenders if shape["M"] == 1 or n not in DECODING]
        if all((name, shape_of(shape)) in done for name in names):
            continue
        rows += [{**machine, **row} for row in measure(names, shape, device, options.rounds)]
        if options.out:
            write(options.out, rows)
    print(table(rows))
    print(summary(rows))
    if options.plot:
        plot(rows, options.plot)
    return rows


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line; a default that depends on the device is filled in here."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if gpu else "cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--lengths", type=int, nargs="*", help="tokens, M = N")
    parser.add_argument("--decode", type=int, nargs="*", help="keys that one query sees")
    parser.add_argument("--dims", type=int, nargs="+", help="head dims")
    parser.add_argument("--masks", nargs="+", choices=("causal", "full"))
    parser.add_argument("--passes", nargs="+", choices=("forward", "backward", "both"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, help="query heads")
    parser.add_argument("--key-heads", type=int, help="key and value heads; all if not given")
    parser.add_argument("--contenders", nargs="+", help="sdpa is always one of them")
    parser.add_argument("--rounds", type=int, help="timed calls of each contender")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument(
        "--out", type=Path, help="JSON lines; a shape that is there is not repeated"
    )
    parser.add_argument("--save", action="store_true", help="--out results/DEVICE-DATE.jsonl")
    parser.add_argument("--plot", type=Path, help="draw time relative to sdpa and TFLOP/s as PNG")
    options = parser.parse_args(arguments)

    gpu = torch.device(options.device).type == "cuda"
    defaults = {
        "dtype": ("bf16", "fp32"),
        "lengths": ([2048, 4096, 8192, 16384, 32768], [2048, 4096, 8192]),
        "decode": ([8192, 32768, 131072], [8192]),
        "dims": ([64, 128], [64]),
        "masks": (["causal", "full"], ["causal"]),
        "passes": (["forward", "backward"], ["forward", "both"]),
        "heads": (16, 8),
        "rounds": (30, 5),
        "contenders": (
            [*OURS, "sdpa", "sdpa-cudnn", "flex", *LENGTH_FIRST, *DECODING],
            ["sigmoid", "ssmax", "sdpa", "flex", *DECODING],
        ),
    }
    for name, (on_gpu, on_cpu) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, on_gpu if gpu else on_cpu)
    unknown = set(options.contenders) - {*OURS, *PACKAGES}
    if unknown:
        parser.error(f"contenders are {', '.join([*OURS, *PACKAGES])}, got {', '.join(unknown)}")
    if options.heads % (options.key_heads or options.heads):
        parser.error(f"--heads must be a multiple of --key-heads, got {options.heads}")
    options.contenders = list(dict.fromkeys([*options.contenders, "sdpa"]))
    if options.save and not options.out:
        name = describe(torch.device(options.device))["device"].replace(" ", "-").lower()
        options.out = HERE / "results" / f"{name}-{date.today()}.jsonl"
    return options


def list_shapes(options: argparse.Namespace) -> list[dict]:
    """Square shapes, then those of decoding: one query, grouped heads on a GPU."""
    H = options.heads
    G = options.key_heads or H
    common = {"dtype": options.dtype, "B": options.batch, "H": H}
    shapes = [
        {**common, "G": G, "M": n, "N": n, "D": D, "is_causal": mask == "causal", "pass": step}
        for D in options.dims
        for n in options.lengths
        for mask in options.masks
        for step in options.passes
    ]
    if not options.key_heads and torch.device(options.device).type == "cuda":
        G = max(1, H // 4)
    decode = {**common, "G": G, "M": 1, "is_causal": False, "pass": "forward"}
    return shapes + [{**decode, "N": n, "D": D} for D in options.dims for n in options.decode]


def describe(device: torch.device) -> dict:
    """The device, versions and commit that numbers depend on; no name of a machine."""
    versions = {name: version(name) for name in ("torch", "triton", "hf-sigmoid")}
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        features = torch.backends.cpu.get_cpu_capability()
        name = f"{platform.machine()} CPU {features} {torch.get_num_threads()} threads"
    versions |= timing.toolchain(device)
    git = subprocess.run(
        ["git", "-C", HERE, "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return {"device": name, "commit": git.stdout.strip() or None, "versions": versions}


def version(package: str | None) -> str | None:
    try:
        return importlib.metadata.version(package) if package else None
    except importlib.metadata.PackageNotFoundError:
        return None


def measure(names: list[str], shape: dict, device: torch.device, rounds: int) -> list[dict]:
    """One row for each contender of a shape: its times, or the reason why there are none."""
    if device.type == "cuda":
        # Not on the default stream, where nothing can be captured.
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):
            return _measure(names, shape, device, rounds)
    return _measure(names, shape, device, rounds)


def _measure(names: list[str], shape: dict, device: torch.device, rounds: int) -> list[dict]:
    steps, rows = {}, {}
    for name in names:
        rows[name] = {"name": name, "version": version(PACKAGES.get(name, "hf-sigmoid")), **shape}
        try:
            if name in OURS:
                verify(name, shape, device)
            step = prepare(name, shape, device)
            peak = warm_up(step, device)
            steps[name] = run, how = timing.capture(step, device)
            timing.clock(run, how, device)
            rows[name] |= {"timed": how, "rounds": rounds, "peak_bytes": peak}
        except Exception as error:  # whatever a rival's package raises is the row's content
            steps.pop(name, None)
            why = str(error).strip().splitlines() or [""]
            rows[name]["reason"] = f"{type(error).__name__}: {why[0][:200]}"
    times = defaultdict(list)
    for _ in range(rounds):
        for name, (run, how) in steps.items():
            times[name].append(timing.clock(run, how, device))
    clocks = timing.clocks(device)
    for name, ms in times.items():
        middle = statistics.median(ms)
        fifths = statistics.quantiles(ms, n=5) if rounds > 1 else ms * 4
        low, high = fifths[0], fifths[3]
        rows[name] |= {"ms": middle, "ms_best": min(ms), "ms_20": low, "ms_80": high}
        rows[name]["clocks_mhz"] = clocks
        if name not in DECODING:
            rows[name]["tflops"] = operations(shape) / middle * 1e-9
        if "sdpa" in times:
            rows[name]["of_sdpa"] = middle / statistics.median(times["sdpa"])
    return list(rows.values())


def launch(shape: dict) -> None:
    """What our contenders of a shape launch, on CPU tensors: compiled only, or on the stub."""
    device = torch.device("cpu")
    for name in OURS:
        if name in shape["contenders"]:
            prepare(name, shape, device)()


def operations(shape: dict) -> float:
    B, H, M, N, D = (shape[letter] for letter in "BHMND")
    forward = 4 * B * H * M * N * D * (0.5 if shape["is_causal"] else 1)
    return forward * {"forward": 1, "backward": 2.5, "both": 3.5}[shape["pass"]]


def warm_up(step, device: torch.device) -> int | None:
    """Compile, and return the bytes that a call needs beyond what was there (on a GPU)."""
    step()
    if device.type != "cuda":
        return None
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def read(path: Path) -> list[dict]:
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.exists()
        else []
    )


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


if __name__ == "__main__":
    main()
