"""A text as the ids of one tokenizer, and needles among its sentences.

Needles go where a sentence begins, and a prompt takes a window of the ids: nothing is encoded
again, so no length can change. A sentence ends at full stops of any script, with a blank behind
them or (Chinese, Japanese) without, and not at titles such as "Mr.".
"""

import bisect
import itertools
import random
import re
from collections.abc import Container, Sequence
from typing import Any

from hf_sigmoid.evals.samples import Needle
from hf_sigmoid.evals.templates import Fact, Template

NEAR = 0.05  # of the window, that a needle may stand off its depth to be apart from another

# A full stop and whatever closes a quotation or bracket: followed by a blank, or East Asian.
# Escaped where a sign looks like an ASCII one: quotation marks, East Asian ! ? and brackets.
_STOP = re.compile(r"[.!?…।؟][\"'\u201d\u2019»)\]]*(?= )|[。\uff01\uff1f][」』\u201d\u2019\uff09]*")
_TITLE = re.compile(r"(?:^|[\s\"'\u201c\u2018(])(?:Mr|Mrs|Ms|Messrs|Dr|St|No|[A-Z])\.$")
_OPENING = "\"'\u201c\u2018«([「『\uff08"


class Haystack:
    """A text to hide needles in.

    Args:
        text: any; line breaks are read as blanks, lines `CHAPTER n` left out.
        tokenizer: a fast tokenizer, since places in the text come from its offsets.

    Raises:
        ValueError: an empty text, one without sentences or with special tokens, another tokenizer.
    """

    def __init__(self, text: str, tokenizer: Any):
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"expected a fast tokenizer, got {type(tokenizer).__name__}")
        words = re.sub(r"(?m)^CHAPTER \w+$", "", text).split()
        if not words:
            raise ValueError("the haystack is empty, expected a text")
        self.text = " " + " ".join(words)
        encoded = tokenizer(
            self.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        self._folded = self.text.casefold()
        self.ids: list[int] = encoded["input_ids"]
        marks = [str(each) for each in tokenizer.added_tokens_decoder.values() if each.special]
        if found := [mark for mark in marks if mark in self.text]:
            raise ValueError(
                f"the haystack holds special tokens ({', '.join(found[:3])}), expected a text "
                "without them"
            )
        offsets = encoded["offset_mapping"]
        self.boundaries = _sentence_starts(self.text, offsets)
        self._words = [_begins_word(self.text, start) for start, _ in offsets] + [True]
        if not self.boundaries:
            raise ValueError(
                f"the haystack of {len(words)} words has no sentence to put a needle before, "
                "expected two sentences at least"
            )

    def __contains__(self, words: str) -> bool:
        """True if the text holds these words, in any case; a needle must not be there before."""
        return words.casefold() in self._folded

    def place(self, rng: random.Random, before: int, after: int) -> int:
        """A random sentence start with so many tokens on either side.

        One is drawn; the first from there at which neither end of the window cuts a word is taken,
        or the one drawn if there is no such place.

        Raises:
            ValueError: there is none.
        """
        low = bisect.bisect_left(self.boundaries, before)
        high = bisect.bisect_right(self.boundaries, len(self.ids) - after)
        if low >= high:
            raise ValueError(
                f"the haystack has {len(self.ids)} tokens, expected well over the "
                f"{before + after} that the prompt needs of it: give a longer text"
            )
        first = rng.randrange(low, high)
        for i in itertools.chain(range(first, high), range(low, first)):
            place = self.boundaries[i]
            if self._words[place - before] and self._words[place + after]:
                return place
        return self.boundaries[first]

    def nearest(self, place: int, start: int, stop: int, taken: Container[int] = ()) -> int | None:
        """The sentence start nearest to `place` within start … stop, the earlier of two.

        Of those not `taken`, unless all are.
        """
        low = bisect.bisect_left(self.boundaries, start)
        high = bisect.bisect_right(self.boundaries, stop)
        within = self.boundaries[low:high]
        free = [each for each in within if each not in taken] if taken else within
        at = bisect.bisect_left(free or within, place)
        around = (free or within)[max(0, at - 1) : at + 1]
        return min(around, key=lambda each: abs(each - place), default=None)


def _begins_word(text: str, start: int) -> bool:
    """True if a token that starts here begins a word, with its blank or behind it."""
    return text[start].isspace() or not start or text[start - 1].isspace()


def _sentence_starts(text: str, offsets: list[tuple[int, int]]) -> list[int]:
    """Indices of the tokens that begin a sentence, their leading blank included."""
    ends = [end for _, end in offsets]
    starts = []
    for match in _STOP.finditer(text):
        end = match.end()
        following = text[end : end + 3].lstrip().lstrip(_OPENING)
        if not following or following[0].islower() or _TITLE.search(text[max(0, end - 9) : end]):
            continue
        token = bisect.bisect_right(ends, end)  # the first to reach beyond the sentence's end
        if token < len(offsets) and offsets[token][0] >= end:
            starts.append(token)
    return sorted(set(starts))


def hide(
    depths: Sequence[float],
    facts: Sequence[Fact],
    needles: list[list[int]],
    text: Haystack,
    *,
    exact: int,
    room: int,
    offset: int,
    rng: random.Random,
    apart: bool = False,
) -> tuple[list[int], list[Needle], list[int]]:
    """A random window of `room` tokens with the needles in it.

    The window begins so that a sentence starts where the needle `exact` goes. The others go to the
    sentence starts nearest to their depths.

    Args:
        depths: of each needle.
        needles: the ids of each fact.
        offset: ids of the prompt before the window.
        apart: no two at one sentence start, while there is a free one near by.

    Returns:
        Ids, the needles in the order of the ids, and which fact each of them is.

    Raises:
        ValueError: a text that is shorter than the window, or has no sentence at such a place.
    """
    before = round(depths[exact] * room)
    place = text.place(rng, before, room - before)
    start, stop = place - before, place - before + room
    taken = {place} if apart else set()
    places = []
    for i, depth in enumerate(depths):
        wanted = start + round(depth * room)
        near = text.nearest(wanted, start, stop, taken)
        if abs(near - wanted) > NEAR * room:
            near = text.nearest(wanted, start, stop)
        places.append(place if i == exact else near)
        if apart:
            taken.add(places[-1])
    # Needles at one place keep their own order, and come one after another.
    order = sorted(range(len(needles)), key=lambda i: (places[i], i))
    ids: list[int] = []
    placed, done = [], start
    for i in order:
        ids += text.ids[done : places[i]]
        first, done = offset + len(ids), places[i]
        ids += needles[i]
        depth = (places[i] - start) / room
        placed.append(Needle(first, offset + len(ids), depth, facts[i].supports, facts[i].text))
    return ids + text.ids[done:stop], placed, order


def draw_depths(template: Template, depth: float, rng: random.Random) -> tuple[list[float], int]:
    """The depth of each needle, one of them exactly `depth`, and which; the others are uniform.

    Of needles in order, between those of the needles before and behind the exact one.
    """
    count, pivot = len(template.facts), template.pivot
    if pivot is not None and template.in_order:
        before = sorted(rng.uniform(0, depth) for _ in range(pivot))
        after = sorted(rng.uniform(depth, 1) for _ in range(count - pivot - 1))
        return [*before, depth, *after], pivot
    others = [rng.random() for _ in range(count - 1)]
    if template.in_order:
        others.sort()
    if pivot is None:
        pivot = sum(each < depth for each in others)
    return [*others[:pivot], depth, *others[pivot:]], pivot
