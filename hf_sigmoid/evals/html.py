"""`report.html`: the words of `markdown.py` and the panels of `plots.py` on one page.

The page needs no other file, no network and no script. A coloured cell always holds its number.
"""

import math
from collections.abc import Sequence
from html import escape

from hf_sigmoid.evals import markdown, plots, report
from hf_sigmoid.evals.plots import Chart, Curve, Panel
from hf_sigmoid.evals.report import Summary, Table

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #595959; --paper: #ffffff;
  --line: #d4d4d4; --tint: #f4f6f8; --warn: #fff4d6; --edge: #b36b00; SERIES }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --soft: #b0b0b0; --paper: #16181b;
  --line: #43474d; --tint: #202429; --warn: #3a2c0a; --edge: #e0a030; DARK } }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --paper: #fff;
  --line: #ccc; --tint: #f4f6f8; --warn: #fff4d6; --edge: #b36b00; SERIES } }
* { box-sizing: border-box; -webkit-print-color-adjust: exact; print-color-adjust: exact }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5;
  font: 16px/1.5 system-ui, sans-serif }
main { max-width: 80rem; margin: 0 auto; padding: 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.25rem; margin-top: 2.5rem } h3 { font-size: 1.05rem }
p, li { max-width: 44rem; overflow-wrap: anywhere }
.warning { max-width: none; background: var(--warn); border-left: 4px solid var(--edge);
  padding: .5rem .75rem }
.scroll { overflow-x: auto; margin: 1rem 0 }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
caption, figcaption { text-align: left; color: var(--soft); font-size: .85rem; padding: .25rem 0 }
.words th, .words td { border-bottom: 1px solid var(--line); padding: .3rem .5rem;
  text-align: right; white-space: nowrap }
