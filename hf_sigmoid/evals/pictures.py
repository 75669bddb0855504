"""The pictures of an evaluation: accuracy, weight on the needle, losses, keys attended to.

for name, figure in figures(summary): figure.savefig(folder / name, format="png")
"""

import math
from collections.abc import Iterator
from textwrap import fill
from typing import Any

import numpy as np

from hf_sigmoid.evals import wording
from hf_sigmoid.evals.wording import Summary

HEATMAP, NEEDLE, LOSS, N_EFF = "heatmap.png", "needle_mass.png", "loss.png", "n_eff.png"
# One hue from light to dark reads the same in grey; differences need two, and white for none.
# All are light enough for black text on them (a contrast of 6 and more).
SHARE = ("#f7fbff", "#d3e4f3", "#a6cde6", "#74b3da", "#4a98c9")
DIFFERENCE = ("#e6803a", "#f2b684", "#f7f7f7", "#a6cde6", "#4a98c9")
# Of the curves, by model; Okabe and Ito's, darkened for thin lines. Dashes tell them apart in grey.
SERIES = ("#1f5fa8", "#c04a00", "#00795a", "#9c4f88", "#555555")
DASHES = ((), (6, 3), (2, 2), (8, 2, 2, 2))

Point = tuple[float, float, float, float]  # of a curve: x, low, middle, high


def figures(summary: Summary) -> Iterator[tuple[str, Any]]:
    """File names and matplotlib figures of all that there are data for."""
    for name, draw in ((HEATMAP, _heatmap), (NEEDLE, _needles), (LOSS, _losses), (N_EFF, _growth)):
        if (figure := draw(summary)) is not None:
            yield name, figure


def _heatmap(summary: Summary) -> Any:
    """Tasks down, models across, and the second's gain over the first last."""
    models = wording.named(summary)
    lines = {}
    for task in wording.tasks(summary):
        found = [
            {(c["depth"], c["length"]): c for c in model["cells"] if c["task"] == task}
            for model in models.values()
        ]
        if keys := {key for cells in found for key in cells}:
            depths = sorted({d for d, _ in keys}, key=lambda depth: (depth is None, depth))
            lines[task] = depths, sorted({n for _, n in keys}), found
    if not lines:
        return None
    titles = list(models)
    if len(models) > 1:
        titles.append(f"{titles[1]} − {titles[0]}")
    most = max(len(lengths) for _, lengths, _ in lines.values())
    titles = [_plain(title, max(24, 10 * most)) for title in titles]
    heights = [max(0.9, 0.42 * len(depths)) for depths, _, _ in lines.values()]
    width = len(titles) * max(1.9, 0.4 + 0.78 * most) + 1.6
    title_height = 0.16 * max(title.count("\n") for title in titles)
    figure = _figure(max(5.0, width), sum(heights) + 0.3 * len(lines) + title_height + 0.8)
    ratios = {"height_ratios": heights}
    grid = figure.subplots(len(lines), len(titles), squeeze=False, gridspec_kw=ratios)
    for axes, (task, (depths, lengths, found)) in zip(grid, lines.items(), strict=True):
        labels = [wording.depth(d) for d in depths], [wording.whole(n) for n in lengths]
        places = [[(d, n) for n in lengths] for d in depths]
        for place, axis in enumerate(axes):
            compared = found[:2] if place == len(models) else [found[place]]
            said = [
                [_said(*(cells.get(key) for cells in compared)) for key in row] for row in places
            ]
            values = [[value for value, _ in row] for row in said]
            if len(compared) == 1:
                _draw(axis, values, *labels, SHARE, 0, 1)
            else:
                reach = max([0.25, *(abs(v) for row in values for v in row if not math.isnan(v))])
                _draw(axis, values, *labels, DIFFERENCE, -reach, reach)
            for row, line in enumerate(said):
                for column, (_, text) in enumerate(line):
                    axis.text(column, row, text, ha="center", va="center", fontsize=6.5)
            # White lines between them, so that equal neighbours stay two.
            axis.set_xticks([i - 0.5 for i in range(1, len(lengths))], minor=True)
            axis.set_yticks([i - 0.5 for i in range(1, len(depths))], minor=True)
            axis.grid(which="minor", color="white", linewidth=1.5)
            axis.tick_params(which="minor", length=0)
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


