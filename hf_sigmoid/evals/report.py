"""The report of an evaluation: what `summary.json` holds, as files to read and to look at.

    files = write(folder, summary)
    print(table(summary))

Here are the names, numbers and rows that all of its forms share. `sections.py` puts them into
words, `panels.py` into pictures, `html.py` both onto one page.
"""

import csv
import io
import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_sigmoid.files import write_file

Summary = dict[str, Any]

NO_PICTURES = "matplotlib is not installed: no PNG files (pip install matplotlib)"
NONE = "–"  # what stands in a table for a value that there is none of


@dataclass(frozen=True)
class Table:
    """Formatted cells; the first `words` columns name a row, the others are numbers."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    words: int


def write(folder: Path, summary: Summary) -> list[Path]:
    """Write the report's files, each whole or not at all; the same summary gives the same bytes.

    Returns:
        The files. A picture that there are no data for is not among them, nor is any without
        matplotlib, which a warning says.
    """
    from hf_sigmoid.evals import html, markdown, plots  # they build on this module

    folder.mkdir(parents=True, exist_ok=True)
    page = html.render(summary)
    pictures: list[Path] | None = None
    if find_spec("matplotlib") is None:
        warnings.warn(NO_PICTURES, stacklevel=2)
    else:
        pictures = []
        for name, figure in plots.figures(summary):
            # A path without an ending would get one.
            pictures.append(
                write_file(folder / name, lambda f, g=figure: g.savefig(f, format="png"))
            )
    texts = {
        "cells.csv": _csv(summary),
        "summary.json": json.dumps(summary, indent=1) + "\n",
        "report.md": markdown.render(summary, pictures and [file.name for file in pictures]),
        "report.html": page,
    }
    return [
        *(
            write_file(folder / name, lambda file, text=text: file.write_bytes(text.encode()))
            for name, text in texts.items()
        ),
        *(pictures or []),
    ]


def table(summary: Summary) -> str:
    """A line for each model, task and length, depths pooled."""
    shown = columns(rows(summary), COLUMNS[:7], 3)
    lines = [shown.header, *shown.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < shown.words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


COLUMNS = (
    "model", "attn", "task", "length", "correct", "95% interval", "log-prob",
    "above decoys", "generated", "contained",
)  # fmt: skip


def rows(summary: Summary, part: str = "lengths") -> list[dict[str, str]]:
    """Each cell of each model as text, by column.

    Args:
        part: `lengths`, of pooled depths, or `cells`.
    """
    order = tasks(summary)
    return [
        _row(name, model, cell)
        for name, model in named(summary).values()
        for cell in sorted(model[part], key=lambda cell: order[cell["task"]])
    ]


def _row(name: str, model: dict[str, Any], cell: dict[str, Any]) -> dict[str, str]:
    generated, decoys = cell["generated"], (cell["candidates"] or 1) - 1
    return {
        "model": name,
        "attn": model["attn"],
        "task": cell["task"],
        "length": whole(cell["length"]),
        "depth": depth(cell.get("depth")),
        "n": whole(cell["n"]),
        "correct": f"{cell['correct']}/{cell['n']}",
        "accuracy": percent(cell["accuracy"]),
        "95% interval": interval(cell["interval_95"]),
        "log-prob": number(cell["logprob"]),
        "above decoys": percent(cell["first"]) + (f" ({whole(decoys)})" if decoys else ""),
        "generated": f"{generated['correct']}/{cell['n']}" if generated else NONE,
        "contained": percent(generated["contains"] if generated else None),
    }


def columns(lines: list[dict[str, str]], names: Sequence[str], words: int) -> Table:
    """A table of some columns of the rows, in that order."""
    return Table(tuple(names), [tuple(line[name] for name in names) for line in lines], words)


def named(summary: Summary) -> dict[str, tuple[str, dict[str, Any]]]:
    """The short name and the model of each `name`."""
    models = summary["models"]
    return {
        model["name"]: (short, model)
        for short, model in zip(short_names(models), models, strict=True)
    }


def tasks(summary: Summary) -> dict[str, int]:
    """The place of each task, in the order asked."""
    found = [cell["task"] for model in summary["models"] for cell in model["lengths"]]
    return {task: place for place, task in enumerate(dict.fromkeys([*summary["tasks"], *found]))}


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


def only_names(summary: Summary) -> dict[str, str]:
    """The short name of each `name`."""
    return {key: short for key, (short, _) in named(summary).items()}


def strongest(grid: list[list[float]]) -> tuple[int, int] | None:
    """Row and head of the largest value, None if there is none."""
    places = [(i, j) for i, layer in enumerate(grid) for j in range(len(layer))]
    return max(places, key=lambda place: grid[place[0]][place[1]], default=None)


def heads(grid: list[list[float]]) -> list[float]:
    """The values of all heads of all layers."""
    return [value for layer in grid for value in layer]


def is_normalised(entry: dict[str, Any]) -> bool:
    """Whether every row of attention weights sums to one, so that mass and share are the same."""
    return all(abs(value - 1) < 0.01 for value in heads(entry["total"]))


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


def whole(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def number(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def nats(band: dict[str, float], sign: int = 1) -> str:
    """A mean and its band, as a difference of losses: signed, three digits."""
    ends = sorted((sign * band["low"], sign * band["high"]))
    return f"{sign * band['mean']:+.3f} ({ends[0]:+.3f} to {ends[1]:+.3f})"


def small(value: float | None) -> str:
    return NONE if value is None else f"{value:.2g}"


def spread(value: float) -> str:
    """A number of keys, which may be as few as one."""
    return f"{value:.1f}" if value < 100 else whole(value)


def probability(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"


def _csv(summary: Summary) -> str:
    """A line for each cell, numbers as they are."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    about = ("name", "model", "attn", "weights", "rope")
    scores = ("task", "ruler", "length", "depth", "n", "haystacks", "correct", "accuracy")
    more = ("logprob", "first", "candidates")
    writer.writerow(
        [*about, *scores, "low_95", "high_95", *more, "generated_correct", "generated_contains"]
    )
    for model in summary["models"]:
        for cell in model["cells"]:
            generated = cell["generated"] or {}
            writer.writerow(
                [
                    *(model[key] for key in about),
                    *(cell[key] for key in scores),
                    *cell["interval_95"],
                    *(cell[key] for key in more),
                    generated.get("correct"),
                    generated.get("contains"),
                ]
            )
    return file.getvalue()
