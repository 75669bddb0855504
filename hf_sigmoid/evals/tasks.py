"""The tasks in words: keys and values, chains of variables, riddles, stories, words to count.

Where a sentence stands, and its ids, are `prompts.py`'s.

    babi:2   Dagny picked up the torch. … Dagny went to the museum.    Where is the torch?
    babi:3   … Dagny went to the attic.    Where was the torch before it was in the attic?
    cwe      WORDS words come TIMES times each, all others OTHERS times
    fwe      word r comes n r^−α / ζ(α) times, r = 1 … V; the most frequent is a dot, to be
             ignored, and the next three are asked for

Stories are of the kind of bAbI's tasks 2 and 3 (Weston et al. 2015, arXiv:1502.05698), hidden in a
text as BABILong does (Kuratov et al. 2024, arXiv:2406.10149); their words are our own. The answer
is one of a closed set of places, so a small model can be ranked on all of them.

Lists fill their room to the token: they take as many words as fit, and dots the rest, fewer than
one more word would take. Common words and Zipf's law are RULER's (Hsieh et al. 2024,
arXiv:2404.06654, section 3); the order of the answer is fixed here, so that one answer is right.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Container, Iterator

from hf_sigmoid.evals import words
from hf_sigmoid.evals.templates import Answer, Fact, ListTemplate, Spec, Template, WordList

DIGITS, VARIABLE_DIGITS = 7, 5  # RULER's
STORY_HEAD = (
    "Read the text, in which persons carry things from place to place, and answer the question "
    "at the end with one place. A person keeps what was picked up.\n\nText:"
)
OTHERS = 2  # persons of a story who do the same with other things
DOT = "."  # the word of a list that counts for nothing
ASKED = 3  # words of fwe
VOCABULARY_TOKENS = 50  # of room for each word of fwe's vocabulary, as RULER has it

Text = Container[str]


def template(spec: Spec, rng: random.Random, text: Text) -> Template | ListTemplate:
    """One sample of a task; its names are ones that the text does not hold."""
    return _MAKERS[spec.kind](rng, text, *spec.settings)


def shared(
    spec: Spec, rng: random.Random, text: Text, asked: int, size: Callable[[Template], int]
) -> list[Template]:
    """Questions for `asked` of the keys of one haystack, each of which has the same size.

    Every template has the same needles, those asked for first, in the order of the templates.

    Args:
        size: tokens of a template's question.

    Raises:
        ValueError: a task that has no more than one question, or fewer keys than are asked for.
    """
    if spec.kind != "multikey":
        raise ValueError(f"{spec} has one question a haystack, expected multikey:N")
    count = spec.settings[0] + 1
    if not 1 <= asked <= count:
        raise ValueError(f"{spec} has {count} keys, expected 1 to {count} questions, got {asked}")

    def draw(many: int) -> list[str]:
        return words.numbers(rng, many, DIGITS, text)

    values = draw(count)
    alike: dict[int, list[str]] = {}
    every = words.keys(rng, None, text)
    for name in every:
        group = alike.setdefault(size(_asking([name], values[:1], 0, "number", draw)), [])
        group.append(name)
        if len(group) == asked:
            names = [*group, *(each for each in every if each not in group)][:count]
            return [_asking(names, values, at, "number", draw) for at in range(asked)]
    raise ValueError(f"expected {asked} of our things whose questions have as many tokens")


def _asking(
    names: list[str], values: list[str], asked: int, noun: str, draw: Callable[[int], list[str]]
) -> Template:
    """The question for the key `asked` of some; `draw` makes values that are nobody's."""
    # Values that the prompt holds are the hardest to tell from the right one.
    held = ((value,) for i, value in enumerate(values) if i != asked)
    return Template(
        question=f"What is the secret {noun} of the {names[asked]}?",
        prefix=f"The secret {noun} of the {names[asked]} is",
        facts=tuple(
            Fact(f" The secret {noun} of the {name} is {value}.", supports=i == asked)
            for i, (name, value) in enumerate(zip(names, values, strict=True))
        ),
        answer=(values[asked],),
        decoys=itertools.chain(held, _endless(lambda: draw(1))),
    )


def _single(rng: random.Random, text: Text, kind: str | None = None) -> Template:
    if kind is None:
        return _multikey(rng, text, 0)
    (name,), draw = words.keys(rng, 1, text), lambda many: words.uuids(rng, many, text)
    return _asking([name], draw(1), 0, "code", draw)


