"""The pictures of an evaluation as PNG files.

for name, figure in figures(summary): figure.savefig(folder / name, format="png")
"""

import math
from collections.abc import Iterator
from textwrap import fill
from typing import Any

from hf_sigmoid.evals import report
from hf_sigmoid.evals.panels import (
    DASHES,
    SCALES,
    SERIES,
    Chart,
    Panel,
    accuracy,
    growth,
    losses,
    marks,
    needles,
    x_ticks,
)
from hf_sigmoid.evals.report import Summary

HEATMAP, NEEDLE, LOSS, N_EFF = "heatmap.png", "needle_mass.png", "loss.png", "n_eff.png"


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
            most = report.percent(panel.cells[layer][head].value)
            at = f"layer {panel.rows[layer]}, head {head}: {most}"
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