.words thead th { background: var(--tint); vertical-align: bottom; white-space: normal }
.words .name { text-align: left } .words tbody th { font-weight: normal }
.words .long { white-space: normal; overflow-wrap: anywhere; min-width: 9rem; max-width: 20rem }
figure { margin: .5rem 0 2rem } .panels .scroll { margin: 0 }
.panels { display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-items: flex-start }
.panels > div { max-width: 100% }
.panels caption { color: var(--ink); font-weight: 600; overflow-wrap: anywhere }
.heat { min-width: 11rem }
.heat th { font-weight: normal; color: var(--soft); padding: .15rem .4rem; text-align: right }
.heat thead th { text-align: center }
.heat tbody td { border: 2px solid var(--paper); text-align: center; min-width: 3.5rem;
  height: 2.9rem; padding: .1rem .15rem; line-height: 1.2; color: #000 }
.heat small { display: block; font-size: .7rem; white-space: nowrap }
.heat tbody td.none { background: var(--tint); color: var(--soft) }
.map { font-size: .68rem } .map tbody td { border-width: 1px; min-width: 1.75rem;
  height: 1.15rem; padding: 0 }
.map th { padding: 0 .3rem } .map td.best { outline: 2px solid #d1242f; outline-offset: -2px;
  font-weight: 700 }
svg { width: 100%; max-width: 44rem; height: auto; display: block }
svg text { font-size: 12px; fill: var(--soft) }
svg .grid { stroke: var(--line); stroke-width: .7 } .axis, .mark { stroke: var(--soft) }
.mark { stroke-dasharray: 2 3 }
.key { list-style: none; padding: 0; margin: .25rem 0; display: flex; flex-wrap: wrap;
  gap: .1rem 1.25rem; font-size: .85rem } .key svg { display: inline; width: 2.2rem }
@media print { h2 { break-after: avoid } figure, tr { break-inside: avoid }
  .scroll { overflow: visible } }
"""
DARK_SERIES = ("#7db4f0", "#ff9a5c", "#4fd0a5", "#e39bd3", "#bbbbbb")

WIDTH, HEIGHT = 520, 300  # of a chart, in units of a text of 12
LEFT, RIGHT, TOP, FLOOR = 44, 16, 12, HEIGHT - 40  # the frame; RIGHT is a margin


def render(summary: Summary) -> str:
    """The text of `report.html`."""
    parts = [f"<h1>{markdown.TITLE}</h1>"]
    parts += [
        f'<p class="warning"><strong>Warning:</strong> {escape(text)}</p>'
        for text in markdown.warnings(summary)
    ]
    for section in markdown.sections(summary):
        blocks = [_block(block, section.title) for block in section.blocks]
        if section.key == "depths":
            # The cells of the coloured tables hold the numbers of the plain one.
            blocks = [blocks[0], _heatmaps(summary)]
        elif section.key == "loss":
            blocks = [_charts(summary), *blocks]
        elif section.key == "attention":
            blocks = [blocks[0], _needles(summary), *blocks[1:]]
        parts.append(_element("section", f"<h2>{escape(section.title)}</h2>", *blocks))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{markdown.TITLE}</title>\n<style>{_style()}</style>\n</head>\n<body>\n"
        f"{_element('main', *parts)}\n</body>\n</html>\n"
    )


def _style() -> str:
    light, dark = (
        "; ".join(f"--s{i}: {colour}" for i, colour in enumerate(colours))
        for colours in (plots.SERIES, DARK_SERIES)
    )
    curves = "".join(
        f".s{i} {{ stroke: var(--s{i}); fill: var(--s{i}) }}\n" for i in range(len(plots.SERIES))
    )
    shapes = ".line { fill: none; stroke-width: 1.5 } .band { stroke: none; opacity: .2 }\n"
    return STYLE.replace("SERIES", light).replace("DARK", dark) + curves + shapes


def _element(name: str, *parts: str, **attributes: str) -> str:
    """An element of HTML parts; `class_` is the attribute class, values are escaped."""
    text = "".join(f' {key.rstrip("_")}="{escape(value)}"' for key, value in attributes.items())
    return f"<{name}{text}>{''.join(parts)}</{name}>"


def _block(block: str | tuple[str, ...] | Table, title: str) -> str:
    if isinstance(block, str):
        return _element("p", escape(block))
    if isinstance(block, tuple):
        return _element("ul", *(_element("li", escape(line)) for line in block))
    return _scroll(_table(block), title)


def _scroll(part: str, label: str) -> str:
    """What may be wider than a phone; the keyboard scrolls it too."""
    more = {"role": "region", "aria-label": label, "tabindex": "0"}
    return _element("div", part, class_="scroll", **more) + "\n"


def _table(table: Table) -> str:
    def cell(text: str, place: int) -> str:
        if place >= table.words:
            return _element("td", escape(text))
        long = " long" if len(text) > 24 else ""
        if place:
            return _element("td", escape(text), class_="name" + long)
        return _element("th", escape(text), scope="row", class_="name" + long)

    head = (
        _element("th", escape(text), scope="col", **({"class_": "name"} if i < table.words else {}))
        for i, text in enumerate(table.header)
    )
    rows = (
        _element("tr", *(cell(text, i) for i, text in enumerate(row))) + "\n" for row in table.rows
    )
    body = _element("thead", _element("tr", *head)) + _element("tbody", *rows)
    return _element("table", body, class_="words")


def _heatmaps(summary: Summary) -> str:
    return "".join(
        _figure(
            f"Task {task}",
            panels,
            "Depth down, prompt tokens across: accuracy and its exact 95% interval."
            + (
                " The last panel is the difference in percentage points." if len(panels) > 1 else ""
            ),
        )
        for task, panels in plots.accuracy(summary).items()
    )


def _needles(summary: Summary) -> str:
    return "".join(
        _figure(
            f"Task {task} at {report.whole(length)} tokens",
            panels,
            "Layers down, heads across. Share: percent of the row's weights that is on the needle. "
            "Raw mass: the sum of these weights, in percent of 1.",
        )
        for (task, length), panels in plots.needles(summary).items()
    )


def _figure(title: str, panels: Sequence[Panel], caption: str) -> str:
    shown = (_scroll(_panel(panel), panel.title) for panel in panels)
    return _element("h3", escape(title)) + _element(
        "figure",
        _element("figcaption", escape(caption)),
        _element("div", *shown, class_="panels"),
    )


def _panel(panel: Panel) -> str:
    title = panel.title
    if panel.best:
        layer, head = panel.best
        most = report.percent(panel.cells[layer][head].value)
        title += f"; most: layer {layer}, head {head} ({most})"
    head = (_element("th", escape(text), scope="col") for text in panel.columns)
    rows = (
        _element(
            "tr",
            _element("th", escape(label), scope="row"),
            *(_cell(panel, i, j) for j in range(len(panel.columns))),
        )
        for i, label in enumerate(panel.rows)
    )
    return _element(
        "table",
        _element("caption", escape(title)),
        _element("thead", _element("tr", "<td></td>", *head)),
        _element("tbody", *rows),
        class_="heat map" if panel.best else "heat",
    )


def _cell(panel: Panel, row: int, column: int) -> str:
    cell = panel.cells[row][column]
    if cell is None:
        return _element("td", report.NONE, class_="none")
    style = f"background:{plots.colour(panel, cell.value)}"
    more = _element("small", escape(cell.more)) if cell.more else ""
    best = {"class_": "best"} if panel.best == (row, column) else {}
    return _element("td", escape(cell.text), more, title=cell.title, style=style, **best)


def _charts(summary: Summary) -> str:
    return "".join(
        _element(
            "figure",
            _element(
                "figcaption", escape(f"{chart.title}, {chart.y}, with 95% bands".capitalize())
            ),
            _chart(chart),
            _key(chart),
        )
        for chart in plots.losses(summary)
    )


class _Axes:
    """The places of values in a chart's SVG: positions on a log scale, losses on a linear one."""

    def __init__(self, chart: Chart):
        values = [value for curve in chart.curves for point in curve.points for value in point[1:]]
        values += [0.0] * chart.has_zero
        self.x_range = plots.x_range(chart)
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
    for value in plots.x_ticks(chart):
        place = axes.x(value)
        parts.append(_stroke([(place, FLOOR), (place, FLOOR + 4)], "axis"))
        parts.append(_text(place, FLOOR + 17, f"{value:,}", "middle"))
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 5, chart.x, "middle"))
    for mark in plots.marks(chart):
        parts.append(_stroke([(axes.x(mark), TOP), (axes.x(mark), FLOOR)], "mark"))
        parts.append(_text(axes.x(mark) - 4, TOP + 10, f"{mark:,}", "end"))
    for place, curve in enumerate(chart.curves):
        parts += _curve(curve, place, axes)
    words = f"{chart.title}: {chart.y} by {chart.x}, " + ", ".join(c.name for c in chart.curves)
    view = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria-label": words}
    return _element("svg", *parts, **view)


