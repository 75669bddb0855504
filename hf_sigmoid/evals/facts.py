"""Tasks that hide sentences: keys and values, chains of variables, riddles.

What stands here is what a task *says*; where it stands, and its ids, are `prompts.py`'s.
"""

import itertools
import random
from collections.abc import Callable, Iterator

from hf_sigmoid.evals import stories, words
from hf_sigmoid.evals.drafts import Answer, Draft, Fact
from hf_sigmoid.evals.haystacks import Haystack
from hf_sigmoid.evals.riddles import RIDDLES
from hf_sigmoid.evals.specs import Spec

HEAD = "Read the text and answer the question at the end.\n\nText:"
DIGITS, VARIABLE_DIGITS = 7, 5  # RULER's


def draft(spec: Spec, rng: random.Random, text: Haystack) -> Draft:
    """One sample of a task that hides sentences; names are ones that the text does not hold."""
    return _MAKERS[spec.kind](spec, rng, text)


def _single(spec: Spec, rng: random.Random, text: Haystack) -> Draft:
    return _keyed(rng, text, 0, digits=None if spec.settings else DIGITS)


def _multikey(spec: Spec, rng: random.Random, text: Haystack) -> Draft:
    return _keyed(rng, text, int(spec.settings[0]), digits=DIGITS)


def _keyed(rng: random.Random, text: Haystack, distractors: int, digits: int | None) -> Draft:
    """One key asked for, and other keys with values of their own."""

    def draw(count: int) -> list[str]:
        return words.numbers(rng, count, digits, text) if digits else words.uuids(rng, count, text)

    names, values = words.keys(rng, distractors + 1, text), draw(distractors + 1)
    return _key_draft(names, values, 0, "number" if digits else "code", draw)


def shared(
    spec: Spec, rng: random.Random, text: Haystack, asked: int, size: Callable[[Draft], int]
) -> list[Draft]:
    """Questions for `asked` of the keys of one haystack, each of which has the same size.

    Every draft has the same needles, those asked for first, in the order of the drafts.

    Args:
        size: tokens of a draft's question.

    Raises:
        ValueError: a task that has no more than one question, or fewer keys than are asked for.
    """
    if spec.kind != "multikey":
        raise ValueError(f"{spec} has one question a haystack, expected multikey:N")
    count = int(spec.settings[0]) + 1
    if not 1 <= asked <= count:
        raise ValueError(f"{spec} has {count} keys, expected 1 to {count} questions, got {asked}")
    values = words.numbers(rng, count, DIGITS, text)
    alike: dict[int, list[str]] = {}
    every = words.keys(rng, None, text)
    for name in every:
        group = alike.setdefault(size(_key_draft([name], values[:1], 0, "number", None)), [])
        group.append(name)
        if len(group) == asked:
            names = [*group, *(each for each in every if each not in group)][:count]
            break
    else:
        raise ValueError(f"expected {asked} of our things whose questions have as many tokens")
    return [
        _key_draft(names, values, at, "number", lambda n: words.numbers(rng, n, DIGITS, text))
        for at in range(asked)
    ]


def _key_draft(
    names: list[str],
    values: list[str],
    asked: int,
    noun: str,
    draw: Callable[[int], list[str]] | None,
) -> Draft:
    """The key `asked` of some; `draw` makes values that are nobody's."""
    # Values that the prompt holds are the hardest to tell from the right one.
    held = ((value,) for i, value in enumerate(values) if i != asked)
    return Draft(
        head=HEAD,
        question=f"What is the secret {noun} of the {names[asked]}?",
        prefix=f"The secret {noun} of the {names[asked]} is",
        facts=tuple(
            Fact(f" The secret {noun} of the {name} is {value}.", supports=i == asked)
            for i, (name, value) in enumerate(zip(names, values, strict=True))
        ),
        answer=(values[asked],),
        decoys=itertools.chain(held, _endless(lambda: draw(1)) if draw else ()),
    )


def _multivalue(spec: Spec, rng: random.Random, text: Haystack) -> Draft:
    count = int(spec.settings[0])
    (name,) = words.keys(rng, 1, text)
    values = words.numbers(rng, count, DIGITS, text)
    return Draft(
        head=HEAD,
        question=(
            f"What are the {count} secret numbers of the {name}, "
            "in the order in which the text gives them?"
        ),
        prefix=f"The secret numbers of the {name} are",
        facts=tuple(Fact(f" One secret number of the {name} is {value}.") for value in values),
        answer=tuple(values),
        decoys=_endless(lambda: words.numbers(rng, count, DIGITS, text)),
        pivot=None,
        in_order=True,
    )


