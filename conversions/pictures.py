"""A conversion as pictures: each module's error before and after calibration, the query biases."""

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_sigmoid import parameters

ERRORS = "layer_errors.png"
BIASES = "query_bias.png"
BEFORE, AFTER = "#9a9a9a", "#1f5fa8"  # grey steps back behind blue, in print as well

# What a head's numbers are compared with: the bias −log n is offset 0 and slope −1.
PANELS = {
    "offset": ("offset β, nats", 0.0),
    "slope": ("slope γ, nats per log n", -1.0),
    "query": ("‖w‖, nats per unit of q", None),
    "hidden": ("‖u‖, nats per unit of x", None),
}


def draw(folder: Path, model: PreTrainedModel, report: dict) -> list[str] | None:
    """Draw what there is to see of a conversion into a folder.

    Returns:
        The names of the files; None if matplotlib is not installed.
    """
    modules = report.get("modules", {})
    numbers = {
        name: {kind: tensor.detach() for kind, tensor in module.log_length.named_parameters()}
        for name, module in parameters.holders(model)
        if name in modules and report["plan"]["init"].startswith("calibrated")
    }
    if importlib.util.find_spec("matplotlib") is None:
        return None
    written = []
    if modules:
        draw_errors(folder / ERRORS, modules)
        written.append(ERRORS)
    if numbers:
        draw_rows(folder / BIASES, numbers)
        written.append(BIASES)
    return written


def draw_errors(file: Path, modules: dict[str, dict]) -> None:
    """`relative_before` and `relative` of each module, side by side."""
    from matplotlib.figure import Figure

    layers = _labels(modules)
    places = range(len(modules))
    series = {
        "b = −log n": [row["relative_before"] for row in modules.values()],
        "calibrated": [row["relative"] for row in modules.values()],
    }
    if series["calibrated"] == series["b = −log n"]:
        del series["calibrated"]
    values = [value for each in series.values() for value in each]
    figure = Figure((max(6.0, min(12.0, 2 + 0.16 * len(modules))), 3.6), dpi=150)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    for (name, each), colour in zip(series.items(), (BEFORE, AFTER), strict=False):
        axes.plot(places, each, "o-", color=colour, label=name, markersize=4, linewidth=1.2)
    if max(values) > 8 * max(min(values), 1e-6):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
    else:
        axes.set_ylim(bottom=0)
    axes.axhline(
        1, color="black", linewidth=0.8, linestyle=":", label="as far off as an output of 0"
    )
    axes.set_xticks(*_ticks(layers))
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error of the output")
    axes.set_title("sigmoid against softmax attention, each layer on its own", fontsize=10)
    axes.margins(x=0.02)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, format="png")


def draw_rows(file: Path, numbers: dict[str, dict[str, Tensor]]) -> None:
    """`offset` and `slope` `[H]`, and maybe `query` `[H, D]`, of each module as heatmaps."""
    from matplotlib.figure import Figure

    panels = [name for name in PANELS if all(name in each for each in numbers.values())]
    heads = max(len(each["offset"]) for each in numbers.values())
    width = min(4.6, max(1.9, 0.13 * heads)) + 0.9
    height = min(10.0, max(2.6, 0.13 * len(numbers))) + 1.0
    figure = Figure((width * len(panels), height), dpi=150, layout="constrained")
    figure.get_layout_engine().set(wspace=0.04)
    for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        title, centre = PANELS[name]
        grid = torch.full((len(numbers), heads), math.nan)
        for row, each in enumerate(numbers.values()):
            values = each[name].detach().float().cpu()
            values = values.norm(dim=1) if values.dim() == 2 else values
            grid[row, : len(values)] = values
        _heatmap(figure, axes, grid, centre)
        axes.set_title(title, fontsize=9)
        axes.set_xticks(*_ticks(range(heads)))
        axes.set_yticks(*_ticks(_labels(numbers)))
        axes.set_xlabel("head", fontsize=8)
        axes.tick_params(labelsize=7)
    figure.axes[0].set_ylabel("layer", fontsize=8)
    formula = "b = β + γ log n" + " + w·q" * ("query" in panels) + " + u·x" * ("hidden" in panels)
    figure.suptitle(f"{formula} of every head; white is −log n", fontsize=10)
    figure.savefig(file, format="png")


def _heatmap(figure, axes, grid: Tensor, centre: float | None) -> None:
    """With colours that a few outliers do not stretch: the bar's ends say where they are."""
    known = grid[~grid.isnan()]
    if centre is None:
        low, high = 0.0, known.quantile(0.98).item()
        colours = "Blues"
    else:
        reach = (known - centre).abs().quantile(0.98).item() or 1.0
        low, high = centre - reach, centre + reach
        colours = "RdBu_r"
    high = high if high > low else low + 1.0
    below, above = bool((known < low).any()), bool((known > high).any())
    image = axes.imshow(
        grid.numpy(), vmin=low, vmax=high, cmap=colours, aspect="auto", interpolation="nearest"
    )
    axes.set_facecolor("#d8d8d8")  # a module with fewer heads
    extend = {(True, True): "both", (True, False): "min", (False, True): "max"}
    bar = figure.colorbar(
        image, ax=axes, extend=extend.get((below, above), "neither"), extendfrac=0.02, aspect=30
    )
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)
    axes.spines[:].set_visible(False)


def _labels(modules: dict[str, object]) -> Sequence[str]:
    """The number of each module's layer, if the names tell one from the other by it."""
    numbers = ["".join(part for part in name.split(".") if part.isdigit()) for name in modules]
    distinct = len(set(numbers)) == len(numbers) and all(numbers)
    return numbers if distinct else [str(place) for place in range(len(modules))]


def _ticks(labels: Sequence) -> tuple[list[int], list[str]]:
    """Places and words of at most some twenty ticks."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if len(labels) / step <= 20)
    places = list(range(0, len(labels), step))
    return places, [str(labels[place]) for place in places]
