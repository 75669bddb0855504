"""Names and numbers as reports and pictures write them."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Summary = dict[str, Any]

NONE = "–"  # what stands in a table for a value that there is none of


def named(summary: Summary) -> dict[str, dict[str, Any]]:
    """The models by their short names."""
    models = summary["models"]
    return dict(zip(short_names(models), models, strict=True))


def against(summary: Summary, pair: dict[str, Any], words: str = " against ") -> str:
    """The short names of the second model of a pair and of the first."""
    short = {model["name"]: name for name, model in named(summary).items()}
    return short[pair["second"]] + words + short[pair["first"]]


def tasks(summary: Summary) -> list[str]:
    """The tasks, in the order asked."""
    found = [cell["task"] for model in summary["models"] for cell in model["lengths"]]
    return list(dict.fromkeys([*summary["tasks"], *found]))


def short_names(models: list[dict[str, Any]]) -> list[str]:
    """The end of each model's path that tells it from the others: `run/final`, never `final`.

    One path under several attention functions is `path@attn`; what still is not unique gets
    its `name`, which is.
    """
    paths = [_parts(model["model"]) for model in models]
    short = []
    for path in paths:
        count = 2 if path[-1] == "final" else 1
        while any(other != path and other[-count:] == path[-count:] for other in paths):
            count += 1
        short.append(str(Path(*path[-count:])))
    short = _distinct(short, [f"{n}@{m['attn']}" for n, m in zip(short, models, strict=True)])
    names = [model["name"] for model in models]
    short = _distinct(short, names)
    return short if len(set(short)) == len(short) else names


def _distinct(names: list[str], longer: list[str]) -> list[str]:
    """The names, or the longer ones of those that occur twice."""
    return [b if names.count(a) > 1 else a for a, b in zip(names, longer, strict=True)]


def _parts(model: str) -> tuple[str, ...]:
    """A folder's absolute path, since `.` has no name; a hub id as it is."""
    return Path(os.path.abspath(model) if Path(model).is_dir() else model).parts


def strongest(grid: list[list[float]]) -> tuple[int, int] | None:
    """Row and head of the largest value, None if there is none."""
    places = [(i, j) for i, layer in enumerate(grid) for j in range(len(layer))]
    return max(places, key=lambda place: grid[place[0]][place[1]], default=None)


def heads(grid: list[list[float]]) -> list[float]:
    """The values of all heads of all layers."""
    return [value for layer in grid for value in layer]


def percent(share: float | None) -> str:
    """Whole percent; only what is none or all is 0% or 100%."""
    if share is None:
        return NONE
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def interval(bounds: Sequence[float]) -> str:
    """An interval in whole percent, rounded outwards."""
    low, high = (round(100 * bound, 6) for bound in bounds)
    return f"{math.floor(low)}–{math.ceil(high)}%"


def depth(value: float | None) -> str:
    """How far into the haystack; a list of words has no place there."""
    return "whole text" if value is None else f"{100 * value:.3g}%"


def said(value: float | None, form: str) -> str:
    return NONE if value is None else f"{value:{form}}"


def whole(value: float | None) -> str:
    return said(value, ",.0f")


def spread(value: float) -> str:
    """A number of keys, which may be as few as one."""
    return f"{value:.1f}" if value < 100 else whole(value)


def probability(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"


def positions(start: int, stop: int) -> str:
    return f"{start:,} to {stop - 1:,}"


def loss(band: dict[str, float]) -> str:
    """A mean and its band."""
    return f"{band['mean']:.3f} ({band['low']:.3f} to {band['high']:.3f})"


def difference(band: dict[str, float], sign: int = 1) -> str:
    """A mean and its band, as a difference of losses: signed."""
    ends = sorted((sign * band["low"], sign * band["high"]))
    return f"{sign * band['mean']:+.3f} ({ends[0]:+.3f} to {ends[1]:+.3f})"