def _multiquery(spec: Spec, rng: random.Random, text: Haystack) -> Draft:
    count = int(spec.settings[0])
    names, values = words.keys(rng, count, text), words.numbers(rng, count, DIGITS, text)
    asked = ", ".join(f"the {name}" for name in names)
    return Draft(
        head=HEAD,
        question=f"What are the secret numbers of these, in this order: {asked}?",
        prefix="In this order, the secret numbers are",
        facts=tuple(
            Fact(f" The secret number of the {name} is {value}.")
            for name, value in zip(names, values, strict=True)
        ),
        answer=tuple(values),
        # The right values at the wrong keys, each of them, before values that are nobody's.
        decoys=itertools.chain(
            ((*values[i:], *values[:i]) for i in range(1, count)),
            _endless(lambda: words.numbers(rng, count, DIGITS, text)),
        ),
        pivot=rng.randrange(count),
    )


def _passkey(spec: Spec, rng: random.Random, text: Haystack) -> Draft:
    (key,) = words.numbers(rng, 1, DIGITS, text)
    return Draft(
        head=HEAD,
        question="What is the pass key?",
        prefix="The pass key is the number",
        facts=(Fact(f" The pass key is the number {key}."),),
        answer=(key,),
        decoys=_endless(lambda: words.numbers(rng, 1, DIGITS, text)),
        in_noise=True,
    )


def _variables(spec: Spec, rng: random.Random, text: Haystack) -> Draft:
    """Chains `Let A be 12345.`, `Let B be A.`, …; all names of the first are asked for."""
    chains, hops = map(int, spec.settings)
    names = words.variables(rng, chains * (hops + 1), text)
    values = words.numbers(rng, chains, VARIABLE_DIGITS, text)
    rows = [names[i * (hops + 1) : (i + 1) * (hops + 1)] for i in range(chains)]
    turns = [chain for chain in range(chains) for _ in range(hops + 1)]
    rng.shuffle(turns)
    met, facts = [0] * chains, []
    for chain in turns:
        row, at = rows[chain], met[chain]
        source = row[at - 1] if at else values[chain]
        facts.append(Fact(f" Let {row[at]} be {source}.", supports=chain == 0))
        met[chain] += 1
    return Draft(
        head=HEAD,
        question=(
            f"Which {hops + 1} variables have the value {values[0]}, directly or through others? "
            "Name them in the order in which the text sets them."
        ),
        prefix=f"The variables with the value {values[0]} are, in that order:",
        facts=tuple(facts),
        answer=tuple(rows[0]),
        decoys=itertools.chain(
            map(tuple, rows[1:]), _endless(lambda: words.variables(rng, hops + 1, text))
        ),
        pivot=turns.index(0),  # where the asked value is first given
        in_order=True,
        in_noise=True,
    )


def _riddle(spec: Spec, rng: random.Random, text: Haystack) -> Draft:
    count = int(spec.settings[0]) + 1
    persons = words.absent(words.PERSONS, count + 1, text, "persons")
    rng.shuffle(persons)
    picked = rng.sample(RIDDLES, count)
    named = zip(picked, persons[:count], strict=True)
    needles = [" " + needle.format(name=name) for (needle, _), name in named]
    return Draft(
        head=HEAD,
        question=picked[0][1],
        prefix="That person is",
        facts=tuple(Fact(needle, supports=i == 0) for i, needle in enumerate(needles)),
        answer=(persons[0],),
        decoys=((name,) for name in persons[1:]),
    )


def _endless(draw: Callable[[], list[str]]) -> Iterator[Answer]:
    """New draws for as long as any are asked for."""
    while True:
        yield tuple(draw())


_MAKERS: dict[str, Callable[[Spec, random.Random, Haystack], Draft]] = {
    "single": _single,
    "multikey": _multikey,
    "multivalue": _multivalue,
    "multiquery": _multiquery,
    "vt": _variables,
    "passkey": _passkey,
    "nolap": _riddle,
    "babi": stories.draft,
}