def _said(cell: dict[str, Any] | None, *others: dict[str, Any] | None) -> tuple[float, str]:
    """Value and text of a cell, or of another's gain over it."""
    if cell is None or None in others:
        return math.nan, ""
    accuracy = cell["accuracy"]
    if not others:
        return accuracy, f"{wording.percent(accuracy)}\n{wording.interval(cell['interval_95'])}"
    gain = others[0]["accuracy"] - accuracy
    before, after = wording.percent(accuracy).rstrip("%"), wording.percent(others[0]["accuracy"])
    return gain, f"{f'{100 * gain:+.0f}' if gain else '0'}\n{before}→{after}"


def _needles(summary: Summary) -> Any:
    """Weight on the needle by layer and head, of each task at its longest length.

    A panel a model of the share, and one of the raw mass where rows do not sum to one.
    """
    lines = {}
    for task in wording.tasks(summary):
        found = [
            (name, entry)
            for name, model in wording.named(summary).items()
            for entry in model["attention"]
            if entry["task"] == task and wording.strongest(entry["share"])
        ]
        length = max((entry["length"] for _, entry in found), default=0)
        found = [(name, entry) for name, entry in found if entry["length"] == length]
        # All models' shares on one scale; masses have their own.
        high = max((max(wording.heads(entry["share"])) for _, entry in found), default=0)
        for name, entry in found:
            line = lines.setdefault((task, length), [])
            line.append((f"{name}: share", entry, entry["share"], high))
            if any(abs(total - 1) >= 0.01 for total in wording.heads(entry["total"])):
                most = max(wording.heads(entry["mass"]))
                line.append((f"{name}: raw mass", entry, entry["mass"], most))
    if not lines:
        return None
    across = max(map(len, lines.values()))
    every = [values for line in lines.values() for *_, values, _ in line]
    width = min(4.6, max(2.0, 0.16 * max(len(row) for values in every for row in values))) + 1.0
    height = min(8.0, max(1.6, 0.11 * max(map(len, every)))) + 1.1
    figure = _figure(max(4.5, width * across), height * len(lines) + 0.4)
    grid = figure.subplots(len(lines), across, squeeze=False)
    for axes, ((task, length), line) in zip(grid, lines.items(), strict=True):
        for axis, (title, entry, values, high) in zip(axes, line, strict=False):
            heads = max(map(len, values))
            filled = [[*row, *[math.nan] * (heads - len(row))] for row in values]
            layers = [str(number) for number in entry["layers"]]
            image = _draw(axis, filled, layers, [*map(str, range(heads))], SHARE, 0, high or 1)
            layer, head = wording.strongest(values)
            at = f"layer {layers[layer]}, head {head}: {wording.percent(values[layer][head])}"
            axis.set_title(f"{_plain(title, 32)}\nmost: {at}", fontsize=8)
            left, top = head - 0.5, layer - 0.5
            xs, ys = [left, left + 1, left + 1, left], [top, top, top + 1, top + 1]
            axis.fill(xs, ys, fill=False, edgecolor="#d1242f", linewidth=1.5)
            bar = figure.colorbar(image, ax=axis, aspect=30, format=lambda x, _: f"{x:.0%}")
            bar.ax.tick_params(labelsize=7)
            bar.outline.set_visible(False)
            axis.set_xlabel("head", fontsize=8)
        axes[0].set_ylabel(f"{_plain(task)}, {wording.whole(length)} tokens\nlayer", fontsize=8)
        for axis in axes[len(line) :]:
            axis.axis("off")
    figure.suptitle("attention on the needle, mean over samples", fontsize=10)
    return figure


def _losses(summary: Summary) -> Any:
    """The loss by position, and the differences from the first model."""
    series = {name: _points(model["loss"]) for name, model in wording.named(summary).items()}
    series = {name: points for name, points in series.items() if points}
    marks: dict[int, list[str]] = {}
    for name, model in wording.named(summary).items():
        if name in series and model["positions"]:
            marks.setdefault(model["positions"], []).append(name)
    pairs = {
        wording.against(summary, pair, " − "): _points(pair["bands"])
        for pair in summary["loss_pairs"]
        if pair["bands"]
    }
    figure, axes = _charts(bool(series) + bool(pairs))
    words = {"x": "position, tokens (log)", "y": "nats a token"}
    if series:
        axis = axes[0]
        _plot(axis, series, "loss by position", **words, more=marks)
        for mark, names in marks.items():
            whose = f": {', '.join(names)}" if len(marks) > 1 else ""
            label = _plain(f"made for {mark:,} positions{whose}")
            axis.axvline(mark, color="#777777", linewidth=0.9, linestyle=":", label=f" {label}")
        _legend(axis)
    if pairs:
        axis = axes[-1]
        _plot(axis, pairs, "difference of losses (negative is better)", **words)
        axis.axhline(0, color="black", linewidth=0.8)
        _legend(axis)
    return figure


