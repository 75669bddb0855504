"""Curves with bands as inline SVG, in the colours of the page that they stand on."""

import math
from collections.abc import Sequence
from html import escape

from hf_sigmoid.evals import panels
from hf_sigmoid.evals.panels import Chart, Curve
from hf_sigmoid.evals.report import Summary

WIDTH, HEIGHT = 520, 300  # of a chart, in units of a text of 12
LEFT, RIGHT, TOP, FLOOR = 44, 16, 12, HEIGHT - 40  # the frame; RIGHT is a margin


def charts(summary: Summary) -> str:
    return "".join(
        element(
            "figure",
            element("figcaption", escape(f"{chart.title}, {chart.y}, with 95% bands".capitalize())),
            _chart(chart),
            _key(chart),
        )
        for chart in panels.losses(summary)
    )


class _Axes:
    """The places of values in a chart's SVG: positions on a log scale, losses on a linear one."""

    def __init__(self, chart: Chart):
        values = [value for curve in chart.curves for point in curve.points for value in point[1:]]
        values += [0.0] * chart.has_zero
        self.x_range = panels.x_range(chart)
        self.y_ticks = _ticks(min(values), max(values))

    def x(self, value: float) -> float:
        low, high = map(math.log, self.x_range)
        share = (math.log(value) - low) / ((high - low) or 1)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return round(TOP + (high - value) / (high - low) * (FLOOR - TOP), 1)


def _chart(chart: Chart) -> str:
    """An SVG of the curves: bands, lines, and the marks of the models' positions."""
    axes = _Axes(chart)
    parts = []
    for value in axes.y_ticks:
        height = axes.y(value)
        kind = "axis" if chart.has_zero and value == 0 else "grid"
        parts.append(_stroke([(LEFT, height), (WIDTH - RIGHT, height)], kind))
        parts.append(_text(LEFT - 6, height + 4, f"{value:g}", "end"))
    for value in panels.x_ticks(chart):
        place = axes.x(value)
        parts.append(_stroke([(place, FLOOR), (place, FLOOR + 4)], "axis"))
        parts.append(_text(place, FLOOR + 17, f"{value:,}", "middle"))
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 5, chart.x, "middle"))
    for mark in panels.marks(chart):
        parts.append(_stroke([(axes.x(mark), TOP), (axes.x(mark), FLOOR)], "mark"))
        parts.append(_text(axes.x(mark) - 4, TOP + 10, f"{mark:,}", "end"))
    for place, curve in enumerate(chart.curves):
        parts += _curve(curve, place, axes)
    words = f"{chart.title}: {chart.y} by {chart.x}, " + ", ".join(c.name for c in chart.curves)
    view = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria-label": words}
    return element("svg", *parts, **view)


def _curve(curve: Curve, place: int, axes: _Axes) -> list[str]:
    """The band, the line, and a dot a point, which says its numbers."""
    ink = f"s{place % len(panels.SERIES)}"
    upper = [(axes.x(at), axes.y(high)) for at, _, _, high in curve.points]
    lower = [(axes.x(at), axes.y(low)) for at, low, _, _ in reversed(curve.points)]
    line = [(axes.x(at), axes.y(mean)) for at, _, mean, _ in curve.points]
    band = element("polygon", points=_points(upper + lower), class_=f"{ink} band")
    dots = [
        element(
            "circle",
            element("title", escape(f"{curve.name}, position {at:,.0f}: {_numbers(numbers)}")),
            **{"cx": f"{x:g}", "cy": f"{y:g}", "r": "2.5", "class_": ink},
        )
        for (at, *numbers), (x, y) in zip(curve.points, line, strict=True)
    ]
    return [band, _stroke(line, ink, place), *dots]


def _numbers(numbers: Sequence[float]) -> str:
    low, mean, high = numbers
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


def _stroke(points: list[tuple[float, float]], kind: str, place: int = 0) -> str:
    """A line, dashed as the curve at that place."""
    dashes = " ".join(map(str, panels.DASHES[place % len(panels.DASHES)]))
    more = {"stroke-dasharray": dashes} if dashes else {}
    return element("polyline", points=_points(points), class_=f"{kind} line", **more)


def _points(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)


def _text(x: float, y: float, words: str, anchor: str) -> str:
    place = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor}
    return element("text", escape(words), **place)


def _key(chart: Chart) -> str:
    """Which line is whose; the dotted one is where a model's positions end."""
    entries = [
        _swatch(f"s{place % len(panels.SERIES)}", curve.name, place)
        for place, curve in enumerate(chart.curves)
    ]
    entries += [_swatch("mark", words) for words in panels.marks(chart).values()]
    return element("ul", *entries, class_="key")


def _swatch(kind: str, words: str, place: int = 0) -> str:
    line = _stroke([(0, 5), (36, 5)], kind, place)
    view = {"viewBox": "0 0 36 10", "aria-hidden": "true"}
    return element("li", element("svg", line, **view), " ", escape(words))


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose a range, some six."""
    width = (high - low) or 1.0
    unit = 10 ** math.floor(math.log10(width / 5))
    step = next(unit * many for many in (1, 2, 5, 10) if width / (unit * many) <= 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]


def element(name: str, *parts: str, **attributes: str) -> str:
    """An element of HTML parts; `class_` is the attribute class, values are escaped."""
    text = "".join(f' {key.rstrip("_")}="{escape(value)}"' for key, value in attributes.items())
    return f"<{name}{text}>{''.join(parts)}</{name}>"
