"""The tasks by the strings that name them, and a sample of one in words, before any tokenizer.

    spec            RULER's task      RULER's settings
    passkey         niah_single_1     haystack repeat, key words, value numbers
    single          niah_single_2     haystack essay, key words, value numbers
    single:uuid     niah_single_3     haystack essay, key words, value uuids
    multikey:3      niah_multikey_1   haystack essay, num_needle_k 4 (ours counts the distractors)
    multivalue:4    niah_multivalue   haystack essay, num_needle_v 4
    multiquery:4    niah_multiquery   haystack essay, num_needle_q 4
    vt:1x4          vt                repeated sentences, num_chains 1, num_hops 4
    cwe:10x30x3     cwe               num_cw 10, freq_cw 30, freq_ucw 3
    fwe:2.0         fwe               alpha 2.0, three words asked for
    nolap:3, babi:2, babi:3           not in RULER

The settings are RULER's (Hsieh et al. 2024, arXiv:2404.06654, appendix B), the sentences are not:
scores compare in kind, not digit by digit. The pass key has no key word. The other differences are
on purpose. Answers come in an order that the question states, so that one answer is right, to its
tokens. One needle stands at the depth asked, where RULER draws all depths. The words to count are
made up, in `cwe` too, and no worked example is put before it. `niah_multikey_2` and `_3`, whose
haystack is needles, and the two question-answering sets, which need data, are not here.
"""

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Answer = tuple[str, ...]  # its parts, in the order that the question states

RULER = {
    "passkey": "niah_single_1",
    "single": "niah_single_2",
    "single:uuid": "niah_single_3",
    "multikey:3": "niah_multikey_1",
    "multivalue:4": "niah_multivalue",
    "multiquery:4": "niah_multiquery",
    "vt:1x4": "vt",
    "cwe:10x30x3": "cwe",
    "fwe:2.0": "fwe",
}
# Of each kind: its settings in words, those it has when they are left out, and their ranges.
_KINDS: dict[str, tuple[str, tuple, tuple[tuple[int, int], ...]]] = {
    "single": ("uuid", (), ()),
    "multikey": ("N distractors, 1 to 64", (3,), ((1, 64),)),
    "multivalue": ("N values, 2 to 16", (4,), ((2, 16),)),
    "multiquery": ("N questions, 2 to 16", (4,), ((2, 16),)),
    "vt": ("CHAINSxHOPS, 1x1 to 8x16", (1, 4), ((1, 8), (1, 16))),
    "cwe": (
        "WORDSxTIMESxOTHERS, TIMES above OTHERS", (10, 30, 3), ((1, 50), (2, 1000), (1, 999)),
    ),
    "fwe": ("ALPHA, above 1", (2.0,), ()),
    "passkey": ("nothing", (), ()),
    "nolap": ("N distractors, 0 to 8", (3,), ((0, 8),)),
    "babi": ("2 or 3 facts", (2,), ((2, 3),)),
}  # fmt: skip
KINDS = tuple(_KINDS)


@dataclass(frozen=True)
class Spec:
    """One task with its settings. `str` is the canonical form: `vt` is written `vt:1x4`."""

    kind: str
    settings: tuple = ()

    def __str__(self) -> str:
        return ":".join([self.kind, *(["x".join(map(str, self.settings))] * bool(self.settings))])

    @property
    def has_depth(self) -> bool:
        """True if its prompts have a needle at some depth, rather than a list of words."""
        return self.kind not in ("cwe", "fwe")

    @property
    def ruler(self) -> str | None:
        """RULER's name of the same task with the same settings, or None."""
        return RULER.get(str(self))


def parse(text: str) -> Spec:
    """The task that a string such as `multikey:8` or `vt` names.

    Raises:
        ValueError: an unknown task, with the nearest known one; settings that it does not have.
    """
    kind, colon, rest = text.strip().partition(":")
    if kind not in _KINDS:
        nearest = difflib.get_close_matches(kind.lower(), KINDS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown task {text!r}, did you mean {nearest!r}? Expected one of {', '.join(KINDS)}"
        )
    form, defaults, ranges = _KINDS[kind]
    if not colon:
        return Spec(kind, defaults)
    if kind == "single" and rest == "uuid":
        return Spec(kind, ("uuid",))
    if kind == "fwe" and re.fullmatch(r"\d+(\.\d+)?", rest) and 1 < float(rest) <= 8:
        return Spec(kind, (float(rest),))
    if ranges and re.fullmatch(r"\d+(x\d+)*", rest):
        values = tuple(map(int, rest.split("x")))
        fits = len(values) == len(ranges) and all(
            low <= value <= high for value, (low, high) in zip(values, ranges, strict=True)
        )
        if fits and (kind != "cwe" or values[1] > values[2]):
            return Spec(kind, values)
    example = Spec(kind, defaults)
    raise ValueError(f"task {text!r}: expected {form} behind the colon, as in {example}")


@dataclass(frozen=True)
class Fact:
    """One needle, a whole sentence with its leading blank; `supports` the answer, or distracts."""

    text: str
    supports: bool = True


@dataclass(frozen=True)
class Template:
    """Needles to hide, and what is asked of them.

    `decoys` are wrong answers of the answer's kind, the hardest first; there may be no end of
    them. `pivot` is the needle that stands at the depth asked; without one it is the needle whose
    turn it is there, as the depths of the others fall. `in_order` keeps the needles' order.
    """

    question: str
    prefix: str  # of the answer: words that lead up to it, without a leading blank
    facts: tuple[Fact, ...]
    answer: Answer
    decoys: Iterator[Answer]
    head: str = "Read the text and answer the question at the end.\n\nText:"
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
class ListTemplate:
    """A list of words to count, made once it is known how many tokens it has room for.

    `compose(room, size)` gets the tokens and the function that says how many a word takes.
    """

    question: str
    prefix: str
    head: str
    compose: Callable[[int, Callable[[str], int]], WordList]
