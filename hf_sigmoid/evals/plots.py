"""The pictures of an evaluation: panels of coloured cells, and curves; and their PNG files.

    for name, figure in figures(summary): figure.savefig(folder / name, format="png")

What a panel or a curve shows is told apart from how it is drawn: `html.py` draws the same ones.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median, quantiles
from textwrap import fill
from typing import Any

from hf_sigmoid.evals import report
from hf_sigmoid.evals.report import Summary

HEATMAP, NEEDLE, LOSS, N_EFF = "heatmap.png", "needle_mass.png", "loss.png", "n_eff.png"

# One hue from light to dark reads the same in grey; differences need two, and white for none.
# All are light enough for black text on them (a contrast of 6 and more).
SCALES = {
    "share": ("#f7fbff", "#d3e4f3", "#a6cde6", "#74b3da", "#4a98c9"),
    "difference": ("#e6803a", "#f2b684", "#f7f7f7", "#a6cde6", "#4a98c9"),
}
# Of the curves, by model; Okabe and Ito's, darkened for thin lines. Dashes tell them apart in grey.
SERIES = ("#1f5fa8", "#c04a00", "#00795a", "#9c4f88", "#555555")
DASHES = ((), (6, 3), (2, 2), (8, 2, 2, 2))


@dataclass(frozen=True)
class Cell:
    """What one coloured cell shows: its value, two lines of text, and the whole story."""

    value: float
    text: str
    more: str
    title: str


@dataclass(frozen=True)
class Panel:
    """Coloured cells `[row][column]`, None where there is none; `low` to `high` is the scale."""

    title: str
    rows: list[str]
    columns: list[str]
    cells: list[list[Cell | None]]
    scale: str
    low: float
    high: float
    best: tuple[int, int] | None = None


@dataclass(frozen=True)
class Curve:
    """Points (x, low, middle, high); `mark` is where on x a model's positions end."""

    name: str
    points: list[tuple[float, float, float, float]]
    mark: int | None = None
    is_reference: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves with bands over a log x axis."""

    title: str
    x: str
    y: str
    curves: list[Curve]
    has_zero: bool = False
    is_log: bool = False


def colour(panel: Panel, value: float) -> str:
    """A cell's colour on the scale of its panel."""
    stops = [[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in SCALES[panel.scale]]
    place = (value - panel.low) / ((panel.high - panel.low) or 1)
    place = min(max(place, 0.0), 1.0) * (len(stops) - 1)
    below = min(int(place), len(stops) - 2)
    pairs = zip(stops[below], stops[below + 1], strict=True)
    return "#" + "".join(f"{round(a + (place - below) * (b - a)):02x}" for a, b in pairs)


def accuracy(summary: Summary) -> dict[str, list[Panel]]:
    """For each task a panel a model, and one of the second model's gain over the first."""
    shown = {}
    for task in report.tasks(summary):
        found = {
            name: {
                (cell["depth"], cell["length"]): cell
                for cell in model["cells"]
                if cell["task"] == task
            }
            for name, model in report.named(summary).values()
        }
        keys = {key for cells in found.values() for key in cells}
        if not keys:
            continue
        depths = sorted({key[0] for key in keys}, key=lambda depth: (depth is None, depth))
        lengths = sorted({key[1] for key in keys})
        labels = [report.depth(d) for d in depths], [report.whole(n) for n in lengths]
        grids = {
            name: [[cells.get((d, n)) for n in lengths] for d in depths]
            for name, cells in found.items()
        }
        shown[task] = [
            Panel(name, *labels, _each(_accuracy, grid), "share", 0, 1)
            for name, grid in grids.items()
        ]
        if len(grids) > 1:
            (first, a), (second, b) = list(grids.items())[:2]
            cells = _each(_difference, a, b)
            reach = max([0.25, *(abs(cell.value) for row in cells for cell in row if cell)])
            title = f"{second} − {first}"
            shown[task].append(Panel(title, *labels, cells, "difference", -reach, reach))
    return shown


def _each(function: Callable[..., Cell], *grids: list[list[Any]]) -> list[list[Cell | None]]:
    """The function of the cells of all grids at each place, None where one of them is."""
    return [
        [None if None in cells else function(*cells) for cells in zip(*lines, strict=True)]
        for lines in zip(*grids, strict=True)
    ]


def _accuracy(cell: dict[str, Any]) -> Cell:
    within = report.interval(cell["interval_95"])
    title = f"{cell['correct']} of {cell['n']} correct, 95% interval {within}"
    title += f", {cell['haystacks']} haystacks, log-prob {report.number(cell['logprob'])}"
    return Cell(cell["accuracy"], report.percent(cell["accuracy"]), within, title)


def _difference(first: dict[str, Any], second: dict[str, Any]) -> Cell:
    gain = second["accuracy"] - first["accuracy"]
    before, after = (report.percent(cell["accuracy"]) for cell in (first, second))
    title = (
        f"{100 * gain:+.1f} points: from {first['correct']} of {first['n']} correct "
        f"to {second['correct']} of {second['n']}"
    )
    return Cell(gain, f"{100 * gain:+.0f}" if gain else "0", f"{before.rstrip('%')}→{after}", title)


def needles(summary: Summary) -> dict[tuple[str, int], list[Panel]]:
    """Weight on the needle `[layer][head]`, for each task at its longest length.

    A panel a model of the share, and one of the raw mass where rows do not sum to one.
    """
    entries = [
        (name, entry)
        for name, model in report.named(summary).values()
        for entry in model["attention"]
        if report.strongest(entry["share"])
    ]
    shown = {}
    for task in report.tasks(summary):
        found = [(name, entry) for name, entry in entries if entry["task"] == task]
        if not found:
            continue
        length = max(entry["length"] for _, entry in found)
        found = [(name, entry) for name, entry in found if entry["length"] == length]
        # All models' shares on one scale; masses have their own.
        high = max(_largest(entry["share"]) for _, entry in found)
        panels = []
        for name, entry in found:
            panels.append(_needle(f"{name}: share", entry["share"], high))
            if not report.is_normalised(entry):
                panels.append(_needle(f"{name}: raw mass", entry["mass"], _largest(entry["mass"])))
        shown[task, length] = panels
    return shown


def _largest(grid: list[list[float] | None]) -> float:
    layer, head = report.strongest(grid)
    return grid[layer][head]


def _needle(title: str, grid: list[list[float] | None], high: float) -> Panel:
    heads = max(len(layer or []) for layer in grid)
    cells = [
        [
            Cell(value, f"{100 * value:.0f}", "", f"layer {i}, head {j}: {100 * value:.2f}%")
            for j, value in enumerate(layer or [])
        ]
        + [None] * (heads - len(layer or []))
        for i, layer in enumerate(grid)
    ]
    labels = [str(i) for i in range(len(grid))], [str(j) for j in range(heads)]
    return Panel(title, *labels, cells, "share", 0, high, report.strongest(grid))


def losses(summary: Summary) -> list[Chart]:
    """The loss by position, and the differences from the first model."""
    short = report.only_names(summary)
    models = [
        Curve(name, _points(model["loss"]), model["positions"])
        for name, model in report.named(summary).values()
        if model["loss"]
    ]
    pairs = [
        Curve(f"{short[pair['second']]} − {short[pair['first']]}", _points(pair["bands"]))
        for pair in summary["loss_pairs"]
        if pair["bands"]
    ]
    axes = "position, tokens (log)", "nats a token"
    charts = [
        Chart("loss by position", *axes, models),
        Chart("difference of losses (negative is better)", *axes, pairs, has_zero=True),
    ]
    return [chart for chart in charts if chart.curves]


def _points(bands: list[dict[str, float]]) -> list[tuple[float, float, float, float]]:
    """Each band at the middle of its positions on a log axis."""
    return [
        (math.sqrt(max(band["start"], 1) * band["stop"]), band["low"], band["mean"], band["high"])
        for band in bands
    ]


def growth(summary: Summary) -> list[Chart]:
    """Median and quartiles of n_eff over all heads against the keys, by task, if lengths differ."""
    charts = []
    for task in report.tasks(summary):
        curves, keys = [], set()
        for name, model in report.named(summary).values():
            points = []
            for entry in sorted(model["attention"], key=lambda entry: entry["length"]):
                values = report.heads(entry["n_eff"])
                if entry["task"] == task and values:
                    low, high = _quartiles(values)
                    points.append((entry["keys"], low, median(values), high))
            keys |= {point[0] for point in points}
            if len(points) > 1:
                curves.append(Curve(name, points))
        if curves:
            points = [(n, n, n, n) for n in sorted(keys)]
            curves.append(Curve("every key alike", points, is_reference=True))
            y = "n_eff, median and quartiles of heads"
            charts.append(Chart(task, "keys", y, curves, is_log=True))
    return charts


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def x_ticks(chart: Chart) -> list[int]:
    """Powers of two within the chart, at most eight."""
    low, high = x_range(chart)
    powers = [2**i for i in range(40) if low <= 1.02 * 2**i and 2**i <= 1.02 * high]
    return powers[:: -(-len(powers) // 8) or 1]


def x_range(chart: Chart) -> tuple[float, float]:
    """The smallest and the largest of all points and marks."""
    places = [point[0] for curve in chart.curves for point in curve.points]
    places += [curve.mark for curve in chart.curves if curve.mark]
    return min(places), max(places)


def marks(chart: Chart) -> dict[int, str]:
    """What to say of each number of positions: whose, if models were made for different ones."""
    names: dict[int, list[str]] = {}
    for curve in chart.curves:
        if curve.mark:
            names.setdefault(curve.mark, []).append(curve.name)
    return {
        mark: f"made for {mark:,} positions" + (f": {', '.join(each)}" if len(names) > 1 else "")
        for mark, each in names.items()
    }


def figures(summary: Summary) -> Iterator[tuple[str, Any]]:
    """File names and matplotlib figures of all that there are data for."""
    tasks = accuracy(summary)
    if tasks:
        yield HEATMAP, _heatmap(tasks)
    maps = needles(summary)
    if maps:
        yield NEEDLE, _needle_maps(maps)
    for name, charts in ((LOSS, losses(summary)), (N_EFF, growth(summary))):
        if charts:
            yield name, _charts(charts)


def _figure(width: float, height: float) -> Any:
    # Figure objects rather than pyplot: no window system, and no state left behind.
    from matplotlib.figure import Figure

    return Figure((width, height), dpi=150, layout="constrained")


def _plain(text: str, width: int = 60) -> str:
    """The text in lines of at most that width, with a dollar for what it is."""
    return fill(text, width).replace("$", r"\$")


def _heatmap(tasks: dict[str, list[Panel]]) -> Any:
    """Tasks down, models across, and their difference last."""
    panels = list(tasks.values())
    lengths = max(len(panel.columns) for line in panels for panel in line)
    titles = [_plain(panel.title, max(24, 10 * lengths)) for panel in panels[0]]
    heights = [max(0.9, 0.42 * len(line[0].rows)) for line in panels]  # room for the task's name
    width = len(titles) * max(1.9, 0.4 + 0.78 * lengths) + 1.6
    title_height = 0.16 * max(title.count("\n") for title in titles)
    figure = _figure(max(5.0, width), sum(heights) + 0.3 * len(panels) + title_height + 0.8)
    ratios = {"height_ratios": heights}
    grid = figure.subplots(len(panels), len(titles), squeeze=False, gridspec_kw=ratios)
    for axes, (task, line) in zip(grid, tasks.items(), strict=True):
        for place, (axis, panel) in enumerate(zip(axes, line, strict=True)):
            _draw(axis, panel)
            _texts(axis, panel)
            if place:
                axis.set_yticks([])
        axes[0].set_ylabel(_plain(task, 20), fontsize=8, fontweight="bold")
    for axis, title in zip(grid[0], titles, strict=True):
        axis.set_title(title, fontsize=9)
    for axis in grid[-1]:
        axis.set_xlabel("prompt tokens", fontsize=8)
    figure.align_ylabels(grid[:, 0])
    figure.suptitle(
        "accuracy by depth and length with its exact 95% interval; differences in points",
        fontsize=10,
    )
    return figure


def _needle_maps(maps: dict[tuple[str, int], list[Panel]]) -> Any:
    across = max(map(len, maps.values()))
    shape = [(len(p.rows), len(p.columns)) for line in maps.values() for p in line]
    width = min(4.6, max(2.0, 0.16 * max(s[1] for s in shape))) + 1.0
    height = min(8.0, max(1.6, 0.11 * max(s[0] for s in shape))) + 1.1
    figure = _figure(max(4.5, width * across), height * len(maps) + 0.4)
    grid = figure.subplots(len(maps), across, squeeze=False)
    for axes, ((task, length), line) in zip(grid, maps.items(), strict=True):
        for axis, panel in zip(axes, line, strict=False):
            image = _draw(axis, panel)
            layer, head = panel.best
            at = f"layer {layer}, head {head}: {report.percent(panel.cells[layer][head].value)}"
            axis.set_title(f"{_plain(panel.title, 32)}\nmost: {at}", fontsize=8)
            axis.add_patch(_frame(head, layer))
            bar = figure.colorbar(image, ax=axis, aspect=30, format=lambda x, _: f"{x:.0%}")
            bar.ax.tick_params(labelsize=7)
            bar.outline.set_visible(False)
            axis.set_xlabel("head", fontsize=8)
        axes[0].set_ylabel(f"{_plain(task)}, {report.whole(length)} tokens\nlayer", fontsize=8)
        for axis in axes[len(line) :]:
            axis.axis("off")
    figure.suptitle("attention on the needle, mean over samples", fontsize=10)
    return figure


def _frame(column: int, row: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="#d1242f", linewidth=1.5
    )


def _draw(axis: Any, panel: Panel) -> Any:
    """The panel's colours and labels, grey where there is no cell."""
    from matplotlib.colors import LinearSegmentedColormap

    values = [[cell.value if cell else math.nan for cell in line] for line in panel.cells]
    colours = LinearSegmentedColormap.from_list(panel.scale, SCALES[panel.scale])
    image = axis.imshow(
        values, vmin=panel.low, vmax=panel.high or 1, cmap=colours, aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    axis.set_facecolor("#d8d8d8")
    for set_ticks, labels in ((axis.set_xticks, panel.columns), (axis.set_yticks, panel.rows)):
        step = next(step for step in (1, 2, 5, 10, 20, 50, 10**9) if len(labels) / step <= 20)
        set_ticks(range(0, len(labels), step), labels[::step])
    axis.tick_params(length=0, labelsize=7)
    axis.spines[:].set_visible(False)
    return image


def _texts(axis: Any, panel: Panel) -> None:
    """The cells' text, and white lines between them, so that equal neighbours stay two."""
    for row, line in enumerate(panel.cells):
        for column, cell in enumerate(line):
            if cell:
                text = f"{cell.text}\n{cell.more}"
                axis.text(column, row, text, ha="center", va="center", fontsize=6.5)
    axis.set_xticks([i - 0.5 for i in range(1, len(panel.columns))], minor=True)
    axis.set_yticks([i - 0.5 for i in range(1, len(panel.rows))], minor=True)
    axis.grid(which="minor", color="white", linewidth=1.5)
    axis.tick_params(which="minor", length=0)


def _charts(charts: list[Chart]) -> Any:
    """Charts side by side, three in a line."""
    across = min(3, len(charts))
    down = -(-len(charts) // across)
    figure = _figure(max(5.0, 4.6 * across), 3.6 * down)
    grid = figure.subplots(down, across, squeeze=False).flatten()
    for axis, chart in zip(grid, charts, strict=False):
        for place, curve in enumerate(chart.curves):
            x, low, middle, high = zip(*curve.points, strict=True)
            ink = "#888888" if curve.is_reference else SERIES[place % len(SERIES)]
            dashes = (1, 2) if curve.is_reference else DASHES[place % len(DASHES)]
            axis.fill_between(x, low, high, color=ink, alpha=0.2, linewidth=0)
            axis.plot(
                x, middle, color=ink, dashes=dashes, linewidth=1.4, label=f" {_plain(curve.name)}"
            )
        for mark, label in marks(chart).items():
            axis.axvline(
                mark, color="#777777", linewidth=0.9, linestyle=":", label=f" {_plain(label)}"
            )
        if chart.has_zero:
            axis.axhline(0, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xticks(ticks := x_ticks(chart), [f"{tick:,}" for tick in ticks])
        axis.set_xticks([], minor=True)
        if chart.is_log:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.set_title(_plain(chart.title), fontsize=9)
        axis.set_xlabel(chart.x, fontsize=8)
        axis.set_ylabel(chart.y, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(axis="y", color="#e4e4e4", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        # Below, where it hides no curve; the names' first space is for those that begin with an
        # underscore, which a legend would leave out.
        axis.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    for axis in grid[len(charts) :]:
        axis.axis("off")
    return figure
