"""Rows of the benchmark as a table, as verdicts on what is aimed at, and as a picture."""

import sys
from collections import defaultdict
from pathlib import Path

SHAPE = ("dtype", "B", "H", "G", "M", "N", "D", "is_causal", "pass")


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
