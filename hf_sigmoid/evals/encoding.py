"""Pieces of text, answers and a chat template as ids that stand between other ids.

A tokenizer treats the beginning of a text in ways of its own: it adds BOS, or a blank. A piece
that goes into the middle is encoded behind a letter, which is then taken off again.
"""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from jinja2 import TemplateError

from hf_sigmoid.evals.templates import Answer

_ANCHOR = "a"
_CONTENT, _ANSWER = "CONTENTGOESHERE", "ANSWERGOESHERE"
_REASONING = re.compile(r"[<\[◁|](/?)(?:think|reason|thought)\w*", re.IGNORECASE)


class Encoder:
    """One tokenizer's ids of pieces of text."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.dot: int = self.after(" .")[-1]  # a dot's own id, whether or not it has a blank

    def plain(self, text: str) -> list[int]:
        """Ids of a text as it stands; special tokens written in it are read as such."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def after(self, text: str) -> list[int]:
        """Ids of a piece that begins with a blank or a line break, within a text."""
        return self.continuation(_ANCHOR, text)

    def continuation(self, text: str, continuation: str) -> list[int]:
        """Ids of what follows a text, as the tokenizer splits the two together.

        The text's own ids are the same whatever follows, so nothing of an answer shows in the
        prompt before it.
        """
        alone, whole = self.plain(text), self.plain(text + continuation)
        if whole[: len(alone)] == alone:
            return whole[len(alone) :]
        # The last token of the text took some of what follows: split between them instead.
        return self.plain(continuation)

    def written(self, text: str) -> list[int]:
        """Ids of words within a text that the answer depends on.

        Raises:
            ValueError: a tokenizer that has no tokens for them.
        """
        ids = self.after(text)
        if self.is_unknown(ids):
            raise ValueError(
                f"the tokenizer has no tokens for {text!r}, expected one that can write it"
            )
        return ids

    def special_prefix(self) -> list[int]:
        """The ids that the tokenizer puts before a text, such as BOS; they count as prompt."""
        plain, whole = self.plain(_ANCHOR), self.tokenizer(_ANCHOR)["input_ids"]
        size = len(plain)
        starts = range(len(whole) - size + 1)
        return next((whole[:i] for i in starts if whole[i : i + size] == plain), [])

    def round_trips(self, text: str) -> bool:
        """True if decoding the ids of a text gives the text back."""
        ids = self.plain(text)
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text

    def is_unknown(self, ids: list[int]) -> bool:
        """True if any id stands for what the tokenizer has no token for."""
        unknown = self.tokenizer.unk_token_id
        # In byte-level vocabularies the unknown token is often end-of-text, which no text gives.
        return unknown is not None and unknown in ids


def encode_answer(
    encoder: Encoder, lead: str, answer: Answer, others: Iterator[Answer], count: int
) -> tuple[list[int], dict[Answer, list[int]]]:
    """Ids of an answer behind the words `lead`, and of its decoys.

    No decoy's ids begin the answer's or another decoy's, or the other way round.

    Args:
        others: candidates for decoys, maybe without end.
        count: decoys at most.

    Raises:
        ValueError: an answer that the tokenizer has no tokens for, or tells from no other.
    """
    ids = encoder.continuation(lead, written(answer))
    if encoder.is_unknown(ids):
        raise ValueError(
            f"the tokenizer has no tokens for the answer {', '.join(answer)!r}, "
            "expected one that can write it"
        )
    taken, decoys = [ids], {}
    # Most candidates serve; a tokenizer that can tell none apart must not be asked for ever.
    for other in itertools.islice(others, 20 * count):
        wrong = encoder.continuation(lead, written(other))
        size = len(wrong)
        if not any(each[:size] == wrong[: len(each)] for each in taken):
            taken.append(wrong)
            decoys[other] = wrong
        if len(decoys) == count:
            break
    if not decoys:
        raise ValueError(
            f"the tokenizer gives the answer {', '.join(answer)!r} the ids of every other, "
            "expected one that tells them apart"
        )
    return ids, decoys


