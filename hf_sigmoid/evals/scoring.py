"""Scores of some samples of one length: right or wrong, how surely, and at what cost.

    teacher    the answer is read behind the prompt: right if each of its tokens is the most
               likely one, which is what greedy decoding would write; `logprob` is the mean over
               its tokens; `rank` is the number of decoys whose tokens together are likelier
    generate   greedy decoding by the model's own `generate`: right if it writes the answer's ids
               first; `contains` is the share of the answer's parts in the new text (RULER's
               measure). Only new ids are looked at

A prompt is read once. Answer and decoys are read behind its keys and values, which are cropped
after each; samples of one haystack read it once for all of their questions. Samples of equal
length make a batch without padding; shorter answers of a batch are filled up behind, where causal
attention does not see it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_sigmoid.compat import CACHE
from hf_sigmoid.evals.attention import Observer
from hf_sigmoid.evals.prefix import Prefix
from hf_sigmoid.evals.samples import Sample

BEYOND = 16  # tokens that may be generated beyond the answer's, for words around it


class NoNumbers(ArithmeticError):
    """A model's logits or losses are NaN or infinite."""


@dataclass
class Scorer:
    """Scores samples with one model, which is in evaluation mode.

    Args:
        tokenizer: decodes what is generated.
        scores: `teacher`, `generate`, or both.
    """

    model: Any
    tokenizer: Any
    scores: Sequence[str] = ("teacher",)

    @torch.no_grad()
    def score(
        self, samples: Sequence[Sample], *, observer: Observer | None = None
    ) -> list[dict[str, Any]]:
        """A result for each of some samples of one length: by score, `tokens`, `attention`.

        Args:
            samples: all of one haystack, which is read once and costs the first, or each of its
                own.
            observer: also record the attention on the needles, as `attention`.

        Raises:
            NoCache: the model cannot go on from a prompt.
            NoNumbers: its logits are not finite.
        """
        shared = samples[0].shared
        if not shared:
            prompts = self._tensor([sample.prompt for sample in samples])
            prefix = Prefix.read(self.model, prompts[:, :-1])
            results = self._behind(prefix, samples, prompts, observer)
            return [result | {"tokens": prefix.tokens // len(samples)} for result in results]
        prefix = Prefix.read(self.model, self._tensor([samples[0].prompt[:shared]]))
        results, before = [], 0
        for sample in samples:
            prompt = self._tensor([sample.prompt])
            with prefix.longer(prompt[:, shared:-1]) as longer:
                (result,) = self._behind(longer, [sample], prompt, observer)
            results.append(result | {"tokens": prefix.tokens - before})
            before = prefix.tokens
        return results

    def _behind(
        self, prefix: Prefix, samples: Sequence[Sample], prompts: Tensor, observer: Observer | None
    ) -> list[dict[str, Any]]:
        """Results of samples whose prompts but for the last id are the prefix."""
        found: dict[str, list[Any]] = {}
        if "teacher" in self.scores:
            found["teacher"] = self._teacher(prefix, samples)
        if "generate" in self.scores:
            found["generate"] = self._generate(prefix, samples, prompts)
        if observer is not None:
            with observer.watching(samples) as seen:
                prefix.logits(self._candidates(samples, [sample.answer for sample in samples]))
            found["attention"] = seen
        return [{name: each[row] for name, each in found.items()} for row in range(len(samples))]

    def _teacher(self, prefix: Prefix, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        own = self._judge(prefix, samples, [sample.answer for sample in samples])
        above = [0] * len(samples)
        for number in range(max(len(sample.decoys) for sample in samples)):
            # Of the rows that have fewer decoys, the first once more.
            decoys = [(sample.decoys[number:] or sample.decoys)[0] for sample in samples]
            judged = self._judge(prefix, samples, decoys)
            for row, sample in enumerate(samples):
                above[row] += number < len(sample.decoys) and judged[row][1] > own[row][1]
        return [
            {
                "correct": right,
                "logprob": total / len(sample.answer),
                "rank": rank,
                "candidates": 1 + len(sample.decoys),
            }
            for sample, (right, total), rank in zip(samples, own, above, strict=True)
        ]

    def _judge(
        self, prefix: Prefix, samples: Sequence[Sample], answers: Sequence[list[int]]
    ) -> list[tuple[bool, float]]:
        """The verdict on each row's ids behind its prompt."""
        judged = judge(prefix.logits(self._candidates(samples, answers)), answers)
        if not all(math.isfinite(total) for _, total in judged):
            raise NoNumbers("the log-probability of an answer is not a number")
        return judged

    def _candidates(self, samples: Sequence[Sample], answers: Sequence[list[int]]) -> Tensor:
        """The last id of each prompt and an answer but for its last id."""
        rows = [[s.prompt[-1], *answer[:-1]] for s, answer in zip(samples, answers, strict=True)]
        return self._tensor(filled_up(rows))

    def _generate(
        self, prefix: Prefix, samples: Sequence[Sample], prompts: Tensor
    ) -> list[dict[str, Any]]:
        if prefix.logits(prompts[:, -1:]).isnan().any():
            raise NoNumbers("the logits behind a prompt are not numbers")
        length = max(len(sample.answer) for sample in samples) + BEYOND
        new = generated(self.model, prefix, prompts, length)
        prefix.tokens += new.numel()
        results = []
        for sample, ids in zip(samples, new.tolist(), strict=True):
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            found = sum(part.casefold() in text.casefold() for part in sample.answer_texts)
            correct = ids[: len(sample.answer)] == sample.answer
            contains = found / len(sample.answer_texts)
            results.append({"correct": correct, "contains": contains, "text": text})
        return results

    def _tensor(self, rows: Sequence[list[int]]) -> Tensor:
        return torch.tensor(rows, device=self.model.device)


def judge(logits: Tensor, answers: Sequence[list[int]]) -> list[tuple[bool, float]]:
    """A verdict on each answer: are all its tokens the likeliest, and their log-probability.

    Args:
        logits: `[rows, ≥ answer, vocabulary]` in float32, which predict the answers' tokens.
    """
    logprobs, judged = logits.log_softmax(-1), []
    for row, answer in enumerate(answers):
        ids = torch.tensor(answer, device=logprobs.device)
        mine = logprobs[row, : len(answer)]
        total = math.fsum(mine.gather(-1, ids[:, None])[:, 0].tolist())
        judged.append((bool((mine.argmax(-1) == ids).all()), total))
    return judged


def filled_up(rows: Sequence[list[int]]) -> list[list[int]]:
    """Rows of one length: shorter ones go on with their last id, which no earlier one sees."""
    size = max(map(len, rows))
    return [row + [row[-1]] * (size - len(row)) for row in rows]


def generated(model: Any, prefix: Prefix, prompts: Tensor, length: int) -> Tensor:
    """New ids `[rows, ≤ length]` of greedy decoding, without any rule of the model's own."""
    end = model.generation_config.eos_token_id
    first = end[0] if isinstance(end, list) else end
    config = GenerationConfig(
        max_new_tokens=length, do_sample=False, num_beams=1, repetition_penalty=1.0,
        no_repeat_ngram_size=0, eos_token_id=end, pad_token_id=first or 0,
    )  # fmt: skip
    # The model's own sampling options would warn of having no effect.
    before, model.generation_config = model.generation_config, config
    options = {"attention_mask": torch.ones_like(prompts), "generation_config": config}
    try:
        with prefix.borrowed() as cache:
            ids = model.generate(prompts, **{CACHE: cache}, **options)
    finally:
        model.generation_config = before
    return ids[:, prompts.shape[1] :]
