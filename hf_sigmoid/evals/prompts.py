"""Prompts of exactly L tokens, made of token ids.

    L = |special tokens or chat template| + |instruction| + |text with needles| + |question|
        + |answer prefix|

The answer is not part of L: it comes behind the prompt, as in `conversions/haystack.py`;
`Sample.positions` says how many positions both take. Pieces are encoded one by one and their ids
joined, so nothing is cut and nothing is encoded twice. The haystack is a window that begins so
that a sentence starts where the needle goes: length and depth are exact together. Only the
window's outer ends may cut a sentence, and they cut no word where another window would not. Other
needles of the sample go to the sentence start nearest to their depth.

Every random number of a sample comes from (seed, task, L, depth, i): neither the order in which
samples are made nor the other samples change any of it.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hf_sigmoid import text as built_in
from hf_sigmoid.evals import counting, facts
from hf_sigmoid.evals.answers import encode
from hf_sigmoid.evals.drafts import Answer, Draft, ListDraft
from hf_sigmoid.evals.encoding import Encoder, chat_frame
from hf_sigmoid.evals.haystacks import Haystack
from hf_sigmoid.evals.placing import hide, hide_at
from hf_sigmoid.evals.samples import Needle, Sample
from hf_sigmoid.evals.specs import Spec, parse
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
        is_chat = prompt == "chat" or (
            prompt == "auto" and bool(getattr(tokenizer, "chat_template", None))
        )
        self.frame = chat_frame(tokenizer, template_options or {}) if is_chat else None
        self.round_trips = self.encoder.round_trips(facts.HEAD + self.haystack.text[:4000])
        self.decoys, self.repeat = decoys, repeat
        self._start = [] if is_chat else self.encoder.special_prefix()
        self._noises: dict[int, Haystack] = {}
        self._repeated: dict[int, Haystack] = {}

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
            task: `single`, `multikey:8`, …; `specs.py` has the list.
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
            "task": str(spec),
            "length": length,
            "depth": depth,
            "seed": seed,
            "index": index,
            "key": key,
            "is_chat": self.frame is not None,
            "haystack": key,
        }
        if spec.has_depth:
            return self._hide(facts.draft(spec, rng, self.haystack), rng, about)
        return self._list(counting.draft(spec, rng), about)

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
        drafts = facts.shared(
            spec, rng, self.haystack, len(asked), lambda draft: len(self._tail(draft))
        )
        about = {"task": str(spec), "length": length, "seed": seed, "haystack": key}
        head = self._head(drafts[0])
        needles = [self.encoder.written(fact.text) for fact in drafts[0].facts]
        size = len(self._tail(drafts[0]))
        room = self._room(head, size, sum(map(len, needles)), about)
        ids, placed, order = hide_at(
            [*asked, *(rng.random() for _ in needles[len(asked) :])],
            drafts[0].facts, needles, self._text(length),
            exact=0, room=room, offset=len(head), rng=rng, apart=True,
        )  # fmt: skip
        shared, samples = head + ids, []
        for at, (draft, depth) in enumerate(zip(drafts, asked, strict=True)):
            own = [
                replace(needle, supports=draft.facts[fact].supports)
                for needle, fact in zip(placed, order, strict=True)
            ]
            more = {
                "depth": depth,
                "index": index * each + at // len(depths),
                "key": f"{key}/{at}",
                "is_chat": self.frame is not None,
                "shared": len(shared) if len(asked) > 1 else 0,
            }
            tail, wording = self._tail(draft), (draft.answer, draft.decoys)
            pivot = order.index(at)
            samples.append(
                self._sample(draft, wording, shared + tail, own, pivot, {**about, **more})
            )
        return samples

    def _hide(self, draft: Draft, rng: random.Random, about: dict[str, Any]) -> Sample:
        """The needles among the sentences of a window."""
        head, tail = self._head(draft), self._tail(draft)
        needles = [self.encoder.written(fact.text) for fact in draft.facts]
        room = self._room(head, len(tail), sum(map(len, needles)), about)
        ids, placed, pivot = hide(
            draft,
            needles,
            self._noise(about["length"]) if draft.in_noise else self._text(about["length"]),
            room=room,
            depth=rng.random() if about["depth"] is None else about["depth"],
            offset=len(head),
            rng=rng,
        )
        return self._sample(
            draft, (draft.answer, draft.decoys), head + ids + tail, placed, pivot, about
        )

    def _list(self, draft: ListDraft, about: dict[str, Any]) -> Sample:
        """A list of words that fills what the fixed parts leave, to the token."""
        head, tail = self._head(draft), self._tail(draft)
        room = self._room(head, len(tail), 0, about)
        ids: dict[str, list[int]] = {counting.DOT: [self.encoder.dot]}

        def encoded(word: str) -> list[int]:
            if word not in ids:
                ids[word] = self.encoder.written(" " + word)
            return ids[word]

        made = draft.compose(room, lambda word: len(encoded(word)))
        prompt, starts = list(head), []
        for word in made.entries:
            starts.append(len(prompt))
            prompt += encoded(word)
        spans = [
            Needle(
                start=starts[i],
                stop=starts[i] + len(encoded(made.entries[i])),
                depth=(starts[i] - len(head)) / room,
                supports=True,
                text=" " + made.entries[i],
            )
            for i in made.places
        ]
        return self._sample(draft, (made.answer, made.decoys), prompt + tail, spans, None, about)

    def _head(self, draft: Draft | ListDraft) -> list[int]:
        before = self.frame[0] if self.frame else ""
        return self._start + self.encoder.plain(before + draft.head)

    def _tail(self, draft: Draft | ListDraft) -> list[int]:
        """The question, and the beginning of the answer, which a chat gives as the assistant."""
        if self.frame is None:
            return self.encoder.after(_base_tail(draft))
        question = self.encoder.after(f"\n\nQuestion: {draft.question}")
        return question + self.encoder.plain(self.frame[1] + draft.prefix)

    def _room(self, head: list[int], tail: int, taken: int, about: dict[str, Any]) -> int:
        fixed = len(head) + tail + taken
        if about["length"] <= fixed:
            raise ValueError(
                f"the fixed parts of {about['task']} take {fixed} tokens, expected a length "
                f"beyond that, got {about['length']}"
            )
        return about["length"] - fixed

    def _text(self, length: int) -> Haystack:
        """The haystack, repeated for prompts of up to the next power of two if it is shorter."""
        if not self.repeat or length < len(self.haystack.ids) // 2:
            return self.haystack
        bits = (length - 1).bit_length()
        if bits not in self._repeated:
            times = 2 ** (bits + 1) // len(self.haystack.ids) + 1
            self._repeated[bits] = Haystack(self.haystack.text * times, self.encoder.tokenizer)
        return self._repeated[bits]

    def _noise(self, length: int) -> Haystack:
        """Repeated sentences, as many as prompts of up to the next power of two need.

        How many there are decides which windows there are, so it is the length's alone, and not
        that of the longest prompt made so far.
        """
        bits = (length - 1).bit_length()
        if bits not in self._noises:
            repeats = 2**bits // len(self.encoder.after(NOISE)) + 4
            self._noises[bits] = Haystack(NOISE * repeats, self.encoder.tokenizer)
        return self._noises[bits]

    def _sample(
        self,
        draft: Draft | ListDraft,
        wording: tuple[Answer, Iterator[Answer]],
        prompt: list[int],
        needles: list[Needle],
        pivot: int | None,
        about: dict[str, Any],
    ) -> Sample:
        answer, others = wording
        assert len(prompt) == about["length"], (len(prompt), about)
        lead = self.frame[1] + draft.prefix if self.frame else _base_tail(draft)
        ids, parts, decoys = encode(self.encoder, lead, answer, others, self.decoys)
        return Sample(
            **about,
            prompt=prompt,
            answer=ids,
            parts=parts,
            decoys=list(decoys.values()),
            needles=tuple(needles),
            pivot=pivot,
            question=draft.question,
            answer_prefix=draft.prefix,
            answer_texts=answer,
            decoy_texts=tuple(decoys),
        )


def _base_tail(draft: Draft | ListDraft) -> str:
    return f"\n\nQuestion: {draft.question}\nAnswer: {draft.prefix}"
