"""The report of an evaluation: what `summary.json` holds, as files to read and to look at.

    files = write(folder, summary)
    print(table(summary))

`report.md` and `report.html` say the same; the page needs no other file, no network and no script.
"""

import base64
import json
import re
import warnings
from collections.abc import Mapping
from html import escape
from importlib.util import find_spec
from pathlib import Path

from hf_sigmoid.evals import pictures
from hf_sigmoid.evals.sections import NO_PICTURES, cell_rows, sections, warnings_of
from hf_sigmoid.evals.wording import Summary
from hf_sigmoid.files import write_file, write_text

TITLE = "Long-context evaluation"
# The columns of words; all others are of numbers, and stand to the right.
WORDS = {"model", "models", "attn", "from", "attention", "weights", "rope", "prompt", "task"}
WORDS |= {"depth", "positions"}
STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #fff; --line: #d4d4d4; --warn: #fff4d6 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #16181b; --line: #43474d; --warn: #3a2c0a } }
body { max-width: 80rem; margin: 0 auto; padding: 1rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
p, li { max-width: 44rem; overflow-wrap: anywhere }
.warning { background: var(--warn); padding: .5rem .75rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .5rem; text-align: right }
td:nth-child(-n+2), th:nth-child(-n+2) { text-align: left; overflow-wrap: anywhere }
td:nth-child(n+3) { white-space: nowrap }
img { max-width: 100%; background: #fff }
"""


def write(folder: Path, summary: Summary) -> list[Path]:
    """Write the report's files, each whole or not at all; the same summary gives the same bytes.

    Returns:
        The files. A picture that there are no data for is not among them, nor is any without
        matplotlib, which a warning says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Path] = {}
    if find_spec("matplotlib") is None:
        warnings.warn(NO_PICTURES, stacklevel=2)
    else:
        for name, figure in pictures.figures(summary):
            # A path without an ending would get one.
            drawn[name] = write_file(folder / name, lambda f, g=figure: g.savefig(f, format="png"))
    texts = {
        "cells.csv": _cells(summary),
        "summary.json": json.dumps(summary, indent=1) + "\n",
        "report.md": _markdown(summary, drawn),
        "report.html": _page(summary, drawn),
    }
    written = [write_text(folder / name, text) for name, text in texts.items()]
    return [*written, *drawn.values()]


def table(summary: Summary) -> str:
    """A line for each model, task and length, depths pooled."""
    names = ("model", "attn", "task", "length", "correct", "95% interval", "log-prob")
    lines = [names, *([row[name] for name in names] for row in cell_rows(summary, "lengths"))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    ways = [str.ljust if name in WORDS else str.rjust for name in names]
    return "\n".join(
        "  ".join(way(cell, width) for cell, way, width in zip(line, ways, widths, strict=True))
        for line in lines
    )


def _cells(summary: Summary) -> str:
    """The text of cells.csv: a line for each cell, numbers as they are."""
    import pandas

    about = ("name", "model", "attn", "weights", "rope")
    scores = ("task", "ruler", "length", "depth", "n", "haystacks", "correct", "accuracy")
    more = ("logprob", "first", "candidates")
    columns = [*about, *scores, "low_95", "high_95", *more]
    columns += ["generated_correct", "generated_contains"]
    rows = [
        [
            *(model[key] for key in about), *(cell[key] for key in scores), *cell["interval_95"],
            *(cell[key] for key in more),
            *((cell["generated"] or {}).get(key) for key in ("correct", "contains")),
        ]
        for model in summary["models"]
        for cell in model["cells"]
    ]  # fmt: skip
    # As objects, or whole numbers beside nothing would be written as 1.0.
    frame = pandas.DataFrame(rows, columns=columns, dtype=object)
    return frame.to_csv(index=False, lineterminator="\n")


def _markdown(summary: Summary, drawn: Mapping[str, Path]) -> str:
    parts = [f"# {TITLE}", *(f"> **Warning:** {_escape(text)}" for text in warnings_of(summary))]
    for section in sections(summary):
        parts.append(f"## {section.title}")
        for block in section.blocks:
            if isinstance(block, str):
                parts.append(_escape(block))
            elif isinstance(block, tuple):
                parts.append("\n".join(f"- {_escape(line)}" for line in block))
            else:
                rule = ["---" if name in WORDS else "---:" for name in block[0]]
                lines = [map(_escape, block[0]), rule, *(map(_escape, r.values()) for r in block)]
                parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        parts += [f"![{name}]({name})" for name in section.pictures if name in drawn]
    return "\n\n".join(parts) + "\n"


def _escape(text: str) -> str:
    """Plain text on one line, for Markdown; an underscore within a word is none of its marks."""
    return re.sub(
        r"([\\`*\[\]<>|&~$])|(?<![^\W_])(_)|(_)(?![^\W_])", r"\\\g<0>", " ".join(text.split())
    )


def _page(summary: Summary, drawn: Mapping[str, Path]) -> str:
    """The text of report.html."""
    import pandas

    parts = [f"<h1>{TITLE}</h1>"]
    for text in warnings_of(summary):
        parts.append(f'<p class="warning"><strong>Warning:</strong> {escape(text)}</p>')
    for section in sections(summary):
        parts.append(f"<h2>{escape(section.title)}</h2>")
        for block in section.blocks:
            if isinstance(block, str):
                parts.append(f"<p>{escape(block)}</p>")
            elif isinstance(block, tuple):
                parts.append(f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in block)}</ul>")
            else:
                with pandas.option_context("display.max_colwidth", None):
                    made = pandas.DataFrame(block).to_html(index=False, border=0)
                parts.append(f'<div class="scroll">{made}</div>')
        for name in section.pictures:
            if name in drawn:
                content = base64.b64encode(drawn[name].read_bytes()).decode()
                parts.append(f'<p><img alt="{name}" src="data:image/png;base64,{content}"></p>')
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{TITLE}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n"
        "</body>\n</html>\n"
    )
