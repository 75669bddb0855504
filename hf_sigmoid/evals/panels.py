"""Panels of an evaluation's pictures: coloured cells, and curves.

`plots.py` draws them as PNG files, `html.py` and `svg.py` on a page.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from hf_sigmoid.evals import report
from hf_sigmoid.evals.report import Summary

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
            panels.append(_needle(f"{name}: share", entry, "share", high))
            if not report.is_normalised(entry):
                high_mass = _largest(entry["mass"])
                panels.append(_needle(f"{name}: raw mass", entry, "mass", high_mass))
        shown[task, length] = panels
    return shown


def _largest(grid: list[list[float]]) -> float:
    layer, head = report.strongest(grid)
    return grid[layer][head]


def _needle(title: str, entry: dict[str, Any], field: str, high: float) -> Panel:
    grid, numbers = entry[field], [str(number) for number in entry["layers"]]
    heads = max(len(layer) for layer in grid)
    cells = [
        [
            Cell(value, f"{100 * value:.0f}", "", f"layer {number}, head {j}: {100 * value:.2f}%")
            for j, value in enumerate(layer)
        ]
        + [None] * (heads - len(layer))
        for number, layer in zip(numbers, grid, strict=True)
    ]
    heads_named = [str(j) for j in range(heads)]
    return Panel(title, numbers, heads_named, cells, "share", 0, high, report.strongest(grid))


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
