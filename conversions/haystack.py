"""Needle prompts of exactly L tokens, made of token ids.

Text is tokenised in pieces and the pieces' ids are joined, so no re-encoding can change the
length. The haystack is a window of a longer text that starts so that a sentence begins exactly
where the needle goes: length and depth are exact together, and only the window's outer ends may
cut a sentence.
"""

import bisect
import random
import re
from dataclasses import dataclass
from typing import Any

HEAD = "Read the text and answer the question at the end.\n\nText:"
NEEDLE = " The special access code for {city} is {value}."
TAIL = (
    "\n\nQuestion: What is the special access code for {city}?"
    "\nAnswer: The special access code for {city} is"
)
ANSWER = " {value}"
# fmt: off
CITIES = [
    "Accra", "Ankara", "Bogota", "Cairo", "Caracas", "Dakar", "Denver", "Dublin", "Hanoi",
    "Havana", "Helsinki", "Houston", "Jakarta", "Kampala", "Karachi", "Lagos", "Lima", "Manila",
    "Melbourne", "Montreal", "Mumbai", "Nairobi", "Osaka", "Oslo", "Perth", "Prague", "Quito",
    "Reykjavik", "Riga", "Santiago", "Seattle", "Seoul", "Shanghai", "Singapore", "Sydney",
    "Taipei", "Tehran", "Tokyo", "Toronto", "Vancouver", "Warsaw", "Zagreb",
]
# fmt: on


@dataclass(frozen=True)
class Sample:
    """One question. `prompt` ends where the answer begins, and is as long as was asked."""

    prompt: list[int]
    answer: list[int]
    needle: tuple[int, int]  # where its ids start and stop in `prompt`
    realised_depth: float  # tokens of haystack before the needle, of all
    city: str
    value: str


class Haystack:
    """A text in one tokenizer's ids, with the places where its sentences begin.

    Args:
        text: the text; line and paragraph breaks are read as blanks, chapter headings left out.
        tokenizer: a fast tokenizer, since places in the text come from its offsets.

    Raises:
        ValueError: another tokenizer, or a text without sentences.
    """

    def __init__(self, text: str, tokenizer: Any):
        text = re.sub(r"(?m)^CHAPTER \w+$", "", text)
        text = " " + " ".join(text.split())
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"expected a fast tokenizer, got {type(tokenizer).__name__}")
        self.tokenizer = tokenizer
        encoded = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        self.ids: list[int] = encoded["input_ids"]
        self.boundaries = _sentence_starts(text, encoded["offset_mapping"])
        self.cities = [city for city in CITIES if city not in text]
        if not self.boundaries or not self.cities:
            raise ValueError("the haystack has no sentence to put a needle before")
        self._start = _special_prefix(tokenizer)

    def sample(self, *, length: int, depth: float, seed: int, index: int) -> Sample:
        """Sample `index` of a cell; the same for every model of one tokenizer, in any order.

        Raises:
            ValueError: a length that the question alone exceeds, or that the text does not fill.
        """
        rng = random.Random(f"{seed}/{length}/{depth:.6f}/{index}")
        city, value = rng.choice(self.cities), str(rng.randrange(100_000, 1_000_000))
        words = {"city": city, "value": value}
        head = self._start + self._encode(HEAD)
        needle = self._encode(NEEDLE.format(**words))
        tail, answer = self._joined(TAIL.format(**words), ANSWER.format(**words))
        room = length - len(head) - len(needle) - len(tail)
        if room < 1:
            raise ValueError(
                f"the question alone has {length - room} tokens, expected a length "
                f"beyond that, got {length}"
            )
        before = round(depth * room)
        # Of the sentences with enough text on either side.
        low = bisect.bisect_left(self.boundaries, before)
        high = bisect.bisect_right(self.boundaries, len(self.ids) - (room - before))
        if low >= high:
            raise ValueError(
                f"the haystack has {len(self.ids)} tokens, expected well over the {room} that a "
                f"prompt of {length} needs: give a longer text"
            )
        place = self.boundaries[rng.randrange(low, high)]
        left = head + self.ids[place - before : place]
        prompt = left + needle + self.ids[place : place + room - before] + tail
        span = (len(left), len(left) + len(needle))
        assert len(prompt) == length and prompt[span[0] : span[1]] == needle
        return Sample(prompt, answer, span, before / room, city, value)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _joined(self, text: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a text and of its continuation, split as the tokenizer splits them together."""
        alone, together = self._encode(text), self._encode(text + continuation)
        if together[: len(alone)] == alone:
            return alone, together[len(alone) :]
        return alone, self._encode(continuation)


def _sentence_starts(text: str, offsets: list[tuple[int, int]]) -> list[int]:
    """Indices of the tokens that begin a sentence, their leading blank included."""
    ends = [end for _, end in offsets]
    starts = []
    # After a full stop, and whatever closes a quotation or bracket, before a capital.
    for match in re.finditer(r"[.!?][\"')\]]*(?= [\"'(\[]?[A-Z])", text):
        end = match.end()
        token = bisect.bisect_right(ends, end)  # the first to reach beyond the sentence's end
        if token < len(offsets) and offsets[token][0] >= end:
            starts.append(token)
    return starts


def _special_prefix(tokenizer: Any) -> list[int]:
    """The ids that a tokenizer puts before a text, such as BOS; they count as prompt."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(plain)] == plain), [])
