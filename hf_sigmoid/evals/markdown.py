"""`report.md`: the sections of the report, and links to the pictures."""

import re
from collections.abc import Sequence

from hf_sigmoid.evals import report
from hf_sigmoid.evals.report import Summary, Table
from hf_sigmoid.evals.sections import TITLE, sections, warnings


def render(summary: Summary, pictures: Sequence[str] | None) -> str:
    """The text of `report.md`, with links to the pictures in its folder; None if none could be."""
    parts = [f"# {TITLE}"]
    parts += [f"> **Warning:** {_escape(text)}" for text in warnings(summary)]
    for section in sections(summary):
        parts += [f"## {section.title}", *map(_block, section.blocks)]
    if pictures is None:
        parts += ["## Pictures", _escape(report.NO_PICTURES)]
    elif pictures:
        parts += ["## Pictures", *(f"![{name}]({name})" for name in pictures)]
    return "\n\n".join(parts) + "\n"


def _block(block: str | tuple[str, ...] | Table) -> str:
    if isinstance(block, str):
        return _escape(block)
    if isinstance(block, tuple):
        return "\n".join(f"- {_escape(line)}" for line in block)
    rule = ["---" if i < block.words else "---:" for i in range(len(block.header))]
    lines = [map(_escape, block.header), rule, *(map(_escape, row) for row in block.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escape(text: str) -> str:
    """Plain text on one line, for Markdown; an underscore within a word is none of its marks."""
    return re.sub(
        r"([\\`*\[\]<>|&~$])|(?<![^\W_])(_)|(_)(?![^\W_])", r"\\\g<0>", " ".join(text.split())
    )
