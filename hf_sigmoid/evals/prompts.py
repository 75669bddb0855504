"""Prompts of exactly L tokens, made of token ids.

    L = |special tokens or chat template| + |instruction| + |text with needles| + |question|
        + |answer prefix|

The answer is not part of L: it comes behind the prompt; `Sample.positions` says how many positions
both take. Pieces are encoded one by one and their ids joined, so nothing is cut and nothing is
encoded twice. The haystack is a window that begins so that a sentence starts where the needle
goes: length and depth are exact together. Only the window's outer ends may cut a sentence, and
they cut no word where another window would not. Other needles of the sample go to the sentence
start nearest to their depth.

Every random number of a sample comes from (seed, task, L, depth, i): neither the order in which
samples are made nor the other samples change any of it.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hf_sigmoid import text as built_in
from hf_sigmoid.evals import tasks
from hf_sigmoid.evals.encoding import Encoder, chat_frame, encode_answer
from hf_sigmoid.evals.haystack import Haystack, draw_depths, hide
from hf_sigmoid.evals.samples import Needle, Sample
from hf_sigmoid.evals.templates import ListTemplate, Spec, Template, WordList, parse
from hf_sigmoid.evals.words import NOISE

PROMPTS = ("auto", "base", "chat")


class PromptBuilder:
    """Makes the samples of every task, for one tokenizer and one haystack.

    Args:
        tokenizer: a fast tokenizer.
        haystack: any text; the built-in novel by default.
        prompt: `base`, `chat` (the tokenizer's template), or `auto`: chat if there is a template.
        decoys: at most so many wrong answers a sample; a closed set may have fewer.
        template_options: for the template, such as `{"enable_thinking": False}`.
        repeat: a haystack too short for a prompt is repeated, as often as the length asks for.

    `round_trips` says whether decoding gives the text back. Without it the prompt's ids still
    are what is described here, but encoding their text again may give others: use the ids.
    `frame` is the chat template's text before and behind the user's words, None of base prompts.

    Raises:
        ValueError: a slow tokenizer, chat without a template, a haystack that is empty or has no
            sentences, a number of decoys below 1.
    """

    def __init__(
        self,
        tokenizer: Any,
        haystack: str | None = None,
        *,
        prompt: str = "auto",
        decoys: int = 8,
        template_options: dict[str, Any] | None = None,
        repeat: bool = False,
    ):
        if prompt not in PROMPTS:
            raise ValueError(f"expected a prompt of {', '.join(PROMPTS)}, got {prompt!r}")
        if decoys < 1:
            raise ValueError(f"expected at least 1 decoy, got {decoys}")
        self.haystack = Haystack(built_in.austen() if haystack is None else haystack, tokenizer)
        self.encoder = Encoder(tokenizer)
        has_template = bool(getattr(tokenizer, "chat_template", None))
        is_chat = prompt == "chat" or (prompt == "auto" and has_template)
        self.frame = chat_frame(tokenizer, template_options or {}) if is_chat else None
        self.round_trips = self.encoder.round_trips(Template.head + self.haystack.text[:4000])
        self.decoys, self.repeat = decoys, repeat
        self._start = [] if is_chat else self.encoder.special_prefix()
        self._repeated: dict[tuple[str, int], Haystack] = {}

    def build(
        self,
        task: str | Spec,
        *,
        length: int,
        depth: float | None = None,
        seed: int = 0,
        index: int = 0,
    ) -> Sample:
        """Sample `index` of a cell.

        Args:
            task: `single`, `multikey:8`, …; `templates.py` has the list.
            length: tokens of the prompt.
            depth: 0 (start) to 1 (end) of the haystack; drawn at random if None. There stands the
                needle asked for; of `multiquery` and `multivalue` any of them, of `vt` the first
                of the chain, of `babi` the last fact that supports the answer. A list of words
                has no depth.

        Raises:
            ValueError: an unknown task, a length that the fixed parts exceed, a haystack shorter
                than the window, a depth outside 0 … 1 or of a list, an answer that the tokenizer
                has no tokens for.
        """
        spec = parse(task) if isinstance(task, str) else task
        if depth is not None and not spec.has_depth:
            raise ValueError(f"{spec} is a list of words: expected no depth, got {depth}")
        if depth is not None and not 0 <= depth <= 1:
            raise ValueError(f"expected a depth from 0 to 1, got {depth}")
        named = "random" if depth is None else f"{depth:.6f}"
        key = f"{seed}/{spec}/{length}/{named}/{index}"
        rng = random.Random(key)  # a text seeds by its SHA-512: the same in every process
        about = {
            "task": str(spec), "length": length, "depth": depth, "seed": seed, "index": index,
            "key": key, "haystack": key,
        }  # fmt: skip
        made = tasks.template(spec, rng, self.haystack)
        head, tail = self._head(made), self._tail(made)
        if isinstance(made, ListTemplate):
            room = self._room(about, head, tail)
            listed, ids, placed = self._listed(made, room, len(head))
            return self._sample(made, listed, head + ids + tail, placed, None, about)
        needles = [self.encoder.written(fact.text) for fact in made.facts]
        room = self._room(about, head, tail, *needles)
        text = self._noise(length) if made.in_noise else self._text(length)
        depths, pivot = draw_depths(made, rng.random() if depth is None else depth, rng)
        ids, placed, order = hide(
            depths, made.facts, needles, text, exact=pivot, room=room, offset=len(head), rng=rng
        )
        return self._sample(made, made, head + ids + tail, placed, order.index(pivot), about)

    def build_shared(
        self,
        task: str | Spec,
        *,
        length: int,
        depths: Sequence[float],
        each: int = 1,
        seed: int = 0,
        index: int = 0,
    ) -> list[Sample]:
        """Questions about one haystack, `each` at every depth: their prompts differ at the end.

        Of the `multikey` keys, as many as are asked for stand at the depths, the rest at random,
        no two at one sentence where another is near by. The first stands exactly at its depth,
        the others at the sentence nearest to theirs: `realised_depth` says where. Their random
        numbers come from (seed, task, L, all depths, each, index).

        Args:
            index: of the haystack; its samples have the indices index · each and following.

        Raises:
            ValueError: as `build`; a task with one question, or with fewer keys than questions.
        """
        spec = parse(task) if isinstance(task, str) else task
        if not depths or each < 1 or not all(0 <= depth <= 1 for depth in depths):
            raise ValueError(f"expected depths from 0 to 1 and each ≥ 1, got {depths} and {each}")
        named = ",".join(f"{depth:.6f}" for depth in depths)
        key = f"{seed}/{spec}/{length}/{named} x {each}/{index}"
        rng = random.Random(key)
        asked = [*depths] * each
        made = tasks.shared(
            spec, rng, self.haystack, len(asked), lambda template: len(self._tail(template))
        )
        about = {"task": str(spec), "length": length, "seed": seed, "haystack": key}
        head, facts = self._head(made[0]), made[0].facts
        needles = [self.encoder.written(fact.text) for fact in facts]
        room = self._room(about, head, self._tail(made[0]), *needles)
        others = [rng.random() for _ in needles[len(asked) :]]
        ids, placed, order = hide(
            [*asked, *others], facts, needles, self._text(length),
            exact=0, room=room, offset=len(head), rng=rng, apart=True,
        )  # fmt: skip
        samples = []
        for at, (template, depth) in enumerate(zip(made, asked, strict=True)):
            own = [
                replace(needle, supports=template.facts[fact].supports)
                for needle, fact in zip(placed, order, strict=True)
            ]
            more = {
                "depth": depth, "index": index * each + at // len(depths), "key": f"{key}/{at}",
                "shared": len(head + ids) if len(asked) > 1 else 0,
            }  # fmt: skip
            prompt = head + ids + self._tail(template)
            samples.append(
                self._sample(template, template, prompt, own, order.index(at), about | more)
            )
        return samples

    def _listed(
        self, made: ListTemplate, room: int, offset: int
    ) -> tuple[WordList, list[int], list[Needle]]:
        """A list of words that fills its room to the token, its ids, and the words asked for."""
        known: dict[str, list[int]] = {tasks.DOT: [self.encoder.dot]}

        def encoded(word: str) -> list[int]:
            if word not in known:
                known[word] = self.encoder.written(" " + word)
            return known[word]

        listed = made.compose(room, lambda word: len(encoded(word)))
        ids: list[int] = []
        starts = []
        for word in listed.entries:
            starts.append(len(ids))
            ids += encoded(word)
        placed = []
        for place in listed.places:
            start, word = starts[place], listed.entries[place]
            stop = offset + start + len(encoded(word))
            placed.append(Needle(offset + start, stop, start / room, True, " " + word))
        return listed, ids, placed

    def _head(self, made: Template | ListTemplate) -> list[int]:
        before = self.frame[0] if self.frame else ""
        return self._start + self.encoder.plain(before + made.head)

    def _tail(self, made: Template | ListTemplate) -> list[int]:
        """The question, and the beginning of the answer, which a chat gives as the assistant."""
        if self.frame is None:
            return self.encoder.after(self._lead(made))
        return self.encoder.after(f"\n\nQuestion: {made.question}") + self.encoder.plain(
            self._lead(made)
        )

    def _lead(self, made: Template | ListTemplate) -> str:
        """The words that the answer is encoded behind."""
        if self.frame:
            return self.frame[1] + made.prefix
        return f"\n\nQuestion: {made.question}\nAnswer: {made.prefix}"

    def _room(self, about: dict[str, Any], *parts: list[int]) -> int:
        fixed = sum(map(len, parts))
        if about["length"] <= fixed:
            raise ValueError(
                f"the fixed parts of {about['task']} take {fixed} tokens, expected a length "
                f"beyond that, got {about['length']}"
            )
        return about["length"] - fixed

    def _text(self, length: int) -> Haystack:
        """The haystack, repeated for prompts of up to the next power of two if it is shorter."""
        size = len(self.haystack.ids)
        if not self.repeat or length < size // 2:
            return self.haystack
        return self._times(self.haystack.text, 2 * _power_of_two(length) // size + 1)

    def _noise(self, length: int) -> Haystack:
        """Repeated sentences, as many as prompts of up to the next power of two need.

        How many there are decides which windows there are, so it is the length's alone, and not
        that of the longest prompt made so far.
        """
        return self._times(NOISE, _power_of_two(length) // len(self.encoder.after(NOISE)) + 4)

    def _times(self, text: str, times: int) -> Haystack:
        if (text, times) not in self._repeated:
            self._repeated[text, times] = Haystack(text * times, self.encoder.tokenizer)
        return self._repeated[text, times]

    def _sample(
        self,
        made: Template | ListTemplate,
        asked: Template | WordList,
        prompt: list[int],
        needles: list[Needle],
        pivot: int | None,
        about: dict[str, Any],
    ) -> Sample:
        assert len(prompt) == about["length"], (len(prompt), about)
        ids, decoys = encode_answer(
            self.encoder, self._lead(made), asked.answer, asked.decoys, self.decoys
        )
        return Sample(
            **about, is_chat=self.frame is not None, prompt=prompt, answer=ids,
            decoys=list(decoys.values()), needles=tuple(needles), pivot=pivot,
            question=made.question, answer_prefix=made.prefix, answer_texts=asked.answer,
            decoy_texts=tuple(decoys),
        )  # fmt: skip


def _power_of_two(length: int) -> int:
    """The next one."""
    return 1 << (length - 1).bit_length()