def _curve(curve: Curve, place: int, axes: _Axes) -> list[str]:
    """The band, the line, and a dot a point, which says its numbers."""
    ink = f"s{place % len(plots.SERIES)}"
    upper = [(axes.x(at), axes.y(high)) for at, _, _, high in curve.points]
    lower = [(axes.x(at), axes.y(low)) for at, low, _, _ in reversed(curve.points)]
    line = [(axes.x(at), axes.y(mean)) for at, _, mean, _ in curve.points]
    band = _element("polygon", points=_points(upper + lower), class_=f"{ink} band")
    dots = [
        _element(
            "circle",
            _element("title", escape(f"{curve.name}, position {at:,.0f}: {_numbers(numbers)}")),
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
    dashes = " ".join(map(str, plots.DASHES[place % len(plots.DASHES)]))
    more = {"stroke-dasharray": dashes} if dashes else {}
    return _element("polyline", points=_points(points), class_=f"{kind} line", **more)


def _points(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)


def _text(x: float, y: float, words: str, anchor: str) -> str:
    place = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor}
    return _element("text", escape(words), **place)


def _key(chart: Chart) -> str:
    """Which line is whose; the dotted one is where a model's positions end."""
    entries = [
        _swatch(f"s{place % len(plots.SERIES)}", curve.name, place)
        for place, curve in enumerate(chart.curves)
    ]
    entries += [_swatch("mark", words) for words in plots.marks(chart).values()]
    return _element("ul", *entries, class_="key")


def _swatch(kind: str, words: str, place: int = 0) -> str:
    line = _stroke([(0, 5), (36, 5)], kind, place)
    view = {"viewBox": "0 0 36 10", "aria-hidden": "true"}
    return _element("li", _element("svg", line, **view), " ", escape(words))


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose a range, some six."""
    width = (high - low) or 1.0
    unit = 10 ** math.floor(math.log10(width / 5))
    step = next(unit * many for many in (1, 2, 5, 10) if width / (unit * many) <= 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]
