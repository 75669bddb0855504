"""`report.html`: the words of `sections.py` and the panels of `panels.py` on one page.

The page needs no other file, no network and no script. A coloured cell always holds its number.
"""

from collections.abc import Sequence
from html import escape

from hf_sigmoid.evals import panels, report, sections, svg
from hf_sigmoid.evals.panels import Panel
from hf_sigmoid.evals.report import Summary, Table
from hf_sigmoid.evals.svg import element

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


def render(summary: Summary) -> str:
    """The text of `report.html`."""
    parts = [f"<h1>{sections.TITLE}</h1>"]
    parts += [
        f'<p class="warning"><strong>Warning:</strong> {escape(text)}</p>'
        for text in sections.warnings(summary)
    ]
    for section in sections.sections(summary):
        blocks = [_block(block, section.title) for block in section.blocks]
        if section.key == "depths":
            # The cells of the coloured tables hold the numbers of the plain one.
            blocks = [blocks[0], _heatmaps(summary)]
        elif section.key == "loss":
            blocks = [svg.charts(summary), *blocks]
        elif section.key == "attention":
            blocks = [blocks[0], _needles(summary), *blocks[1:]]
        parts.append(element("section", f"<h2>{escape(section.title)}</h2>", *blocks))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{sections.TITLE}</title>\n<style>{_style()}</style>\n</head>\n<body>\n"
        f"{element('main', *parts)}\n</body>\n</html>\n"
    )


def _style() -> str:
    light, dark = (
        "; ".join(f"--s{i}: {colour}" for i, colour in enumerate(colours))
        for colours in (panels.SERIES, DARK_SERIES)
    )
    curves = "".join(
        f".s{i} {{ stroke: var(--s{i}); fill: var(--s{i}) }}\n" for i in range(len(panels.SERIES))
    )
    shapes = ".line { fill: none; stroke-width: 1.5 } .band { stroke: none; opacity: .2 }\n"
    return STYLE.replace("SERIES", light).replace("DARK", dark) + curves + shapes


def _block(block: str | tuple[str, ...] | Table, title: str) -> str:
    if isinstance(block, str):
        return element("p", escape(block))
    if isinstance(block, tuple):
        return element("ul", *(element("li", escape(line)) for line in block))
    return _scroll(_table(block), title)


def _scroll(part: str, label: str) -> str:
    """What may be wider than a phone; the keyboard scrolls it too."""
    more = {"role": "region", "aria-label": label, "tabindex": "0"}
    return element("div", part, class_="scroll", **more) + "\n"


def _table(table: Table) -> str:
    def cell(text: str, place: int) -> str:
        if place >= table.words:
            return element("td", escape(text))
        long = " long" if len(text) > 24 else ""
        if place:
            return element("td", escape(text), class_="name" + long)
        return element("th", escape(text), scope="row", class_="name" + long)

    head = (
        element("th", escape(text), scope="col", **({"class_": "name"} if i < table.words else {}))
        for i, text in enumerate(table.header)
    )
    rows = (
        element("tr", *(cell(text, i) for i, text in enumerate(row))) + "\n" for row in table.rows
    )
    body = element("thead", element("tr", *head)) + element("tbody", *rows)
    return element("table", body, class_="words")


def _heatmaps(summary: Summary) -> str:
    return "".join(
        _figure(
            f"Task {task}",
            shown,
            "Depth down, prompt tokens across: accuracy and its exact 95% interval."
            + (" The last panel is the difference in percentage points." if len(shown) > 1 else ""),
        )
        for task, shown in panels.accuracy(summary).items()
    )


def _needles(summary: Summary) -> str:
    return "".join(
        _figure(
            f"Task {task} at {report.whole(length)} tokens",
            shown,
            "Layers down, heads across. Share: percent of the row's weights that is on the needle. "
            "Raw mass: the sum of these weights, in percent of 1.",
        )
        for (task, length), shown in panels.needles(summary).items()
    )


def _figure(title: str, shown: Sequence[Panel], caption: str) -> str:
    tables = (_scroll(_panel(panel), panel.title) for panel in shown)
    return element("h3", escape(title)) + element(
        "figure",
        element("figcaption", escape(caption)),
        element("div", *tables, class_="panels"),
    )


def _panel(panel: Panel) -> str:
    title = panel.title
    if panel.best:
        layer, head = panel.best
        most = report.percent(panel.cells[layer][head].value)
        title += f"; most: layer {panel.rows[layer]}, head {head} ({most})"
    head = (element("th", escape(text), scope="col") for text in panel.columns)
    rows = (
        element(
            "tr",
            element("th", escape(label), scope="row"),
            *(_cell(panel, i, j) for j in range(len(panel.columns))),
        )
        for i, label in enumerate(panel.rows)
    )
    return element(
        "table",
        element("caption", escape(title)),
        element("thead", element("tr", "<td></td>", *head)),
        element("tbody", *rows),
        class_="heat map" if panel.best else "heat",
    )


def _cell(panel: Panel, row: int, column: int) -> str:
    cell = panel.cells[row][column]
    if cell is None:
        return element("td", report.NONE, class_="none")
    style = f"background:{panels.colour(panel, cell.value)}"
    more = element("small", escape(cell.more)) if cell.more else ""
    best = {"class_": "best"} if panel.best == (row, column) else {}
    return element("td", escape(cell.text), more, title=cell.title, style=style, **best)
