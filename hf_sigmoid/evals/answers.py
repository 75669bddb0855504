"""An answer's ids behind its prompt, and wrong answers that their ids tell from it."""

import itertools
from collections.abc import Iterator

from hf_sigmoid.evals.drafts import Answer
from hf_sigmoid.evals.encoding import Encoder, Offsets


def encode(
    encoder: Encoder, lead: str, answer: Answer, others: Iterator[Answer], count: int
) -> tuple[list[int], tuple[tuple[int, int], ...], dict[Answer, list[int]]]:
    """Ids of an answer behind the words `lead`, where its parts stand in them, and its decoys.

    No decoy's ids begin the answer's or another decoy's, or the other way round.

    Args:
        others: candidates for decoys, maybe without end.
        count: decoys at most.

    Raises:
        ValueError: an answer that the tokenizer has no tokens for, or tells from no other.
    """
    ids, offsets = encoder.continuation(lead, written(answer))
    if encoder.is_unknown(ids):
        raise ValueError(
            f"the tokenizer has no tokens for the answer {', '.join(answer)!r}, "
            "expected one that can write it"
        )
    taken, decoys = [ids], {}
    # Most candidates serve; a tokenizer that can tell none apart must not be asked for ever.
    for other in itertools.islice(others, 20 * count):
        wrong, _ = encoder.continuation(lead, written(other))
        if not any(_begins(wrong, each) or _begins(each, wrong) for each in taken):
            taken.append(wrong)
            decoys[other] = wrong
        if len(decoys) == count:
            break
    if not decoys:
        raise ValueError(
            f"the tokenizer gives the answer {', '.join(answer)!r} the ids of every other, "
            "expected one that tells them apart"
        )
    return ids, _parts(answer, offsets), decoys


def written(answer: Answer) -> str:
    """An answer as the prompt goes on with it: ` a`, ` a and b`, ` a, b, and c`."""
    return "".join(joiner + part for joiner, part in zip(_joiners(answer), answer, strict=True))


def _joiners(answer: Answer) -> list[str]:
    """What stands before each part; models that read English put an `and` before the last."""
    last = " and " if len(answer) == 2 else ", and "
    return [" ", *[", "] * (len(answer) - 2), last][: len(answer)]


def _parts(answer: Answer, offsets: Offsets) -> tuple[tuple[int, int], ...]:
    """Where in the answer's ids each of its parts stands, a leading blank included."""
    parts, at = [], 0
    for joiner, part in zip(_joiners(answer), answer, strict=True):
        start = at + len(joiner)
        at = start + len(part)
        touching = [i for i, (a, b) in enumerate(offsets) if a < at and b > start]
        parts.append((touching[0], touching[-1] + 1))
    return tuple(parts)


def _begins(ids: list[int], other: list[int]) -> bool:
    return other[: len(ids)] == ids
