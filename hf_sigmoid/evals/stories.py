"""Short stories of persons who carry things about: reasoning over two or three facts.

    babi:2   Dagny picked up the torch. … Dagny went to the museum.    Where is the torch?
    babi:3   Dagny picked up the torch. … Dagny went to the museum. … Dagny went to the attic.
             Where was the torch before it was in the attic?

The kind is that of bAbI's tasks 2 and 3 (Weston et al. 2015, arXiv:1502.05698), hidden in a text
as BABILong does (Kuratov et al. 2024, arXiv:2406.10149); the generator and the words are our own.
The answer is one of a closed set of places, so a small model can be ranked on all of them.
"""

import random

from hf_sigmoid.evals import words
from hf_sigmoid.evals.drafts import Draft, Fact
from hf_sigmoid.evals.haystacks import Haystack
from hf_sigmoid.evals.specs import Spec

HEAD = (
    "Read the text, in which persons carry things from place to place, and answer the question "
    "at the end with one place. A person keeps what was picked up.\n\nText:"
)
OTHERS = 2  # persons who do the same with other things


def draft(spec: Spec, rng: random.Random, text: Haystack) -> Draft:
    """One story; the depth asked is that of the last supporting fact, which decides it."""
    persons = rng.sample(words.absent(words.PERSONS, OTHERS + 1, text, "persons"), OTHERS + 1)
    things = rng.sample(words.OBJECTS, OTHERS + 1)
    moves = int(spec.settings[0]) - 1
    own = [_journey(rng, *who, moves) for who in zip(persons, things, strict=True)]
    # The first person's story is asked about; the others' happen between its sentences.
    turns = [i for i, journey in enumerate(own) for _ in journey]
    rng.shuffle(turns)
    told = [iter(journey) for journey in own]
    facts = []
    for turn in turns:
        sentence, _, counts = next(told[turn])
        facts.append(Fact(sentence, supports=counts and turn == 0))
    went = [place for _, place, counts in own[0] if place and counts]
    thing = things[0]
    if moves == 1:
        question, prefix = f"Where is the {thing}?", f"The {thing} is in the"
    else:
        question = f"Where was the {thing} before it was in the {went[-1]}?"
        prefix = f"Before it was in the {went[-1]}, the {thing} was in the"
    decoys = [place for place in words.PLACES if place != went[0]]
    rng.shuffle(decoys)
    return Draft(
        head=HEAD,
        question=question,
        prefix=prefix,
        facts=tuple(facts),
        answer=(went[0],),
        decoys=((place,) for place in decoys),
        pivot=max(i for i, fact in enumerate(facts) if fact.supports),
        in_order=True,
    )


def _journey(
    rng: random.Random, person: str, thing: str, moves: int
) -> list[tuple[str, str | None, bool]]:
    """Sentences of one person, the place of each, and whether it counts: a way there does not."""
    first, *then = rng.sample(words.PLACES, moves + 1)
    return [
        (f" {person} went to the {first}.", first, False),
        (f" {person} picked up the {thing}.", None, True),
        *((f" {person} went to the {place}.", place, True) for place in then),
    ]
