"""The words that tasks are made of, and ways to make more."""

import itertools
import random
import uuid
from collections.abc import Callable, Container, Sequence

# fmt: off
ADJECTIVES = [
    "amber", "brittle", "copper", "crooked", "dented", "dusty", "emerald", "faded", "frosted",
    "gilded", "glossy", "hollow", "ivory", "jagged", "knitted", "lacquered", "marbled", "mossy",
    "painted", "patched", "pewter", "polished", "purple", "rusty", "scarlet", "speckled",
    "striped", "tarnished", "tin", "turquoise", "velvet", "violet", "woven", "wrinkled",
]
NOUNS = [
    "accordion", "anchor", "anvil", "barrel", "beacon", "bucket", "cactus", "canoe", "cello",
    "compass", "drum", "easel", "falcon", "ferry", "gondola", "hammer", "harp", "helmet", "kettle",
    "kite", "ladder", "lantern", "magnet", "mitten", "otter", "paddle", "pelican", "piano",
    "pulley", "raft", "saddle", "telescope", "tractor", "trumpet", "walrus", "windmill",
]
# None begins another, so none is the beginning of another's ids.
PERSONS = [
    "Agnesa", "Bartek", "Celestin", "Dagny", "Emeka", "Farid", "Giulia", "Hamza", "Ingrid",
    "Jovana", "Kenji", "Lubomir", "Marisol", "Nadezh", "Oluwa", "Priya", "Quentin", "Radko",
    "Solveig", "Tomasz", "Uzoma", "Vilmos", "Wanjiru", "Xiomara", "Yusuf", "Zdenka",
]
PLACES = ["attic", "bakery", "cellar", "garage", "harbour", "laundry", "museum", "stable"]
OBJECTS = ["banjo", "camera", "dagger", "football", "mango", "puppet", "rope", "torch"]
# fmt: on

NOISE = (
    " The lamp is lit. The road is long. The rain has stopped. A door is open. "
    "Somebody walks up and then walks down."
)

# (needle, question) that share no word: what joins them is knowledge of the world. A needle names
# one person, and the question asks for the person. No needle answers another's question, so the
# other pairs are distractors. Persons of the haystack's own could fit a question too: none of the
# built-in novel's fits one of these. The sentences are our own; the idea is NoLiMa's (Modarressi
# et al. 2025, arXiv:2502.05167), whose texts are not free for every use.
RIDDLES = [
    ("{name} grew up beneath the Eiffel Tower.", "Which person has lived in France?"),
    ("{name} works as a guide at the Colosseum.", "Which person has been to Italy?"),
    ("{name} proposed marriage in front of the Taj Mahal.", "Which person has visited India?"),
    ("{name} sketched the Great Sphinx at sunrise.", "Which person has travelled to Egypt?"),
    ("{name} fainted on the steps of the Kremlin.", "Which person has stayed in Russia?"),
    ("{name} photographed Mount Fuji every morning.", "Which person has been to Japan?"),
    ("{name} sold postcards at Machu Picchu.", "Which person knows Peru at first hand?"),
    ("{name} leaned against the Brandenburg Gate.", "Which person was seen in Germany?"),
    ("{name} sang at the opera house in Sydney.", "Which person has gone to Australia?"),
    ("{name} polished the steps of the Parthenon.", "Which person has reached Greece?"),
    ("{name} camped below Table Mountain.", "Which person has explored South Africa?"),
    ("{name} never eats anything that came from an animal.", "Which person is a vegan?"),
    ("{name} breaks out in a rash after a single peanut.", "Which person has an allergy?"),
    ("{name} cannot tell red from green.", "Which person is colour-blind?"),
    ("{name} reads with the fingertips alone.", "Which person lost the sense of sight?"),
    ("{name} follows every talk by watching lips.", "Which person is deaf?"),
    ("{name} spends the nights charting Saturn and its rings.", "Which person loves astronomy?"),
    ("{name} keeps forty hives behind the barn.", "Which person has bees?"),
    ("{name} pulls rotten molars all day long.", "Which person is a dentist?"),
    ("{name} argues before the judge in a black robe.", "Which person is a lawyer?"),
    ("{name} kneads dough long before dawn.", "Which person bakes bread?"),
    ("{name} checkmated three opponents at once.", "Which person is good at chess?"),
    ("{name} was dealt two aces and bluffed anyway.", "Which person enjoys poker?"),
    ("{name} tuned the strings and rosined the bow.", "Which person plays the violin?"),
    ("{name} crossed the finish after forty-two kilometres.", "Which person ran a marathon?"),
    ("{name} refuses to fly and takes trains instead.", "Which person is afraid of aeroplanes?"),
    ("{name} went home from the ceremony with an Oscar.", "Which person makes films?"),
]


def numbers(rng: random.Random, count: int, digits: int, text: Container[str]) -> list[str]:
    """Distinct numbers of so many digits, none of them in the text."""
    low, high = 10 ** (digits - 1), 10**digits
    return _distinct(count, lambda: str(rng.randrange(low, high)), text)


def uuids(rng: random.Random, count: int, text: Container[str]) -> list[str]:
    """Distinct random UUIDs, none of them in the text."""
    return _distinct(count, lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)), text)


def keys(rng: random.Random, count: int | None, text: Container[str]) -> list[str]:
    """Distinct things with an attribute, `amber kettle`, none of them in the text; None: all."""
    every = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
    rng.shuffle(every)
    found = list(itertools.islice((key for key in every if key not in text), count))
    if count is not None and len(found) < count:
        raise ValueError(_too_few(count, "things"))
    return found


def variables(rng: random.Random, count: int, text: Container[str]) -> list[str]:
    """Distinct names of five capitals, none of them in the text."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return _distinct(count, lambda: "".join(rng.choices(letters, k=5)), text)


def coded(rng: random.Random, count: int) -> list[str]:
    """Distinct made-up words of three syllables, `tovaki`."""
    consonants, vowels = "bdfgklmnprstvz", "aeiou"

    def word() -> str:
        return "".join(rng.choice(consonants) + rng.choice(vowels) for _ in range(3))

    return _distinct(count, word, ())


def absent(words: Sequence[str], least: int, text: Container[str], kind: str) -> list[str]:
    """Those of some words that the text does not hold.

    Raises:
        ValueError: fewer than are needed.
    """
    left = [word for word in words if word not in text]
    if len(left) < least:
        raise ValueError(
            f"the haystack already holds {len(words) - len(left)} of our {len(words)} {kind}, "
            f"expected at least {least} that it does not hold"
        )
    return left


def _distinct(count: int, draw: Callable[[], str], text: Container[str]) -> list[str]:
    found: dict[str, None] = {}
    # Far more draws than any text makes necessary: there are 90,000 words or more of each kind.
    for _ in range(100 * count + 1000):
        if len(found) == count:
            return list(found)
        word = draw()
        if word not in text:
            found[word] = None
    raise ValueError(_too_few(count, "names or numbers"))


def _too_few(count: int, kind: str) -> str:
    return f"expected a haystack that does not hold {count} of our {kind} already"
