"""Tasks that count: the words of a list that come most often.

    cwe   WORDS words come TIMES times each, all others OTHERS times
    fwe   word r comes n r^−α / ζ(α) times, r = 1 … V; the most frequent is a dot, to be ignored,
          and the next three are asked for

Both fill their room to the token: the list takes as many words as fit, and dots the rest, fewer
than one more word would take. Common words and Zipf's law are RULER's (Hsieh et al. 2024,
arXiv:2404.06654, section 3); the order of the answer is fixed here, so that one answer is right.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator

from hf_sigmoid.evals import words
from hf_sigmoid.evals.drafts import Answer, ListDraft, WordList
from hf_sigmoid.evals.specs import Spec

DOT = "."  # the word that counts for nothing
ASKED = 3  # words of fwe
VOCABULARY_TOKENS = 50  # of room for each word of fwe's vocabulary, as RULER has it


def draft(spec: Spec, rng: random.Random) -> ListDraft:
    """One sample of a task that counts words."""
    if spec.kind == "cwe":
        common, times, others = map(int, spec.settings)
        asked = f"{common} most common words" if common > 1 else "most common word"
        return ListDraft(
            head="Read the list of words and answer the question at the end.\n\nList:",
            question=f"What {'are' if common > 1 else 'is'} the {asked} of the list, in the order "
            "in which each comes first?",
            prefix=f"The {asked} of the list {'are' if common > 1 else 'is'}",
            compose=lambda room, size: _common(rng, room, size, common, times, others),
        )
    alpha = float(spec.settings[0])
    return ListDraft(
        head="Read the list of coded words and answer the question at the end. "
        "Dots count for nothing.\n\nList:",
        question="What are the three most frequent coded words of the list, the most frequent "
        "first?",
        prefix="The three most frequent coded words are",
        compose=lambda room, size: _frequent(rng, room, size, alpha),
    )


def _common(
    rng: random.Random, room: int, size: Callable[[str], int], common: int, times: int, others: int
) -> WordList:
    # No word takes less than a token, so this many are enough for any tokenizer.
    pool = words.coded(rng, common + room // others + 2)
    asked, rest = pool[:common], iter(pool[common:])
    left = room - times * sum(map(size, asked))
    entries = asked * times
    filled = 0
    while (cost := others * size(word := next(rest))) <= left:
        entries += [word] * others
        left -= cost
        filled += 1
    if not filled:
        raise _too_short(room, room - left + cost)
    rng.shuffle(entries)
    entries += [DOT] * left
    first = tuple(dict.fromkeys(word for word in entries if word in set(asked)))
    return _list(entries, first, rng)


def _frequent(rng: random.Random, room: int, size: Callable[[str], int], alpha: float) -> WordList:
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


def _list(entries: list[str], answer: Answer, rng: random.Random) -> WordList:
    asked = set(answer)
    places = tuple(i for i, word in enumerate(entries) if word in asked)
    return WordList(tuple(entries), places, answer, _others(entries, answer, rng))


def _others(entries: list[str], answer: Answer, rng: random.Random) -> Iterator[Answer]:
    """As many other words of the list, the most frequent first, then any that are not in it."""
    rest = Counter(word for word in entries if word != DOT and word not in answer)
    ranked = [word for word, _ in rest.most_common()]
    for start in range(0, len(ranked) - len(answer) + 1, len(answer)):
        yield tuple(ranked[start : start + len(answer)])
    while True:
        yield tuple(words.coded(rng, len(answer)))


def _too_short(room: int, needed: int) -> ValueError:
    return ValueError(
        f"the list has room for {room} tokens, expected {needed} at least: ask for a longer "
        "prompt, or for fewer repetitions, as in cwe:3x8x2"
    )
