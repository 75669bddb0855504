"""Blocks that ask for what stands far back: facts hidden in a text, then questions about them.

    text … fact … text … fact … text   question answer   question answer …

In plain text few tokens depend on one early key, so text alone hardly teaches a converted model to
look things up. Here the tokens of every answer do, and each of them counts `weight` times. A
question asks for the value of a key, or for how a piece of the text goes on. A third of the keys
share their first word with another one.

The text is the run's own. The sentences are none of the evaluation's (`evals/tasks.py`), so that
what is measured there was not trained for.
"""

import random
from typing import Any

from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals import words
from hf_sigmoid.evals.encoding import Encoder
from hf_sigmoid.evals.haystack import Haystack, hide
from hf_sigmoid.evals.templates import Fact
from hf_sigmoid.training.packing import IGNORED, Block

TOKENS_A_FACT, MOST_FACTS = 96, 10
CUE, REST = 8, 16  # tokens of a piece of the text that are given, and that are asked for
MOST_DOCUMENTS = 1000  # that are read for one block before a source is of no use

# A fact and the question for its value.
FORMS = (
    (" Room {value} is booked for {key}.", "\n\nWhich room is booked for {key}? Room"),
    (" {key} can be reached at extension {value}.", "\n\nExtension of {key}:"),
    (" Whoever looks for {key} should say {value}.", "\n\nWhoever looks for {key} should say"),
    (" In the ledger {key} stands for {value}.", "\n\nIn the ledger {key} stands for"),
    (" [{key}: {value}]", "\n\n{key}:"),
    (" {key} weighs {value} grams.", "\n\nQ: How many grams does {key} weigh?\nA:"),
    (" The ticket of {key} was {value}.", "\n\nPlease repeat the ticket of {key}. It was"),
    (" set {key} = {value};", "\n\nprint({key})  #"),
)
AGAIN = "\n\nThe text also said:"


def draw(rng: random.Random, count: int) -> tuple[list[str], list[tuple[str, str]]]:
    """`count` facts of one form; questions for half of them at least, each with its answer."""
    fact, question = rng.choice(FORMS)
    # Two words a key; two thirds of the first ones, and then some of them once more.
    first, second = ([w.capitalize() for w in words.coded(rng, count)] for _ in range(2))
    distinct = max(1, 2 * count // 3)
    keys = [f"{first[i % distinct]} {each}" for i, each in enumerate(second)]
    numbers = words.numbers(rng, count, rng.randint(3, 8), ())
    coded = words.coded(rng, count)
    values = rng.choice((numbers, coded, list(map("-".join, zip(coded, numbers, strict=True)))))
    pairs = list(zip(keys, values, strict=True))
    asked = rng.sample(pairs, rng.randint((count + 1) // 2, count))
    return (
        [fact.format(key=key, value=value) for key, value in pairs],
        [(question.format(key=key), f" {value}") for key, value in asked],
    )


class LookupBlocks:
    """The blocks of one stream of a source.

    Args:
        reader: of the source's documents, with a place of its own.
        tokenizer: a fast one.
        weight: of each token of an answer; every other token has 1.
        seed: of everything that is drawn.
    """

    def __init__(self, reader: Any, tokenizer: Any, block_size: int, *, weight: float, seed: str):
        self.reader, self.block_size = reader, block_size
        self.weight, self.seed = weight, seed
        self.encoder = Encoder(tokenizer)
        self.start, self.again = self.encoder.special_prefix(), self.encoder.after(AGAIN)
        self.made = 0

    def state(self) -> dict[str, int]:
        return {**self.reader.state(), "made": self.made}

    def load_state(self, state: dict[str, int]) -> None:
        self.reader.load_state(state)
        self.made = state["made"]

    def next_block(self) -> Block:
        """One row of a single document.

        Raises:
            BadInput: a block too short for a fact and its question, or a source without sentences.
        """
        rng = random.Random(f"{self.seed}/{self.made}")
        self.made += 1
        most = min(MOST_FACTS, max(1, self.block_size // TOKENS_A_FACT))
        for count in range(most, 0, -1):  # fewer where a tokenizer takes many tokens for them
            facts, asked = draw(rng, count)
            needles = [self.encoder.written(fact) for fact in facts]
            tail = [
                (self.encoder.written(part), i == 1)
                for pair in asked
                for i, part in enumerate(pair)
            ]
            parts = [self.start, self.again, *needles, *(ids for ids, _ in tail)]
            taken = sum(map(len, parts)) + CUE + REST
            if 2 * taken <= self.block_size:
                break
        else:
            raise BadInput(
                f"lookups: a fact and its question take {taken} tokens, expected a "
                f"train.block_size of twice that, got {self.block_size}"
            )
        room = self.block_size - taken
        hidden, _, _ = hide(
            [rng.random() for _ in facts], [Fact(fact) for fact in facts], needles,
            self._haystack(room), exact=0, room=room, offset=0, rng=rng, apart=True,
        )  # fmt: skip
        at = rng.randrange(len(hidden) - CUE - REST + 1)
        cue, rest = hidden[at : at + CUE], hidden[at + CUE : at + CUE + REST]
        ids, weights = [], []
        for part, is_answer in [
            (self.start, False), (hidden, False), *tail, (self.again + cue, False), (rest, True)
        ]:  # fmt: skip
            ids += part
            weights += [self.weight if is_answer else 1.0] * len(part)
        labels, weights = [*ids[1:], IGNORED], [*weights[1:], 1.0]
        return Block(ids, list(range(len(ids))), labels, weights)

    def _haystack(self, room: int) -> Haystack:
        """The next documents, as many as hold a window of so many tokens."""
        text = ""
        for _ in range(MOST_DOCUMENTS):
            text += "\n" + self.reader.read()
            self.reader.advance()
            try:
                haystack = Haystack(text, self.encoder.tokenizer)
                if len(haystack.ids) > 2 * room:
                    haystack.place(random.Random(0), room // 2, room - room // 2)
                    return haystack
            except ValueError as error:
                reason = error
                if "special tokens" in str(error):
                    text = ""
        raise BadInput(
            f"lookups: {MOST_DOCUMENTS} documents have no place to hide facts in: {reason}"
        )
