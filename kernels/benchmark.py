"""Time and memory of both attention functions beside their rivals, on a GPU or a CPU.

    python kernels/benchmark.py                                    # sizes that suit this machine
    python kernels/benchmark.py --lengths 2048 8192 --dims 128 --out rows.jsonl --plot rows.png

Contenders of a shape are timed in turn, one call each a round, so that a change of the machine's
speed hits all of them. Ours is first compared with the float64 reference on a slice of the shape,
and a wrong kernel is not timed. A rival that is missing or raises gets a row with the reason.
TFLOP/s count 4·B·H·M·N·D forward, half of it if causal, and 2.5 times that backward.
"""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from datetime import date
from pathlib import Path

import torch
from tqdm import tqdm

from hf_sigmoid import functional, reference

HERE = Path(__file__).resolve().parent
SHAPE = ("dtype", "B", "H", "G", "M", "N", "D", "is_causal", "pass")
# Yardsticks of decoding: a copy of as many bytes as it reads, and what transformers' paged cache
# does before it calls us, to read the keys and values of a sequence from their blocks.
DECODING = ("copy", "gather")
CACHE_BLOCK = 32
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OURS = ("sigmoid", "ssmax", "softmax")  # softmax: our ssmax kernels with a multiplier of 1
# Lengths in [batch, length, heads, dim], what these packages take.
LENGTH_FIRST = ("triton-sigmoid", "flash-attn-2", "flash-attn-3")
PACKAGES = {
    "sdpa": "torch", "sdpa-cudnn": "torch", "flex": "torch", "copy": "torch", "gather": "torch",
    "triton-sigmoid": "triton-sigmoid", "flash-attn-2": "flash-attn",
    "flash-attn-3": "flash-attn-3",
}  # fmt: skip


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
    """What the numbers depend on besides the shape; no name of a machine."""
    versions = {name: version(name) for name in ("torch", "triton", "hf-sigmoid")}
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        features = torch.backends.cpu.get_cpu_capability()
        name = f"{platform.machine()} CPU {features} {torch.get_num_threads()} threads"
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
    steps, rows, peaks = {}, {}, {}
    for name in names:
        rows[name] = {"name": name, "version": version(PACKAGES.get(name, "hf-sigmoid")), **shape}
        try:
            if name in OURS:
                verify(name, shape, device)
            steps[name] = step = prepare(name, shape, device)
            peaks[name] = warm_up(step, device)
        except Exception as error:  # whatever a rival's package raises is the row's content
            steps.pop(name, None)
            why = str(error).strip().splitlines() or [""]
            rows[name]["reason"] = f"{type(error).__name__}: {why[0][:200]}"
    times = defaultdict(list)
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(clock(step, device))
    for name, ms in times.items():
        middle = statistics.median(ms)
        fifths = statistics.quantiles(ms, n=5) if rounds > 1 else ms * 4
        low, high = fifths[0], fifths[3]
        rows[name] |= {"ms": middle, "ms_best": min(ms), "ms_20": low, "ms_80": high}
        rows[name] |= {"rounds": rounds, "peak_bytes": peaks[name]}
        if name not in DECODING:
            rows[name]["tflops"] = operations(shape) / middle * 1e-9
        if "sdpa" in times:
            rows[name]["of_sdpa"] = middle / statistics.median(times["sdpa"])
    return list(rows.values())


def operations(shape: dict) -> float:
    B, H, M, N, D = (shape[letter] for letter in "BHMND")
    forward = 4 * B * H * M * N * D * (0.5 if shape["is_causal"] else 1)
    return forward * {"forward": 1, "backward": 2.5, "both": 3.5}[shape["pass"]]