def _points(bands: list[dict[str, float]]) -> list[Point]:
    """Each band at the middle of its positions on a log axis."""
    return [
        (math.sqrt(max(band["start"], 1) * band["stop"]), band["low"], band["mean"], band["high"])
        for band in bands
    ]


def _growth(summary: Summary) -> Any:
    """Median and quartiles of n_eff over all heads against the keys, by task, if lengths differ."""
    charts = {}
    for task in wording.tasks(summary):
        curves, keys = {}, set()
        for name, model in wording.named(summary).items():
            entries = sorted(model["attention"], key=lambda entry: entry["length"])
            points = [
                (entry["keys"], *np.quantile(wording.heads(entry["n_eff"]), [0.25, 0.5, 0.75]))
                for entry in entries
                if entry["task"] == task and wording.heads(entry["n_eff"])
            ]
            keys |= {point[0] for point in points}
            if len(points) > 1:
                curves[name] = points
        if curves:
            charts[task] = curves, sorted(keys)
    figure, axes = _charts(len(charts))
    for axis, (task, (curves, keys)) in zip(axes, charts.items(), strict=True):
        _plot(axis, curves, task, "keys", "n_eff, median and quartiles of heads")
        axis.plot(
            keys, keys, color="#888888", dashes=(1, 2), linewidth=1.4, label=" every key alike"
        )
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        _legend(axis)
    return figure


def _figure(width: float, height: float) -> Any:
    # Figure objects rather than pyplot: no window system, and no state left behind.
    from matplotlib.figure import Figure

    return Figure((width, height), dpi=150, layout="constrained")


def _charts(count: int) -> tuple[Any, list[Any]]:
    """A figure and its axes side by side, three in a line; none of none."""
    if not count:
        return None, []
    across = min(3, count)
    down = -(-count // across)
    figure = _figure(max(5.0, 4.6 * across), 3.6 * down)
    grid = figure.subplots(down, across, squeeze=False).flatten()
    for axis in grid[count:]:
        axis.axis("off")
    return figure, list(grid[:count])


def _plot(
    axis: Any, curves: dict[str, list[Point]], title: str, x: str, y: str, more: Any = ()
) -> None:
    """Curves with bands over a log x axis, which also holds the places `more`."""
    for place, (name, points) in enumerate(curves.items()):
        at, low, middle, high = zip(*points, strict=True)
        ink, dashes = SERIES[place % len(SERIES)], DASHES[place % len(DASHES)]
        axis.fill_between(at, low, high, color=ink, alpha=0.2, linewidth=0)
        # A legend would leave out names that begin with an underscore; a space comes before them.
        label = f" {_plain(name)}"
        axis.plot(at, middle, color=ink, dashes=dashes, linewidth=1.4, label=label)
    places = [*more, *(point[0] for points in curves.values() for point in points)]
    low, high = min(places) / 1.02, max(places) * 1.02
    powers = [2**i for i in range(40) if low <= 2**i <= high]
    powers = powers[:: -(-len(powers) // 8) or 1]
    axis.set_xscale("log")
    axis.set_xticks(powers, [f"{power:,}" for power in powers])
    axis.set_xticks([], minor=True)
    axis.set_title(_plain(title), fontsize=9)
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(axis: Any) -> None:
    """Below, where it hides no curve."""
    axis.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def _draw(
    axis: Any, values: Any, rows: list[str], columns: list[str], scale: Any, low: float, high: float
) -> Any:
    """Coloured cells and their labels, grey where there is no value."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("", scale)
    image = axis.imshow(
        values, vmin=low, vmax=high, cmap=colours, aspect="auto", interpolation="nearest"
    )
    axis.set_facecolor("#d8d8d8")
    for set_ticks, labels in ((axis.set_xticks, columns), (axis.set_yticks, rows)):
        step = next(step for step in (1, 2, 5, 10, 20, 50, 10**9) if len(labels) / step <= 20)
        set_ticks(range(0, len(labels), step), labels[::step])
    axis.tick_params(length=0, labelsize=7)
    axis.spines[:].set_visible(False)
    return image


def _plain(text: str, width: int = 60) -> str:
    """The text in lines of at most that width, with a dollar for what it is."""
    return fill(text, width).replace("$", r"\$")
