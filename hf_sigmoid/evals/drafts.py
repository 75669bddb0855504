"""A task's sample in words, before any tokenizer has seen it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

Answer = tuple[str, ...]  # its parts, in the order that the question states


@dataclass(frozen=True)
class Fact:
    """One needle, a whole sentence with its leading blank; `supports` the answer, or distracts."""

    text: str
    supports: bool = True


@dataclass(frozen=True)
class Draft:
    """Needles to hide, and what is asked of them.

    `decoys` are wrong answers of the answer's kind, the hardest first; there may be no end of
    them. `pivot` is the needle that stands at the depth asked; without one it is the needle whose
    turn it is there, as the depths of the others fall. `in_order` keeps the needles' order.
    """

    head: str
    question: str
    prefix: str  # of the answer: words that lead up to it, without a leading blank
    facts: tuple[Fact, ...]
    answer: Answer
    decoys: Iterator[Answer]
    pivot: int | None = 0
    in_order: bool = False
    in_noise: bool = False  # among repeated sentences rather than in the haystack


@dataclass(frozen=True)
class WordList:
    """A list of words that fills its room, `entries` in order, the asked-for ones' `places`."""

    entries: tuple[str, ...]
    places: tuple[int, ...]
    answer: Answer
    decoys: Iterator[Answer]


@dataclass(frozen=True)
class ListDraft:
    """A list of words to count, made once it is known how many tokens it has room for.

    `compose(room, size)` gets the tokens and the function that says how many a word takes.
    """

    head: str
    question: str
    prefix: str
    compose: Callable[[int, Callable[[str], int]], WordList]