def verify(name: str, shape: dict, device: torch.device) -> None:
    """Raise unless our output and gradients on a slice of a shape are as exact as its dtype allows.

    One key head and its queries, up to 1024 of each: enough for several tiles and a diagonal.
    """
    heads = shape["H"] // shape["G"]
    small = {**shape, "B": 1, "H": heads, "G": 1, "M": min(shape["M"], 1024)}
    small["N"] = small["M"] if shape["M"] == shape["N"] else min(shape["N"], 1024)
    dtype = DTYPES[shape["dtype"]]
    inputs = tensors(small, device, dtype)
    exact = outcome(inputs, torch.float64, expected(name, small))
    plain = outcome(inputs, dtype, expected(name, small, upcast=False))
    given = outcome(inputs, dtype, ours(name, small, device))
    for result, right in exact.items():
        error, own = ((x[result].double() - right).abs().max().item() for x in (given, plain))
        budget = 2 * own + 4 * torch.finfo(dtype).eps * right.abs().max().item()
        if not error <= budget:
            why = f"error {error:.2g}, budget {budget:.2g}"
            raise ArithmeticError(f"wrong {result}, not timed: {why}")


def outcome(inputs, dtype, call) -> dict[str, torch.Tensor]:
    """Output of a call on the same inputs in some dtype, and the gradients of q, k and v."""
    *leaves, do = (tensor.to(dtype) for tensor in inputs)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    output = call(*leaves)
    dq, dk, dv = torch.autograd.grad(output, leaves, do)
    return {"output": output.detach(), "dq": dq, "dk": dk, "dv": dv}


