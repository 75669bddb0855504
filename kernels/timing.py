"""Times of calls without the host's part, and what a GPU's times depend on.

On a GPU a call is captured once in a CUDA graph, whose replay is timed by events, behind work that
is queued before it: Python is not in the time. Where capture is refused, the call itself is queued
behind longer work, and its row says so.
"""

import subprocess
import time
from collections.abc import Callable

import torch

GRAPH = "CUDA graph"
# Cycles that the GPU waits for the host to have queued a replay, and a call: 0.5 and 5 ms.
SHORT_WAIT, LONG_WAIT = 1_000_000, 10_000_000


def capture(step: Callable, device: torch.device) -> tuple[Callable, str]:
    """What to time for a call that has run before, and how: see `clock`.

    The caller's current stream must not be the default one, and must be that of the forward pass
    if the call is a backward pass: autograd runs it there.
    """
    if device.type != "cuda":
        return step, "host clock"
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            step()
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:  # whatever a rival does under capture is a reason to do without
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return step, f"queued, not captured: {why[:120]}"
    return graph.replay, GRAPH


def clock(run: Callable, how: str, device: torch.device) -> float:
    """Milliseconds of one call; on a GPU with an empty L2 cache."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # 256 MiB of zeros drive everything else out.
    torch.empty(1 << 26, dtype=torch.int32, device=device).zero_()
    torch.cuda._sleep(SHORT_WAIT if how == GRAPH else LONG_WAIT)
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def clocks(device: torch.device) -> dict[str, int] | str | None:
    """The GPU's clocks in MHz just now, and the highest; None on a CPU."""
    if device.type != "cuda":
        return None
    names = {"sm": "clocks.sm", "memory": "clocks.mem", "highest_sm": "clocks.max.sm"}
    values = query(device, *names.values())
    if values is None:
        return "unknown"
    return dict(zip(names, map(int, values), strict=True))


def query(device: torch.device, *fields: str) -> list[str] | None:
    """Fields of `nvidia-smi` for a device; None where there is no such program or it fails."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    command = ["nvidia-smi", f"--id=GPU-{uuid.removeprefix('GPU-')}"]
    command += ["--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        values = [value.strip() for value in run.stdout.strip().split(",")]
    except (OSError, subprocess.SubprocessError):
        return None
    return values if len(values) == len(fields) and all(v.strip("[]N/A") for v in values) else None


def toolchain(device: torch.device) -> dict[str, str | None]:
    """Versions of the assembler that Triton uses for a GPU, and of the driver."""
    if device.type != "cuda":
        return {}
    driver = query(device, "driver_version")
    found = {"driver": driver[0] if driver else "unknown", "assembler": "unknown"}
    if torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        found["assembler"] = assembler(10 * major + minor)
    return found


def assembler(arch: int) -> str:
    """The version of Triton's ptxas for an architecture."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas

        return get_ptxas(arch).version
    except Exception as error:  # names differ between releases of Triton
        return f"unknown: {type(error).__name__}"