def _multikey(rng: random.Random, text: Text, distractors: int) -> Template:
    """One key asked for, and other keys with values of their own."""

    def draw(many: int) -> list[str]:
        return words.numbers(rng, many, DIGITS, text)

    names = words.keys(rng, distractors + 1, text)
    return _asking(names, draw(distractors + 1), 0, "number", draw)


def _multivalue(rng: random.Random, text: Text, count: int) -> Template:
    (name,) = words.keys(rng, 1, text)
    values = words.numbers(rng, count, DIGITS, text)
    return Template(
        question=f"What are the {count} secret numbers of the {name}, "
        "in the order in which the text gives them?",
        prefix=f"The secret numbers of the {name} are",
        facts=tuple(Fact(f" One secret number of the {name} is {value}.") for value in values),
        answer=tuple(values),
        decoys=_endless(lambda: words.numbers(rng, count, DIGITS, text)),
        pivot=None,
        in_order=True,
    )


def _multiquery(rng: random.Random, text: Text, count: int) -> Template:
    names, values = words.keys(rng, count, text), words.numbers(rng, count, DIGITS, text)
    asked = ", ".join(f"the {name}" for name in names)
    return Template(
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


def _passkey(rng: random.Random, text: Text) -> Template:
    (key,) = words.numbers(rng, 1, DIGITS, text)
    return Template(
        question="What is the pass key?",
        prefix="The pass key is the number",
        facts=(Fact(f" The pass key is the number {key}."),),
        answer=(key,),
        decoys=_endless(lambda: words.numbers(rng, 1, DIGITS, text)),
        in_noise=True,
    )


def _variables(rng: random.Random, text: Text, chains: int, hops: int) -> Template:
    """Chains `Let A be 12345.`, `Let B be A.`, …; all names of the first are asked for."""
    names = words.variables(rng, chains * (hops + 1), text)
    values = words.numbers(rng, chains, VARIABLE_DIGITS, text)
    rows = [names[i * (hops + 1) : (i + 1) * (hops + 1)] for i in range(chains)]
    turns = [chain for chain in range(chains) for _ in range(hops + 1)]
    rng.shuffle(turns)
    said = [
        iter([f" Let {b} be {a}." for a, b in itertools.pairwise([value, *row])])
        for value, row in zip(values, rows, strict=True)
    ]
    return Template(
        question=f"Which {hops + 1} variables have the value {values[0]}, directly or through "
        "others? Name them in the order in which the text sets them.",
        prefix=f"The variables with the value {values[0]} are, in that order:",
        facts=tuple(Fact(next(said[chain]), supports=chain == 0) for chain in turns),
        answer=tuple(rows[0]),
        decoys=itertools.chain(
            map(tuple, rows[1:]), _endless(lambda: words.variables(rng, hops + 1, text))
        ),
        pivot=turns.index(0),  # where the asked value is first given
        in_order=True,
        in_noise=True,
    )


def _riddle(rng: random.Random, text: Text, distractors: int) -> Template:
    count = distractors + 1
    persons = words.absent(words.PERSONS, count + 1, text, "persons")
    rng.shuffle(persons)
    picked = rng.sample(words.RIDDLES, count)
    return Template(
        question=picked[0][1],
        prefix="That person is",
        facts=tuple(
            Fact(" " + needle.format(name=persons[i]), supports=i == 0)
            for i, (needle, _) in enumerate(picked)
        ),
        answer=(persons[0],),
        decoys=((name,) for name in persons[1:]),
    )


def _story(rng: random.Random, text: Text, count: int) -> Template:
    """The depth asked is that of the last supporting fact, which decides the story."""
    persons = rng.sample(words.absent(words.PERSONS, OTHERS + 1, text, "persons"), OTHERS + 1)
    things = rng.sample(words.OBJECTS, OTHERS + 1)
    ways = [rng.sample(words.PLACES, count) for _ in persons]
    journeys = [
        [
            Fact(f" {person} went to the {first}.", supports=False),
            Fact(f" {person} picked up the {thing}."),
            *(Fact(f" {person} went to the {place}.") for place in went),
        ]
        for person, thing, (first, *went) in zip(persons, things, ways, strict=True)
    ]
    # The first person's story is asked about; the others' happen between its sentences.
    turns = [i for i, journey in enumerate(journeys) for _ in journey]
    rng.shuffle(turns)
    told = [iter(journey) for journey in journeys]
    facts = [
        next(told[turn]) if turn == 0 else Fact(next(told[turn]).text, supports=False)
        for turn in turns
    ]
    thing, (_, answer, *later) = things[0], ways[0]
    before = f"efore it was in the {later[-1]}" if later else ""
    decoys = [place for place in words.PLACES if place != answer]
    rng.shuffle(decoys)
    return Template(
        head=STORY_HEAD,
        question=f"Where was the {thing} b{before}?" if later else f"Where is the {thing}?",
        prefix=f"B{before}, the {thing} was in the" if later else f"The {thing} is in the",
        facts=tuple(facts),
        answer=(answer,),
        decoys=((place,) for place in decoys),
        pivot=max(i for i, fact in enumerate(facts) if fact.supports),
        in_order=True,
    )


def _common(rng: random.Random, text: Text, common: int, times: int, others: int) -> ListTemplate:
    def compose(room: int, size: Callable[[str], int]) -> WordList:
        # No word takes less than a token, so this many are enough for any tokenizer.
        pool = words.coded(rng, common + room // others + 2)
        asked, rest = pool[:common], iter(pool[common:])
        left = room - times * sum(map(size, asked))
        entries = asked * times
        while (cost := others * size(word := next(rest))) <= left:
            entries += [word] * others
            left -= cost
        if len(entries) == common * times:
            raise _too_short(room, room - left + cost)
        rng.shuffle(entries)
        entries += [DOT] * left
        first = tuple(dict.fromkeys(word for word in entries if word in set(asked)))
        return _list(entries, first, rng)

    phrase, is_ = (
        (f"{common} most common words", "are") if common > 1 else ("most common word", "is")
    )
    return ListTemplate(
        head="Read the list of words and answer the question at the end.\n\nList:",
        question=f"What {is_} the {phrase} of the list, in the order in which each comes first?",
        prefix=f"The {phrase} of the list {is_}",
        compose=compose,
    )


def _frequent(rng: random.Random, text: Text, alpha: float) -> ListTemplate:
    def compose(room: int, size: Callable[[str], int]) -> WordList:
        vocabulary = words.coded(rng, max(2 * ASKED, room // VOCABULARY_TOKENS))
        sizes = [1, *map(size, vocabulary)]
        weights = [rank**-alpha for rank in range(1, len(sizes) + 1)]
        total = sum(weights)

        def counts(n: int) -> list[int]:
            return [int(n * weight / total) for weight in weights]

        def tokens(n: int) -> int:
            return sum(count * each for count, each in zip(counts(n), sizes, strict=True))

        # The largest list that fits: tokens(n) rises with n, and n tokens hold n words at most.
        low, high = 0, 2 * room + 2 * len(sizes)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if tokens(middle) <= room else (low, middle)
        dots, *each = counts(low)
        if not all(a > b for a, b in itertools.pairwise(each[: ASKED + 1])) or not each[ASKED]:
            raise _too_short(room, room + 1)
        entries = [word for word, count in zip(vocabulary, each, strict=True) for _ in range(count)]
        entries += [DOT] * (dots + room - tokens(low))
        rng.shuffle(entries)
        return _list(entries, tuple(vocabulary[:ASKED]), rng)

    return ListTemplate(
        head="Read the list of coded words and answer the question at the end. "
        "Dots count for nothing.\n\nList:",
        question="What are the three most frequent coded words of the list, the most frequent "
        "first?",
        prefix="The three most frequent coded words are",
        compose=compose,
    )


def _list(entries: list[str], answer: Answer, rng: random.Random) -> WordList:
    asked = set(answer)
    places = tuple(i for i, word in enumerate(entries) if word in asked)

    def decoys() -> Iterator[Answer]:
        """Other words of the list, the most frequent first, then any that are not in it."""
        rest = Counter(word for word in entries if word != DOT and word not in asked)
        ranked = [word for word, _ in rest.most_common()]
        for start in range(0, len(ranked) - len(answer) + 1, len(answer)):
            yield tuple(ranked[start : start + len(answer)])
        yield from _endless(lambda: words.coded(rng, len(answer)))

    return WordList(tuple(entries), places, answer, decoys())


def _too_short(room: int, needed: int) -> ValueError:
    return ValueError(
        f"the list has room for {room} tokens, expected {needed} at least: ask for a longer "
        "prompt, or for fewer repetitions, as in cwe:3x8x2"
    )


def _endless(draw: Callable[[], list[str]]) -> Iterator[Answer]:
    """New draws for as long as any are asked for."""
    while True:
        yield tuple(draw())


_MAKERS: dict[str, Callable[..., Template | ListTemplate]] = {
    "single": _single,
    "multikey": _multikey,
    "multivalue": _multivalue,
    "multiquery": _multiquery,
    "vt": _variables,
    "passkey": _passkey,
    "nolap": _riddle,
    "babi": _story,
    "cwe": _common,
    "fwe": _frequent,
}