def written(answer: Answer) -> str:
    """An answer as the prompt goes on with it: ` a`, ` a and b`, ` a, b, and c`."""
    *first, last = answer
    # Models that read English put an `and` before the last.
    joiner = {0: "", 1: " and "}.get(len(first), ", and ")
    return f" {', '.join(first)}{joiner}{last}"


def chat_frame(tokenizer: Any, options: dict[str, Any]) -> tuple[str, str]:
    """The texts of a chat template before the words of one user, and between them and an answer.

    That is its generation prompt, unless an answer does not stand right behind it: where the
    template opens a block of reasoning, puts one or a channel before what the assistant says, or
    has no generation prompt. Then it is what transformers' `continue_final_message` leaves before
    the assistant's words.

    Raises:
        ValueError: no template, one that cannot be written or does not give the user's words once,
            as they are, or that has no place for the beginning of an answer.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"the tokenizer {type(tokenizer).__name__} has no chat template, expected one for "
            "chat prompts: ask for base prompts"
        )

    def written(*roles: str, **how: bool) -> str:
        words = zip(roles, (_CONTENT, _ANSWER), strict=False)
        chat = [{"role": role, "content": content} for role, content in words]
        with _one_day():
            try:
                return tokenizer.apply_chat_template(
                    chat, tokenize=False, **how,
                    **{"date_string": _Day.now().strftime("%d %b %Y")} | options,
                )  # fmt: skip
            except (TemplateError, ValueError, TypeError) as error:
                said = (str(error).splitlines() or [type(error).__name__])[0]
                raise ValueError(
                    f"the chat template cannot be written for {' and '.join(roles)}: {said}"
                ) from error

    before, *rest = written("user", add_generation_prompt=True).split(_CONTENT)
    if len(rest) != 1:
        raise ValueError(
            f"expected a chat template that gives the user's words once, got {len(rest)} times"
        )
    (prompt,) = rest
    has_none = before + _CONTENT + prompt == written("user")
    tags = _REASONING.findall(prompt)
    opens_reasoning = bool(tags) and not tags[-1]
    answer, why = None, "it does not give the assistant's words once, as they are"
    is_blind = False  # whether the assistant's words look like more of the user's
    try:
        whole = written("user", "assistant", continue_final_message=True)
        head, *rest = whole.removesuffix(_ANSWER).split(_CONTENT)
        if whole.endswith(_ANSWER) and head == before and len(rest) == 1 and _ANSWER not in rest[0]:
            answer = rest[0]
        is_blind = whole == written("user", "user", continue_final_message=True)
    except ValueError as error:
        if answer is None and isinstance(error.__cause__, TemplateError):
            why = str(error)
    if answer is not None and answer.startswith(prompt):
        more = answer.removeprefix(prompt)
        return before, answer if has_none or more.strip() else prompt
    if not opens_reasoning and (is_blind or not has_none):
        return before, prompt
    if answer is None or is_blind:
        opened = "opens a block of reasoning" if opens_reasoning else "has no generation prompt"
        raise ValueError(
            f"the chat template {opened}, and has no place for the beginning of an answer "
            f"({'the assistant is the user to it' if is_blind else why}): expected one that goes "
            "on with an assistant's message; ask for base prompts"
        )
    return before, answer


class _Day(datetime):
    """It is always the same day."""

    @classmethod
    def now(cls, tz: Any = None) -> "_Day":
        return cls(2025, 1, 1, tzinfo=tz)


@contextmanager
def _one_day() -> Iterator[None]:
    """Samples are the same on every day, whatever a template writes of the date.

    Templates ask transformers for it, which takes no clock of ours.
    """
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = _Day
    try:
        yield
    finally:
        chat_template_utils.datetime = datetime