def tensors(shape: dict, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, do."""
    B, H, G, M, N, D = (shape[letter] for letter in "BHGMND")
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((B, H, M, D), (B, G, N, D), (B, G, N, D), (B, H, M, D))
    return [torch.randn(s, generator=generator, device=device, dtype=dtype) for s in sizes]


def numbers(name: str, shape: dict) -> dict:
    """The row numbers that a call would have after training, of the size that the papers give."""
    if name == "sigmoid":
        return {"bias": -math.log(shape["N"])}
    return {"multiplier": 1.0 if name == "softmax" else 0.2 * math.log(shape["N"])}


def ours(name: str, shape: dict, device: torch.device):
    verb = functional.sigmoid_attention if name == "sigmoid" else functional.ssmax_attention
    backend = "triton" if device.type == "cuda" else "auto"
    given = numbers(name, shape)
    return lambda q, k, v: verb(q, k, v, **given, is_causal=shape["is_causal"], backend=backend)


def expected(name: str, shape: dict, **options):
    verb = reference.sigmoid_attention if name == "sigmoid" else reference.ssmax_attention
    given = {**numbers(name, shape), "is_causal": shape["is_causal"], **options}
    return lambda q, k, v: verb(q, k, v, **given)[0]


def rival(name: str, shape: dict, device: torch.device):
    """Another implementation as a call (q, k, v) in its own layout; ImportError if missing."""
    is_causal, grouped = shape["is_causal"], shape["H"] != shape["G"]
    if name in ("sdpa", "sdpa-cudnn"):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def softmax(q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, enable_gqa=grouped
            )

        def cudnn(q, k, v):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return softmax(q, k, v)

        return softmax if name == "sdpa" else cudnn
    if name == "flex":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        flex, mask = torch.compile(flex_attention, dynamic=False), None
        if is_causal:
            mask = create_block_mask(
                lambda b, h, m, n: m >= n, None, None, shape["M"], shape["N"], device=device
            )
        return lambda q, k, v: flex(q, k, v, block_mask=mask, enable_gqa=grouped)
    if name == "triton-sigmoid":
        from triton_sigmoid import sigmoid_attention

        if grouped or shape["M"] != shape["N"]:
            raise NotImplementedError("triton-sigmoid has no grouped heads and no decoding")
        scale, bias = shape["D"] ** -0.5, -math.log(shape["N"])
        return lambda q, k, v: sigmoid_attention(q, k, v, is_causal, scale, sigmoid_bias=bias)
    if name == "flash-attn-2":
        from flash_attn import flash_attn_func
    else:
        from flash_attn_interface import flash_attn_func

    def flash(q, k, v):
        output = flash_attn_func(q, k, v, causal=is_causal)
        return output[0] if isinstance(output, tuple) else output

    return flash


def prepare(name: str, shape: dict, device: torch.device):
    """What is timed: a function of no arguments."""
    q, k, v, do = tensors(shape, device, DTYPES[shape["dtype"]])
    if name == "copy":
        # A copy reads and writes: k's bytes twice are those of k and v once.
        target = torch.empty_like(k)
        return lambda: target.copy_(k)
    if name == "gather":
        cache = [x.transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v)]
        blocks = torch.randperm(math.ceil(len(cache[0]) / CACHE_BLOCK), device=device)
        index = (blocks[:, None] * CACHE_BLOCK + torch.arange(CACHE_BLOCK, device=device)).flatten()
        index = index[index < len(cache[0])]
        return lambda: [x.index_select(0, index) for x in cache]
    call = ours(name, shape, device) if name in OURS else rival(name, shape, device)
    if name in LENGTH_FIRST:
        q, k, v, do = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v, do))
    if shape["pass"] == "forward":

        def forward():
            with torch.no_grad():
                call(q, k, v)

        return forward
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    if shape["pass"] == "both":
        return lambda: torch.autograd.grad(call(*leaves), leaves, do)
    output = call(*leaves)
    return lambda: torch.autograd.grad(output, leaves, do, retain_graph=True)


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


def clock(step, device: torch.device) -> float:
    """Milliseconds of one call; on a GPU with an empty L2 cache and no wait for the host."""
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # 256 MiB of zeros drive everything else out, and keep the GPU busy until the call is queued.
    torch.empty(1 << 26, dtype=torch.int32, device=device).zero_()
    torch.cuda._sleep(1_000_000)
    start.record()
    step()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def shape_of(row: dict) -> tuple:
    return tuple(row[field] for field in SHAPE)


def by_shape(rows: list[dict]) -> dict[tuple, dict[str, dict]]:
    """Rows grouped into {device and shape: {contender: row}}."""
    groups = defaultdict(dict)
    for row in rows:
        groups[(row["device"], *shape_of(row))][row["name"]] = row
    return groups


def table(rows: list[dict]) -> str:
    head = f"{'shape':36}{'pass':>9}  {'contender':15}{'ms':>9}{'best to 80%':>16}"
    lines = [f"{head}{'/sdpa':>7}{'/flex':>7}{'TFLOP/s':>9}"]
    for group in by_shape(rows).values():
        flex = group.get("flex", {}).get("ms")
        for name, row in group.items():
            mask = "causal" if row["is_causal"] else "full"
            sizes = " ".join(f"{letter}{row[letter]}" for letter in "BHGMND")
            start = f"{sizes + ' ' + mask:36}{row['pass']:>9}  {name:15}"
            if "reason" in row:
                lines.append(f"{start}  {row['reason']}")
                continue
            spread = f"{row['ms_best']:.3g}-{row['ms_80']:.3g}"
            of_sdpa = f"{row['of_sdpa']:.2f}" if "of_sdpa" in row else ""
            of_flex = f"{row['ms'] / flex:.2f}" if flex else ""
            speed = f"{row['tflops']:.2f}" if "tflops" in row else ""
            lines.append(f"{start}{row['ms']:>9.3g}{spread:>16}{of_sdpa:>7}{of_flex:>7}{speed:>9}")
    return "\n".join(lines)


SOFTMAXES = ("sdpa", "sdpa-cudnn", "flex", "flash-attn-2", "flash-attn-3")
HALF = {"dtype": ("bf16", "fp16")}
LONG = {"M": range(2048, 1 << 30)}
FORWARD = {**HALF, **LONG, "pass": ("forward",)}
BACKWARD = {**HALF, **LONG, "pass": ("backward",)}
DECODE = {**HALF, "M": (1,), "N": (32768,)}
CPU = {"dtype": ("fp32",), **LONG, "is_causal": (True,), "D": (64,)}
# What is claimed, of whom, beside whom, the least (rival's ms / its ms), and of which rows.
TARGETS = (
    ("forward ≥ 1.15 × own softmax, D 64", "sigmoid", ("softmax",), 1.15, {**FORWARD, "D": (64,)}),
    ("forward ≥ 1.0 × own softmax, D 128", "sigmoid", ("softmax",), 1.0, {**FORWARD, "D": (128,)}),
    ("forward ≥ 1.1 × triton-sigmoid", "sigmoid", ("triton-sigmoid",), 1.1, FORWARD),
    ("forward ≥ 1.1 × flash-attn 2", "sigmoid", ("flash-attn-2",), 1.1, FORWARD),
    ("forward ≥ 0.95 × best softmax, D 128", "sigmoid", SOFTMAXES, 0.95, {**FORWARD, "D": (128,)}),
    ("backward ≥ 1.15 × triton-sigmoid", "sigmoid", ("triton-sigmoid",), 1.15, BACKWARD),
    ("decode ≥ 0.9 of copy bandwidth, 32k keys", "sigmoid", ("copy",), 0.9, DECODE),
    ("CPU forward ≤ 0.9 × sdpa", "sigmoid", ("sdpa",), 1 / 0.9, {**CPU, "pass": ("forward",)}),
    ("CPU both passes ≤ 1.0 × sdpa", "sigmoid", ("sdpa",), 1.0, {**CPU, "pass": ("both",)}),
    ("CPU ssmax ≤ 1.03 × sdpa", "ssmax", ("sdpa",), 1 / 1.03, CPU),
)


def judge(rows: list[dict]) -> list[tuple[str, str, list[float]]]:
    """(target, "met" or "not met" or "not measured", its ratios); the worst shape decides."""
    verdicts, groups = [], by_shape(row for row in rows if "ms" in row)
    for text, name, rivals, least, wanted in TARGETS:
        ratios = []
        for (device, *_), group in groups.items():
            others = [group[rival]["ms"] for rival in rivals if rival in group]
            if (
                name in group
                and others
                and (" CPU " in device) == text.startswith("CPU")
                and all(group[name][field] in values for field, values in wanted.items())
            ):
                ratios.append(min(others) / group[name]["ms"])
        verdicts.append((text, verdict(ratios, least), ratios))
    causal = []
    for row in rows:
        full = groups.get((row["device"], *shape_of({**row, "is_causal": False})), {})
        if row["is_causal"] and "ms" in row and row["name"] == "sigmoid" and "sigmoid" in full:
            causal.append(full["sigmoid"]["ms"] / row["ms"])
    return [*verdicts, ("causal ≤ 0.6 × full", verdict(causal, 1 / 0.6), causal)]


def verdict(ratios: list[float], least: float) -> str:
    if not ratios:
        return "not measured"
    return "met" if min(ratios) >= least else "not met"


def summary(rows: list[dict]) -> str:
    lines = ["", "targets (rival's time / ours, worst to best)"]
    for text, status, ratios in judge(rows):
        span = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
        lines.append(f"  {text:44}{status:14}{span}")
    return "\n".join(lines)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    os.replace(unfinished, path)


def plot(rows: list[dict], path: Path) -> None:
    """Two rows of panels, one column a dim, mask and pass: time relative to sdpa, and TFLOP/s."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [row for row in rows if "tflops" in row and row["M"] > 1]
    panels = sorted({(row["D"], row["is_causal"], row["pass"]) for row in timed})
    if not panels:
        print("nothing to plot: no square shape was timed", file=sys.stderr)
        return
    figure, axes = pyplot.subplots(
        2, len(panels), figsize=(3.6 * len(panels) + 1, 6), squeeze=False, layout="constrained"
    )
    colours = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(r["name"] for r in timed))}
    for column, (D, is_causal, step) in enumerate(panels):
        mine = [r for r in timed if (r["D"], r["is_causal"], r["pass"]) == (D, is_causal, step)]
        for name, colour in colours.items():
            line = sorted((r for r in mine if r["name"] == name), key=lambda row: row["N"])
            for axis, field in zip(axes[:, column], ("of_sdpa", "tflops"), strict=True):
                points = [(r["N"], r[field]) for r in line if field in r]
                if points:
                    axis.plot(*zip(*points, strict=True), "o-", color=colour, label=name)
        axes[0, column].set_title(f"{step}, {'causal' if is_causal else 'full'}, D {D}")
        for axis in axes[:, column]:
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            ticks = sorted({row["N"] for row in mine})
            axis.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
            axis.grid(alpha=0.3)
        axes[1, column].set_xlabel("tokens")
    axes[0, 0].set_ylabel("time / sdpa's")
    axes[1, 0].set_ylabel("TFLOP/s")
    axes[0, -1].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
