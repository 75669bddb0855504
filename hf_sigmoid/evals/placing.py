"""Needles among the sentences of a window: one at an exact depth, the others near theirs."""

import random
from collections.abc import Sequence

from hf_sigmoid.evals.drafts import Draft, Fact
from hf_sigmoid.evals.haystacks import Haystack
from hf_sigmoid.evals.samples import Needle

NEAR = 0.05  # of the window, that a needle may stand off its depth to be apart from another


def hide(
    draft: Draft,
    needles: list[list[int]],
    text: Haystack,
    *,
    room: int,
    depth: float,
    offset: int,
    rng: random.Random,
) -> tuple[list[int], list[Needle], int]:
    """A random window of `room` tokens with the needles in it.

    The window begins so that a sentence starts where the needle of the depth asked goes. The
    others go to the sentence start that is nearest to their depths, which are drawn uniformly:
    of needles in order, between those of the needles before and behind the exact one.

    Args:
        needles: the ids of each of the draft's facts.
        offset: ids of the prompt before the window.

    Returns:
        Ids, the needles in the order of the ids, and which of them stands at `depth`.

    Raises:
        ValueError: a text that is shorter than the window, or has no sentence at such a place.
    """
    depths, pivot = _depths(draft, depth, rng)
    ids, placed, order = hide_at(
        depths, draft.facts, needles, text, exact=pivot, room=room, offset=offset, rng=rng
    )
    return ids, placed, order.index(pivot)


def hide_at(
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
    """As `hide`, with a depth for every needle, of which the needle `exact` has its own exactly.

    Args:
        apart: no two at one sentence start, while there is a free one near by.

    Returns:
        Ids, the needles in the order of the ids, and which fact each of them is.
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
        placed.append(
            Needle(
                start=offset + len(ids),
                stop=offset + len(ids) + len(needles[i]),
                depth=(places[i] - start) / room,
                supports=facts[i].supports,
                text=facts[i].text,
            )
        )
        ids += needles[i]
        done = places[i]
    return ids + text.ids[done:stop], placed, order


def _depths(draft: Draft, depth: float, rng: random.Random) -> tuple[list[float], int]:
    """The depth of each needle, one of them exactly `depth`, and which."""
    count, pivot = len(draft.facts), draft.pivot
    if pivot is not None and draft.in_order:
        before = sorted(rng.uniform(0, depth) for _ in range(pivot))
        after = sorted(rng.uniform(depth, 1) for _ in range(count - pivot - 1))
        return [*before, depth, *after], pivot
    others = [rng.random() for _ in range(count - 1)]
    if draft.in_order:
        others.sort()
    if pivot is None:
        pivot = sum(each < depth for each in others)
    return [*others[:pivot], depth, *others[pivot:]], pivot
