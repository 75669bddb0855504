"""The tasks, by the strings that name them, and RULER's names of them.

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
on purpose. Answers come
in an order that the question states, so that one answer is right, to its tokens. One needle stands
at the depth asked, where RULER draws all depths. The words to count are made up, in `cwe` too, and
no worked example is put before it. `niah_multikey_2` and `_3`, whose haystack is needles, and the
two question-answering sets, which need data, are not here.
"""

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Spec:
    """One task with its settings. `str` is the canonical form: `vt` is written `vt:1x4`."""

    kind: str
    settings: tuple[int | float | str, ...] = ()

    def __str__(self) -> str:
        if not self.settings:
            return self.kind
        return f"{self.kind}:{'x'.join(map(str, self.settings))}"

    @property
    def has_depth(self) -> bool:
        """Whether its prompts have a needle at some depth, rather than a list of words."""
        return self.kind not in ("cwe", "fwe")

    @property
    def ruler(self) -> str | None:
        """RULER's name of the same task with the same settings, or None."""
        return RULER.get(str(self))


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

# Of each kind: what its settings look like, and what they are when left out.
_KINDS: dict[str, tuple[str, tuple[int | float | str, ...]]] = {
    "single": ("uuid", ()),
    "multikey": ("N distractors, 1 to 64", (3,)),
    "multivalue": ("N values, 2 to 16", (4,)),
    "multiquery": ("N questions, 2 to 16", (4,)),
    "vt": ("CHAINSxHOPS, 1x1 to 8x16", (1, 4)),
    "cwe": ("WORDSxTIMESxOTHERS, TIMES above OTHERS", (10, 30, 3)),
    "fwe": ("ALPHA, above 1", (2.0,)),
    "passkey": ("nothing", ()),
    "nolap": ("N distractors, 0 to 8", (3,)),
    "babi": ("2 or 3 facts", (2,)),
}
KINDS = tuple(_KINDS)
_RANGES = {
    "multikey": ((1, 64),),
    "multivalue": ((2, 16),),
    "multiquery": ((2, 16),),
    "vt": ((1, 8), (1, 16)),
    "cwe": ((1, 50), (2, 1000), (1, 999)),
    "nolap": ((0, 8),),
    "babi": ((2, 3),),
}


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
    form, defaults = _KINDS[kind]
    if not colon:
        return Spec(kind, defaults)
    settings = _settings(kind, rest)
    if settings is None:
        example = Spec(kind, defaults)
        raise ValueError(f"task {text!r}: expected {form} behind the colon, as in {example}")
    return Spec(kind, settings)


def _settings(kind: str, text: str) -> tuple[int | float | str, ...] | None:
    """What stands behind the colon, None if it does not fit."""
    if kind == "single":
        return ("uuid",) if text == "uuid" else None
    if kind == "fwe":
        number = float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0
        return (number,) if 1 < number <= 8 else None
    ranges = _RANGES.get(kind, ())
    if not re.fullmatch(r"\d+(x\d+)*", text) or len(text.split("x")) != len(ranges):
        return None
    values = tuple(map(int, text.split("x")))
    if any(not low <= value <= high for value, (low, high) in zip(values, ranges, strict=True)):
        return None
    if kind == "cwe" and values[1] <= values[2]:
        return None
    return values
