"""What a needle run shows: a summary by cell, a table, and a heatmap."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_sigmoid.evals import clopper_pearson

HEATMAP = "heatmap.png"
COLOURS = "Blues"  # one hue, light to dark: reads the same in grey and to colour-blind eyes


def summarise(samples: list[dict[str, Any]], about: dict[str, Any]) -> dict[str, Any]:
    """Accuracy with its exact interval and mean log-probability, by cell and pooled over depths."""
    models = list(dict.fromkeys(sample["name"] for sample in samples))
    return {
        **about,
        "models": [
            {
                "name": name,
                **{key: mine[0][key] for key in ("model", "attn", "weights")},
                "cells": _grouped(mine, ("length", "depth")),
                "lengths": _grouped(mine, ("length",)),
            }
            for name in models
            if (mine := [sample for sample in samples if sample["name"] == name])
        ],
    }


def _grouped(samples: list[dict[str, Any]], by: tuple[str, ...]) -> list[dict[str, Any]]:
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for sample in samples:
        groups.setdefault(tuple(sample[key] for key in by), []).append(sample)
    return [{**dict(zip(by, key, strict=True)), **_pooled(groups[key])} for key in sorted(groups)]


def _pooled(samples: list[dict[str, Any]]) -> dict[str, Any]:
    n, correct = len(samples), sum(sample["correct"] for sample in samples)
    return {
        "n": n,
        "correct": correct,
        "accuracy": correct / n,
        "interval_95": list(clopper_pearson(correct, n)),
        "logprob": math.fsum(sample["logprob"] for sample in samples) / n,
    }


def table(summary: dict[str, Any]) -> str:
    """A line for each model and length, depths pooled."""
    rows = [("model", "attn", "length", "correct", "95 % interval", "log-prob")]
    names = short_names(summary["models"])
    for name, model in zip(names, summary["models"], strict=True):
        for cell in model["lengths"]:
            low, high = cell["interval_95"]
            rows.append(
                (
                    name,
                    model["attn"],
                    str(cell["length"]),
                    f"{cell['correct']}/{cell['n']}",
                    f"{low:.0%} to {high:.0%}",
                    f"{cell['logprob']:.2f}",
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            text.ljust(width) if i < 2 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def short_names(models: list[dict[str, Any]]) -> list[str]:
    """The end of each model's path that tells it from the others: `run/final`, never `final`."""
    paths = [_parts(model["model"]) for model in models]
    names = []
    for path in paths:
        count = 2 if path[-1] == "final" else 1
        while any(other != path and other[-count:] == path[-count:] for other in paths):
            count += 1
        names.append(str(Path(*path[-count:])))
    return names


def _parts(model: str) -> tuple[str, ...]:
    """A folder's absolute path, since `.` has no name; a hub id as it is."""
    return Path(os.path.abspath(model) if Path(model).is_dir() else model).parts


def write(folder: Path, summary: dict[str, Any]) -> None:
    """`summary.json` and the heatmap, each in one piece."""
    _replace(
        folder / "summary.json",
        lambda file: file.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8"),
    )
    _replace(folder / HEATMAP, lambda file: draw(summary, file))


def _replace(file: Path, write_to: Callable[[Path], Any]) -> None:
    temporary = file.with_name("." + file.name)
    write_to(temporary)
    os.replace(temporary, file)


def draw(summary: dict[str, Any], file: Path) -> None:
    """A panel for each model: lengths across, depths down, accuracy as colour and number."""
    # Figure objects rather than pyplot: no window system, and no state left behind.
    from matplotlib.figure import Figure

    models = summary["models"]
    lengths = [cell["length"] for cell in models[0]["lengths"]]
    depths = sorted({cell["depth"] for cell in models[0]["cells"]})
    width = len(models) * (0.85 * len(lengths) + 0.5) + 1.6
    # The title needs six inches whatever the grid.
    figure = Figure((max(6.0, width), 1.7 + 0.6 * len(depths)), dpi=150, layout="constrained")
    figure.get_layout_engine().set(wspace=0.05)
    panels = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    for panel, model, name in zip(panels, models, short_names(models), strict=True):
        cells = {(cell["length"], cell["depth"]): cell for cell in model["cells"]}
        grid = [[cells[length, depth]["accuracy"] for length in lengths] for depth in depths]
        image = panel.imshow(grid, vmin=0, vmax=1, cmap=COLOURS, aspect="auto")
        for row, depth in enumerate(depths):
            for column, length in enumerate(lengths):
                cell = cells[length, depth]
                panel.text(
                    column,
                    row,
                    f"{cell['accuracy']:.0%}\n{cell['logprob']:.2f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    linespacing=1.3,
                    color="white" if cell["accuracy"] > 0.6 else "black",
                )
        panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        panel.set_title(f"{name}\n{model['attn']}", fontsize=10)
        panel.tick_params(length=0)
        # White lines between the cells, so that equal neighbours stay two cells.
        panel.set_xticks([i - 0.5 for i in range(1, len(lengths))], minor=True)
        panel.set_yticks([i - 0.5 for i in range(1, len(depths))], minor=True)
        panel.grid(which="minor", color="white", linewidth=2)
        panel.tick_params(which="minor", length=0)
        panel.spines[:].set_visible(False)
        panel.set_xlabel("prompt tokens")
    panels[0].set_ylabel("depth of the needle")
    bar = figure.colorbar(image, ax=list(panels), pad=0.02, format=lambda x, _: f"{x:.0%}")
    bar.set_label("accuracy")
    bar.outline.set_visible(False)
    n = models[0]["cells"][0]["n"]
    figure.suptitle(
        f"Needle retrieval: accuracy and mean log-probability, n = {n} a cell",
        fontsize=11,
    )
    figure.savefig(file, format="png")
