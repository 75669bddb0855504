"""One question in a prompt's ids, with all that is needed to score it, and to log it."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Needle:
    """One needle in a prompt: its ids are `prompt[start:stop]`.

    `depth` is the share of the haystack's tokens before it (of the list's, in a list of words).
    """

    start: int
    stop: int
    depth: float
    supports: bool  # the answer, or is a distractor
    text: str


@dataclass(frozen=True)
class Sample:
    """A prompt of exactly `length` ids; the answer comes behind them and is not counted.

    `decoys` are wrong answers of the answer's kind: none begins another, or the answer, so that
    every one is told apart by its ids.
    """

    task: str
    length: int
    depth: float | None  # as asked; None of a list, or if it was drawn
    seed: int
    index: int
    key: str  # of everything that the random numbers come from
    is_chat: bool
    prompt: list[int]
    answer: list[int]
    decoys: list[list[int]]
    needles: tuple[Needle, ...]  # in the order of the prompt
    pivot: int | None  # which of them stands at the depth asked
    question: str
    answer_prefix: str
    answer_texts: tuple[str, ...]
    decoy_texts: tuple[tuple[str, ...], ...]
    haystack: str  # the key of its window: samples of one haystack have it in common
    shared: int = 0  # ids that all prompts of its haystack begin with; 0: there is no other

    @property
    def realised_depth(self) -> float | None:
        """The depth of the needle that stands at the one asked; None of a list of words."""
        return None if self.pivot is None else self.needles[self.pivot].depth

    @property
    def positions(self) -> int:
        """How many a model must have, for the answer and for every decoy."""
        return len(self.prompt) + max(map(len, [self.answer, *self.decoys]))

    @property
    def support(self) -> tuple[tuple[int, int], ...]:
        """[start, stop) of the needles that the answer follows from."""
        return tuple((each.start, each.stop) for each in self.needles if each.supports)

    @property
    def digest(self) -> str:
        """The hash of all that is scored: the ids of the prompt, the answer and the decoys."""
        ids = json.dumps([self.prompt, self.answer, self.decoys])
        return hashlib.sha256(ids.encode()).hexdigest()[:16]

    def record(self) -> dict[str, Any]:
        """The sample as a log holds it: all but the ids of the prompt and the decoys."""
        same = ("task", "length", "depth", "seed", "index", "key", "haystack", "shared")
        return {
            **{name: getattr(self, name) for name in same},
            "prompt_sha256": self.digest,
            "is_chat": self.is_chat,
            "prompt_tokens": len(self.prompt),
            "answer_tokens": len(self.answer),
            "realised_depth": self.realised_depth,
            "needles": [[n.start, n.stop, n.depth, n.supports] for n in self.needles],
            "question": self.question,
            "answer_prefix": self.answer_prefix,
            "answer": list(self.answer_texts),
            "decoys": [list(each) for each in self.decoy_texts],
        }
