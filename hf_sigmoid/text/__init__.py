"""The built-in text: 389 kB of Northanger Abbey, its last chapters held out."""

import re
from functools import cache
from importlib.resources import files

# A chapter that begins in the last 15 % of the text is held out: chapters 25 to 28.
HELD_OUT = 0.15


@cache
def austen() -> str:
    """The whole text; paragraphs are single lines with an empty line between them."""
    return files(__name__).joinpath("austen.txt").read_text(encoding="utf-8")


def chapters(text: str) -> list[str]:
    """`text` cut before each line `CHAPTER n`; the pieces joined give `text` back."""
    return [piece for piece in re.split(r"(?m)^(?=CHAPTER \d+$)", text) if piece]


def train() -> str:
    """The chapters to train and calibrate on."""
    return austen()[: _first_held_out()]


def held_out() -> str:
    """The chapters that nothing may be trained or calibrated on: for evaluation only."""
    return austen()[_first_held_out() :]


def _first_held_out() -> int:
    text, start = austen(), 0
    for chapter in chapters(text):
        if start >= (1 - HELD_OUT) * len(text):
            break
        start += len(chapter)
    return start
