"""The tile table of `flash/tuning.py` against its neighbours: jobs of `make gpu`.

A job gives one kernel another tile than the table does, compares its results with the table's, and
times both in turn. What is timed is the whole pass that the kernel is in, as a caller meets it.
"""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import timing
import torch

from hf_sigmoid import functional
from hf_sigmoid.kernels.flash import tuning

# B, H, G, M, N, D: a layer's forward and backward passes, short and long, at both head dims.
SHAPES = (
    (2, 16, 16, 4096, 4096, 64),
    (2, 16, 16, 4096, 4096, 128),
    (1, 16, 4, 16384, 16384, 128),
    (1, 16, 16, 16384, 16384, 64),
)
DECODE = (8, 32, 8, 1, 32768, 128)
ROUNDS = 15


def jobs() -> dict[str, Callable]:
    """Candidates by name, to be called with a device; the likeliest of each kernel first."""
    found = []
    for number, shape in enumerate((*SHAPES, DECODE)):
        for function in ("sigmoid", "ssmax"):
            for kernel in ("decode",) if shape is DECODE else ("forward", "dq", "dkdv"):
                for place, tile in enumerate(candidates(kernel, function, shape[-1])):
                    name = f"{kernel} {function} {'x'.join(map(str, shape))} {show(tile)}"
                    found.append((place, number, name, partial(run, kernel, function, shape, tile)))
    # A sweep that is cut has tried the first neighbours of every kernel at every shape.
    return {name: job for _, _, name, job in sorted(found, key=lambda each: each[:3])}


def show(tile: tuning.Tile) -> str:
    flags = [name for name in ("delay", "packed", "descriptors") if getattr(tile, name)]
    stages = f"stages {tile.num_stages}+{tile.ragged_stages}"
    return " ".join((f"{tile.block_m}x{tile.block_n} warps {tile.num_warps} {stages}", *flags))


def candidates(kernel: str, function: str, dim: int) -> list[tuning.Tile]:
    """The table's tile changed in one or two fields; what does not fit is refused when it runs."""
    tile = tuning.tile(kernel, function, torch.bfloat16, dim, described=kernel != "decode")
    m, n, stages = tile.block_m, tile.block_n, tile.num_stages
    changes = [
        {"num_stages": stages + 1}, {"block_n": n // 2}, {"block_n": n // 2, "num_stages": 3},
        {"num_warps": 4}, {"block_n": n * 2}, {"num_stages": stages - 1},
    ]  # fmt: skip
    if kernel != "decode":
        changes += [
            {"block_m": m // 2}, {"block_m": m // 2, "num_warps": 4}, {"block_m": m * 2},
            {"block_m": n, "block_n": m}, {"ragged_stages": 3 - min(tile.ragged_stages, 2)},
        ]  # fmt: skip
    if kernel == "forward":
        changes += [
            {"delay": not tile.delay, "packed": False, "descriptors": False},
            {"delay": True, "packed": not tile.packed},
            {"delay": True, "descriptors": not tile.descriptors},
            {"delay": True, "descriptors": True, "num_stages": 3},
            {"delay": True, "descriptors": True, "block_n": 64, "num_stages": 3},
        ]  # fmt: skip
    tiles = [tile._replace(**change) for change in changes]
    sound = [t for t in tiles if t.num_stages > 0 and min(t.block_m, t.block_n) >= 16]
    return list(dict.fromkeys(t for t in sound if t != tile))


@contextlib.contextmanager
def using(kernel: str, tile: tuning.Tile) -> Iterator[list]:
    """Within it the table has this tile for a kernel; the tiles that were taken from its row."""
    table, taken = tuning.tile, []

    def choose(name: str, *args, **kwargs) -> tuning.Tile:
        if name != kernel:
            return table(name, *args, **kwargs)
        taken.append(tile)
        return tile

    tuning.tile = choose
    try:
        yield taken
    finally:
        tuning.tile = table


def run(kernel: str, function: str, shape: tuple, tile: tuning.Tile, device: str) -> dict:
    """Times in ms of a pass with the tile and with the table's; ArithmeticError if they differ."""
    step = prepare(kernel, function, shape, normal(device))
    expected = step()
    with using(kernel, tile) as taken:
        given = step()
    if not taken:
        raise RuntimeError(f"the launcher of {kernel} took no tile: is a launch plan kept?")
    for name, right in expected.items():
        # Another order of the same float32 sums, then one rounding of the result.
        error = (given[name].float() - right.float()).abs().max().item()
        budget = 2**-7 * right.float().abs().max().item()
        if not error <= budget:
            raise ArithmeticError(f"wrong {name}: error {error:.2g}, budget {budget:.2g}")
    del expected, given
    place = torch.device(device)
    table = timing.capture(step, place)
    with using(kernel, tile):
        changed = timing.capture(step, place)
        times = [
            (timing.clock(*changed, place), timing.clock(*table, place)) for _ in range(ROUNDS)
        ]
    ours, tables = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "kernel": kernel, "function": function, "shape": shape, "tile": tile._asdict(),
        "ms": ours, "table_ms": tables, "of_table": ours / tables, "timed": changed[1],
    }  # fmt: skip


def launch(kernel: str, function: str, shape: tuple, tile: tuning.Tile) -> None:
    """The launches of a job alone, on tensors that hold nothing."""
    step = prepare(kernel, function, shape, partial(torch.empty, dtype=torch.bfloat16))
    step()
    with using(kernel, tile):
        step()


def normal(device: str) -> Callable:
    """A maker of random tensors, the same in every run."""
    generator = torch.Generator(device).manual_seed(0)
    return partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)


def prepare(kernel: str, function: str, shape: tuple, make: Callable) -> Callable:
    """The pass that a kernel is in, as a call of no arguments that returns its results by name."""
    B, H, G, M, N, D = shape
    q, k, v, do = (make(size) for size in ((B, H, M, D), (B, G, N, D), (B, G, N, D), (B, H, M, D)))
    device = q.device
    log_n = torch.arange(1 + N - M, N + 1, device=device).float().log().expand(B, H, M)
    terms = {"bias": -log_n} if function == "sigmoid" else {"multiplier": 0.2 * log_n}
    call = partial(getattr(functional, f"{function}_attention"), backend="triton", is_causal=True)
    if kernel in ("forward", "decode"):

        def forward() -> dict:
            with torch.no_grad():
                return {"output": call(q, k, v, **terms)}

        return forward
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    output = call(*leaves, **terms)

    def backward() -> dict:
        gradients = torch.autograd.grad(output, leaves, do, retain_graph=True)
        return dict(zip(("dq", "dk", "dv"), gradients, strict=True))

    return backward


def summary(rows: list[dict]) -> str:
    """The fastest tile of each kernel, function and shape, beside the table's."""
    groups = {}
    for row in rows:
        if "of_table" in row:
            groups.setdefault((row["kernel"], row["function"], tuple(row["shape"])), []).append(row)
    lines = ["", "tiles: fastest candidate's time / the table's (below 1: the table can be better)"]
    for (kernel, function, shape), mine in groups.items():
        best = min(mine, key=lambda row: row["of_table"])
        name = f"{kernel} {function} {'x'.join(map(str, shape))}"
        tile = show(tuning.Tile(**best["tile"]))
        lines.append(f"  {name:44}{best['of_table']:6.3f}  {best['table_ms']:8.3f} ms  {tile}")
    return "\n".join(lines)
